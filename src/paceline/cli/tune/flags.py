"""The options of `paceline tune`. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.cli.sim.flags import LINK_NAMES
from paceline.config.options import CheckedOptions, option

DEFAULT_REQUESTS = 400
HELP = """
Find the server settings that keep an SLO at the highest rate.

Searches in the simulator, with step times of your machine. Prints the best settings as flags of `paceline serve`.

  paceline serve --run-log run.jsonl.gz     # a few minutes of traffic
  paceline sim --calibrate run.jsonl.gz     # writes run.costs.json
  paceline tune --cost-model run.costs.json --slo ttft_p99=1s,itl_p99=50ms

It varies the tokens and rows of a step, the share of a step one prompt may take, the pace of steps, and the policy.
With --rate it looks for the settings with the most room below the SLO at that rate. --verify sends the workload to a
running server and prints measured beside predicted times; with an admin key (PACELINE_ADMIN_KEY) it also names settings
of the server that differ. Ctrl-C prints the best so far.

  paceline tune --devices 8 --model llama-3.1-70b --slo itl_p99=50ms

--devices says into how many ranks and replicas they are best divided, with the settings as they are.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(CheckedOptions):
    """What `paceline tune` takes."""

    PANEL: ClassVar = "Search and results"

    slo: str = option(
        "",
        "times to keep, by percentile, such as ttft_p99=1s,itl_p99=50ms,e2e_p50=20s",
        panel="Goal",
        metavar="TIME_PXX=BOUND,...",
    )
    cost_model: str = option(
        "", "step times from a fitted cost model or a run log", panel="Machine", metavar="FILE"
    )
    model: str = option("llama-3.1-8b", "shape of the model, without a cost model", panel="Machine")
    device: str = option("h200", "device, without a cost model", panel="Machine")
    devices: int = option(1, "devices to divide into ranks and replicas", low=1, high=1024, panel="Machine")
    link: str = option("nvlink4", "between the devices of one replica", choices=LINK_NAMES, panel="Machine")
    trace: str = option(
        "azure-conv",
        "azure-conv, azure-code, mooncake, multi-tenant, mm-image, fixed:PROMPTxOUTPUT, uniform:LOW-HIGHxLOW-HIGH, "
        "or a trace file",
        panel="Workload",
        metavar="NAME|FILE",
    )
    num_requests: int | None = option(
        None,
        "use only the first N requests",
        low=20,
        panel="Workload",
        default_text=f"{DEFAULT_REQUESTS}, or all of a shorter file",
    )
    arrivals: str = option(
        "recorded",
        "recorded, poisson, gamma:CV or onoff:ON_S,OFF_S[,BURST_FACTOR]; scaled to each rate",
        panel="Workload",
    )
    rate: float | None = option(
        None,
        "requests per second that must be served",
        low=1e-4,
        high=1e6,
        panel="Goal",
        default_text="the highest that keeps the SLO",
    )
    seconds: float = option(60.0, "time for the search, in seconds", low=0.1, high=86_400.0)
    max_trials: int = option(400, "most simulations", low=1, high=1_000_000)
    top: int = option(5, "number of settings to show", low=1, high=50)
    seed: int = option(0, "seed of everything that is random", low=0, panel="Workload")
    verify: str = option("", "server with the settings found, to send the workload to", metavar="URL")
    verify_seconds: float = option(60.0, "duration of --verify, in seconds", low=1.0, high=3600.0)
    json: str = option("", "write everything that was tried to this file", metavar="FILE")
