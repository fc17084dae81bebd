"""The options of `paceline tune`, declared once. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.options import Flag, Panel
from paceline.config import check_options, option

HELP = """
Find the settings of a server that keep an SLO at the highest rate: a search in the simulator, with step times of your
machine. Prints the best few and the flags of `paceline serve`.

\b
  paceline serve --run-log run.jsonl.gz                    # some minutes of traffic, then stop it
  paceline sim --calibrate run.jsonl.gz                    # writes run.costs.json
  paceline tune --cost-model run.costs.json --trace requests.csv --slo ttft_p99=1s,itl_p99=50ms

Tried are the tokens and rows of a step, the share of a step one prompt may take, the pace of steps, and the policy.
With --rate the rate is given, and the settings with the most room below the SLO are looked for. --verify sends the
workload at the rate found to a server that runs, and prints what was seen beside what was predicted; with an admin key
(PACELINE_ADMIN_KEY) it also says where the server's settings are not those found. Ctrl-C prints the best so far.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What `paceline tune` takes."""

    slo: str = option("", "what to keep: times of percentiles, such as ttft_p99=1s,itl_p99=50ms,e2e_p50=20s")
    cost_model: str = option("", "step times from a fitted cost model, or fitted to a run log")
    model: str = option("llama-3.1-8b", "shape of the model, where there is no cost model")
    device: str = option("h200", "device, where there is no cost model")
    trace: str = option(
        "azure-conv",
        "azure-conv, azure-code, mooncake, multi-tenant, fixed:PROMPTxOUTPUT, uniform:LOW-HIGHxLOW-HIGH, or "
        "the path of a trace file",
    )
    num_requests: int | None = option(None, "only the first so many requests", low=20, kind=int)
    arrivals: str = option(
        "recorded", "recorded, poisson, gamma:CV or onoff:ON_S,OFF_S[,BURST_FACTOR]; scaled to each rate"
    )
    rate: float | None = option(
        None, "requests per second that must be served", low=1e-4, high=1e6, kind=float
    )
    seconds: float = option(60.0, "time for the search", low=0.1, high=86_400.0)
    max_trials: int = option(400, "most simulations", low=1, high=1_000_000)
    top: int = option(5, "settings to show", low=1, high=50)
    seed: int = option(0, "decides everything that is drawn", low=0)
    verify: str = option("", "address of a server with the settings found, to send the workload to")
    verify_seconds: float = option(60.0, "seconds of requests for --verify", low=1.0, high=3600.0)
    json: str = option("", "write everything that was tried to this file")

    def __post_init__(self) -> None:
        check_options(self)


DEFAULT_REQUESTS = 400

PANELS = (
    Panel(
        title="Goal",
        config=TuneOptions,
        flags=(
            Flag(name="slo", metavar="TIME_PXX=BOUND,..."),
            Flag(name="rate", default="the highest that keeps the SLO is looked for"),
        ),
    ),
    Panel(
        title="Workload",
        config=TuneOptions,
        flags=(
            Flag(name="trace", metavar="NAME|FILE"),
            Flag(name="num_requests", default=f"{DEFAULT_REQUESTS}, or all of a shorter file"),
            Flag(name="arrivals"),
            Flag(name="seed"),
        ),
    ),
    Panel(
        title="Machine",
        config=TuneOptions,
        flags=(Flag(name="cost_model", metavar="FILE"), Flag(name="model"), Flag(name="device")),
    ),
    Panel(
        title="Search and results",
        config=TuneOptions,
        flags=(
            Flag(name="seconds"),
            Flag(name="max_trials"),
            Flag(name="top"),
            Flag(name="json", metavar="FILE"),
            Flag(name="verify", metavar="URL"),
            Flag(name="verify_seconds"),
        ),
    ),
)
