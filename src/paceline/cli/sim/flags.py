"""The options of `paceline sim`, declared once: its own here, the engine's by name from `config`.

Owns names, help texts, and what is said where nothing is given. Imports nothing heavy: help and mistakes are
answered before numpy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.flags import DIAL, FORMING, POLICY, Flag, Panel, depth_panel
from paceline.cli.show import SHOW
from paceline.config.engine import KVConfig, SchedulerConfig
from paceline.config.options import check_options, option
from paceline.core.sampling import MAX_WISH_MS

BUILT_IN_REQUESTS = 2_000
ROUTER_NAMES = ("round-robin", "least-loaded", "prefix-aware")
SWEEP_FACTORS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)

HELP = f"""
Simulate a deployment, without a model or a GPU.

Runs the real scheduler, KV cache and engine on a virtual clock, with step times from a cost model, and prints a column
of measures for each mode. The same command gives the same numbers.

\b
  paceline sim --mode continuous,dynamic,static --rate 20
  paceline sim --trace requests.csv --rate 5,10,20,40 --plot curve.png
  paceline sim --mode continuous,static --rate 20 --ui

--plot draws throughput and latency over the rate, with the knee; around a single rate it also runs
{", ".join(f"{factor:g}" for factor in SWEEP_FACTORS)} times that rate. curve.timeline.png shows the batch over time at
the highest rate given.

\b
  paceline sim --calibrate run.jsonl.gz        # a log of serve --run-log
  paceline sim --compare other.jsonl.gz --cost-model run.costs.json

--calibrate fits a cost model to run logs, prints how well it fits and writes run.costs.json for --cost-model.
--compare repeats the requests of a recorded run in the simulator and prints the error.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """What `paceline sim` takes beside the engine's options. Texts with commas are taken apart later."""

    trace: str = option(
        "azure-conv",
        "azure-conv, azure-code, mooncake, multi-tenant, fixed:PROMPTxOUTPUT, uniform:LOW-HIGHxLOW-HIGH, "
        "or a trace file",
        basic=True,
    )
    num_requests: int | None = option(None, "simulate only the first N requests", low=1, basic=True)
    rate: str = option(
        "",
        "requests per second, instead of the recorded arrivals; several, separated by commas, give a curve",
        basic=True,
    )
    speed: float = option(1.0, "divide the recorded times by this; 2: twice as fast", low=1e-6, high=1e6)
    arrivals: str = option(
        "recorded",
        "recorded, poisson, constant, gamma:CV, onoff:ON_S,OFF_S[,BURST_FACTOR] or all-at-once",
        basic=True,
    )
    priorities: str = option(
        "none",
        "priorities of requests: none (all equal), tenant (its number), class (from the tenant's name), random:LEVELS",
    )
    deadline_ms: int | None = option(
        None, "milliseconds after arrival at which requests are stopped", low=1, high=MAX_WISH_MS, kind=int
    )
    ttft_slo_ms: int | None = option(
        None,
        "time to the first token that requests ask for, in milliseconds",
        low=1,
        high=MAX_WISH_MS,
        kind=int,
    )
    itl_slo_ms: int | None = option(
        None, "time between tokens that requests ask for, in milliseconds", low=1, high=MAX_WISH_MS, kind=int
    )
    on_infeasible: str = option(
        "try", "what to do with requests whose times cannot be met", choices=("try", "refuse")
    )
    forecasts: bool = option(
        False, "forecast the first token of every request and show the error of the forecasts"
    )

    modes: str = option(
        "continuous",
        "batching modes to compare, separated by commas: continuous, dynamic, static",
        flag="--mode",
        basic=True,
    )
    model: str = option("llama-3.1-8b", "shape of the model", basic=True)
    device: str = option("h200", "device of each replica", basic=True)
    cost_model: str = option(
        "", "step times from a fitted cost model or a run log, instead of the roofline model", basic=True
    )
    host_step_s: float | None = option(
        None,
        "host time to plan a step, in seconds; overlapped with the device unless --depth is 0",
        low=0.0,
        high=10.0,
        kind=float,
    )
    calibrate: str = option(
        "", "fit a cost model to these run logs and write it; simulates nothing", basic=True
    )
    save_costs: str = option("", "file for the cost model of --calibrate")
    compare: str = option(
        "",
        "repeat a run log, or a result of bench serve, in the simulator and print the error of each measure",
        basic=True,
    )
    replicas: int = option(1, "engines behind the router", low=1, high=10_000, basic=True)
    router: str = option("least-loaded", "how the router picks an engine for a request", choices=ROUTER_NAMES)

    seed: int = option(0, "seed of everything that is random", low=0)
    faults: str = option(
        "", "rates of injected faults, such as aborts=0.1,bursts=0.1; also stalls, alloc, preempt"
    )
    check: bool = option(False, "check all invariants twice in every step; about ten times slower")

    slo: str = option("", "goodput: bounds in seconds: ttft=1.0,itl=0.05,e2e=30", basic=True)
    device_hour_price: float | None = option(
        None, "price of a device per hour, for the cost of tokens", low=0.0
    )
    json: str = option("", "write measures, settings and seed to this file", basic=True)
    plot: str = option("", "write a throughput-latency plot and a timeline (PNG)", basic=True)
    log: str = option("", "write the run log; one mode, one rate, one replica", basic=True)

    def __post_init__(self) -> None:
        check_options(self)


PANELS = (
    Panel(
        title="Workload",
        config=SimOptions,
        flags=(
            Flag(name="trace", metavar="NAME|FILE"),
            Flag(name="num_requests", default=f"built-in workloads: {BUILT_IN_REQUESTS}; a file: all"),
            Flag(name="rate", metavar="R[,R...]", default="as recorded"),
            Flag(name="speed"),
            Flag(name="arrivals"),
            Flag(name="priorities"),
            Flag(name="deadline_ms", default="no deadline"),
            Flag(name="ttft_slo_ms", default="any time"),
            Flag(name="itl_slo_ms", default="any time"),
            Flag(name="on_infeasible"),
        ),
    ),
    Panel(
        title="Deployment",
        config=SimOptions,
        flags=(
            Flag(name="modes", metavar="MODE[,MODE...]"),
            Flag(name="model"),
            Flag(name="device"),
            Flag(name="cost_model", metavar="FILE"),
            Flag(name="host_step_s", default="0.0003, or from the cost model"),
            Flag(name="replicas"),
            Flag(name="router"),
        ),
    ),
    Panel(
        title="Calibration",
        config=SimOptions,
        flags=(
            Flag(name="calibrate", metavar="LOG[,LOG...]"),
            Flag(name="save_costs", metavar="FILE", default="name of the log with .costs.json"),
            Flag(name="compare", metavar="LOG|JSON"),
        ),
    ),
    Panel(
        title="Batches",
        config=SchedulerConfig,
        optional=True,
        flags=(
            Flag(name="max_num_seqs"),
            Flag(name="max_num_batched_tokens"),
            Flag(name="max_num_prompt_tokens"),
            Flag(name="step_target_ms", default="none"),
            Flag(name="step_stretch"),
            Flag(name="step_patience_s"),
            *DIAL,
            Flag(name="max_model_len", default="what fits into the KV cache"),
            *POLICY,
            *FORMING,
            Flag(name="watermark"),
            Flag(name="preemption"),
            Flag(name="max_preemptions"),
            Flag(name="max_queue", default="all"),
            Flag(name="max_queue_tokens", default="all"),
            Flag(name="defer_shared_prefix"),
        ),
    ),
    Panel(
        title="KV cache and engine",
        config=KVConfig,
        optional=True,
        flags=(
            Flag(name="block_size", default="64 on a GPU, 16 on a CPU"),
            Flag(name="num_blocks", also=("--num-blocks",), default="what fits into the device's memory"),
            Flag(
                name="num_host_blocks",
                also=("--host-blocks",),
                default="0; with --preemption swap as on the device",
            ),
            Flag(name="enable_prefix_caching", default="if the workload has prefixes"),
        ),
    ),
    depth_panel("KV cache and engine"),
    Panel(
        title="Chance and faults",
        config=SimOptions,
        flags=(
            Flag(name="seed"),
            Flag(name="faults", metavar="FAULT=SHARE,..."),
            Flag(name="check"),
        ),
    ),
    Panel(
        title="Results",
        config=SimOptions,
        flags=(
            Flag(name="slo", metavar="BOUND=SECONDS,..."),
            Flag(name="forecasts"),
            Flag(name="device_hour_price", metavar="PRICE"),
            Flag(name="json", metavar="FILE"),
            Flag(name="plot", metavar="FILE.png"),
            Flag(name="log", metavar="FILE"),
        ),
    ),
    SHOW,
)
