"""The options of `paceline sim`, declared once: its own here, the engine's by name from `config`.

Owns names, help texts, and what is said where nothing is given. Imports nothing heavy: help and mistakes are
answered before numpy is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.options import Flag, Panel
from paceline.cli.shared_flags import DIAL, FORMING, POLICY, depth_panel
from paceline.cli.show import SHOW
from paceline.config import KVConfig, SchedulerConfig, check_options, option
from paceline.core.sampling import MAX_WISH_MS

BUILT_IN_REQUESTS = 2_000
ROUTER_NAMES = ("round-robin", "least-loaded", "prefix-aware")
SWEEP_FACTORS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)

HELP = f"""
Simulate a deployment: the real scheduler, KV cache and engine on a virtual clock, with step times from a cost
model. Prints a column of measures for each mode.

\b
  paceline sim --mode continuous,dynamic,static --rate 20
  paceline sim --trace requests.csv --rate 5,10,20,40 --plot curve.png --json curve.json
  paceline sim --mode continuous,static --rate 20 --ui

--plot draws throughput and latency over the rate, with the knee. Around a single rate, or around recorded
arrivals, it runs {", ".join(f"{factor:g}" for factor in SWEEP_FACTORS)} times that rate as well. Beside it,
curve.timeline.png shows the batch over time at the rate given (the highest of several). --ui plays the runs on the
live page when they are done. The same command gives the same numbers.

\b
  paceline sim --calibrate run.jsonl.gz                          # a cost model from a run of `serve --run-log`
  paceline sim --compare other.jsonl.gz --cost-model run.costs.json

--calibrate fits step times and what the host adds, says how well they fit and writes run.costs.json, which
--cost-model takes. Logs of several kinds of traffic, separated by commas, make one model of all. --compare repeats
the requests of a recorded run in the simulator and prints how far off it is.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """What `paceline sim` takes beside the engine's options. Texts with commas are taken apart later."""

    trace: str = option(
        "azure-conv",
        "azure-conv, azure-code, mooncake, multi-tenant, fixed:PROMPTxOUTPUT, uniform:LOW-HIGHxLOW-HIGH, or "
        "the path of a trace file",
    )
    num_requests: int | None = option(None, "only the first so many requests", low=1)
    rate: str = option(
        "",
        "requests per second: redraws the arrivals (Poisson unless --arrivals says more); several rates, "
        "separated by commas, give a curve",
    )
    speed: float = option(1.0, "divide the recorded times; 2 is twice as fast", low=1e-6, high=1e6)
    arrivals: str = option(
        "recorded", "recorded, poisson, constant, gamma:CV, onoff:ON_S,OFF_S[,BURST_FACTOR] or all-at-once"
    )
    priorities: str = option(
        "none",
        "of requests: none (all equal), tenant (its number), class (of the name of its tenant), random:LEVELS",
    )
    deadline_ms: int | None = option(
        None, "milliseconds after arrival at which requests end", low=1, high=MAX_WISH_MS, kind=int
    )
    ttft_slo_ms: int | None = option(
        None, "milliseconds in which requests want their first token", low=1, high=MAX_WISH_MS, kind=int
    )
    itl_slo_ms: int | None = option(
        None, "milliseconds that requests want between tokens", low=1, high=MAX_WISH_MS, kind=int
    )
    on_infeasible: str = option(
        "try", "what becomes of requests whose times cannot be kept", choices=("try", "refuse")
    )
    forecasts: bool = option(
        False, "ask of every request when its first token would come, and show how wrong that was"
    )

    modes: str = option(
        "continuous", "continuous, dynamic, static; several, separated by commas, are compared", flag="--mode"
    )
    model: str = option("llama-3.1-8b", "shape of the model")
    device: str = option("h200", "device of each replica")
    cost_model: str = option(
        "", "step times from a fitted cost model, or fitted to a run log, instead of the roofline"
    )
    host_step_s: float | None = option(
        None,
        "host time to plan a step; hidden behind the device unless --depth is 0",
        low=0.0,
        high=10.0,
        kind=float,
    )
    calibrate: str = option(
        "", "fit one cost model to these run logs, write it to a file, and simulate nothing"
    )
    save_costs: str = option("", "where --calibrate writes the cost model")
    compare: str = option(
        "",
        "repeat the requests of a run log, or of a result of bench serve, in the simulator and print the error of each "
        "measure",
    )
    replicas: int = option(1, "engines behind the router", low=1, high=10_000)
    router: str = option("least-loaded", "who gets the next request", choices=ROUTER_NAMES)

    seed: int = option(0, "decides everything that is drawn", low=0)
    faults: str = option(
        "", "shares of things that go wrong: aborts=0.1,bursts=0.1,stalls=0.01,alloc=0.02,preempt=0.02"
    )
    check: bool = option(False, "check every invariant after every half of a step (about ten times slower)")

    slo: str = option("", "bounds in seconds that a good request keeps: ttft=1.0,itl=0.05,e2e=30")
    device_hour_price: float | None = option(
        None, "price of a device for an hour, for the cost of tokens", low=0.0
    )
    json: str = option("", "write all measures, settings and the seed to this file")
    plot: str = option("", "write the throughput-latency plot and a timeline (PNG)")
    log: str = option("", "write the run log of the engine (one mode, one rate, one replica)")

    def __post_init__(self) -> None:
        check_options(self)


PANELS = (
    Panel(
        title="Workload",
        config=SimOptions,
        flags=(
            Flag(name="trace", metavar="NAME|FILE"),
            Flag(name="num_requests", default=f"{BUILT_IN_REQUESTS} of a built-in workload, all of a file"),
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
            Flag(name="host_step_s", default="0.0003, or what the cost model says"),
            Flag(name="replicas"),
            Flag(name="router"),
        ),
    ),
    Panel(
        title="Calibration",
        config=SimOptions,
        flags=(
            Flag(name="calibrate", metavar="LOG[,LOG...]"),
            Flag(name="save_costs", metavar="FILE", default="the log's name, ending in .costs.json"),
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
            Flag(name="max_model_len", default="the longest request that fits into the KV cache"),
            *POLICY,
            *FORMING,
            Flag(name="watermark"),
            Flag(name="preemption"),
            Flag(name="max_preemptions"),
            Flag(name="max_queue", default="the whole workload"),
            Flag(name="max_queue_tokens", default="the whole workload"),
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
                default="0; as many as on the device with --preemption swap",
            ),
            Flag(name="enable_prefix_caching", default="where the workload names its prefixes"),
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
