"""The options of `paceline sim` beside those of the engine. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.config.options import CheckedOptions, option
from paceline.core.sampling import MAX_OBJECTIVE_MS

BUILT_IN_REQUESTS = 2_000
LINK_NAMES = ("nvlink4", "nvlink5", "pcie5", "ib-ndr", "eth-100g", "wan")
ROUTER_NAMES = ("soonest", "round-robin", "least-loaded", "prefix-aware")
SWEEP_FACTORS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)

HELP = f"""
Simulate a deployment, without a model or a GPU.

Runs the real scheduler, KV cache and engine on a virtual clock, with step times from a cost model, and prints a column
of measures for each mode. The same command gives the same numbers.

  paceline sim --mode continuous,dynamic,static --rate 20
  paceline sim --trace requests.csv --rate 5,10,20,40 --plot curve.png
  paceline sim --mode continuous,static --rate 20 --ui

--plot draws throughput and latency over the rate, with the knee; around a single rate it also runs
{", ".join(f"{factor:g}" for factor in SWEEP_FACTORS)} times that rate. curve.timeline.png shows the batch over time at
the highest rate given.

  paceline sim --calibrate run.jsonl.gz        # a log of serve --run-log
  paceline sim --compare other.jsonl.gz --cost-model run.costs.json

--calibrate fits a cost model to run logs, prints how well it fits and writes run.costs.json for --cost-model.
--compare repeats the requests of a recorded run in the simulator and prints the error.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions(CheckedOptions):
    """What `paceline sim` takes beside the engine's options. Texts with commas are taken apart later."""

    PANEL: ClassVar = "Deployment"

    trace: str = option(
        "azure-conv",
        "azure-conv, azure-code, mooncake, multi-tenant, mm-image, fixed:PROMPTxOUTPUT, uniform:LOW-HIGHxLOW-HIGH, "
        "servegen:FOLDER (or archive), or a trace file",
        basic=True,
        panel="Workload",
        metavar="NAME|FILE",
    )
    num_requests: int | None = option(
        None,
        "simulate only the first N requests",
        low=1,
        basic=True,
        panel="Workload",
        default_text=f"built-in workloads and ServeGen: {BUILT_IN_REQUESTS}; a file: all",
    )
    rate: str = option(
        "",
        "requests per second, instead of the recorded arrivals; several, separated by commas, give a curve",
        basic=True,
        panel="Workload",
        metavar="R[,R...]",
        default_text="as recorded",
    )
    speed: float = option(
        1.0, "divide the recorded times by this; 2: twice as fast", low=1e-6, high=1e6, panel="Workload"
    )
    arrivals: str = option(
        "recorded",
        "recorded, poisson, constant, gamma:CV, onoff:ON_S,OFF_S[,BURST_FACTOR] or all-at-once",
        basic=True,
        panel="Workload",
    )
    priorities: str = option(
        "none",
        "priorities of requests: none (all equal), tenant (its number), class (from the tenant's name), random:LEVELS",
        panel="Workload",
    )
    deadline_ms: int | None = option(
        None,
        "milliseconds after arrival at which requests are stopped",
        low=1,
        high=MAX_OBJECTIVE_MS,
        panel="Workload",
        default_text="no deadline",
    )
    ttft_slo_ms: int | None = option(
        None,
        "time to the first token that requests ask for, in milliseconds",
        low=1,
        high=MAX_OBJECTIVE_MS,
        panel="Workload",
        default_text="any time",
    )
    itl_slo_ms: int | None = option(
        None,
        "time between tokens that requests ask for, in milliseconds",
        low=1,
        high=MAX_OBJECTIVE_MS,
        panel="Workload",
        default_text="any time",
    )
    on_infeasible: str = option(
        "try",
        "what to do with requests whose times cannot be met",
        choices=("try", "refuse"),
        panel="Workload",
    )
    forecasts: bool = option(
        False,
        "forecast the first token of every request and show the error of the forecasts",
        panel="Results",
    )

    modes: str = option(
        "continuous",
        "batching modes to compare, separated by commas: continuous, dynamic, static",
        flag="--mode",
        basic=True,
        metavar="MODE[,MODE...]",
    )
    evictions: str = option(
        "reuse",
        "eviction orders to compare, separated by commas: reuse, lru, belady (knows what will arrive)",
        flag="--eviction",
        metavar="ORDER[,ORDER...]",
    )
    encodings: str = option(
        "pieces",
        "how pictures are encoded, separated by commas: pieces (parts of them in each step), whole (in one step)",
        flag="--encode",
        metavar="HOW[,HOW...]",
    )
    host_kv_gib: float = option(
        0.0,
        "GiB of host memory for prefixes that the device evicts; adds a column without them",
        low=0.0,
        high=1e6,
    )
    disk_kv_gib: float = option(0.0, "GiB of disk for prefixes that the host evicts", low=0.0, high=1e6)
    disk_gbps: float = option(
        3.0, "GB a second that the disk reads; half of it for writing", low=1e-3, high=1e3
    )
    adapters: int = option(
        0, "adapters that requests have, drawn by Zipf; see --max-loras", low=0, high=100_000
    )
    adapter_read_ms: float = option(
        50.0, "milliseconds to read an adapter that is not in memory", low=0.0, high=1e6
    )
    model: str = option("llama-3.1-8b", "shape of the model", basic=True)
    device: str = option("h200", "device of each replica", basic=True)
    tensor_parallel_sizes: str = option(
        "1",
        "devices that divide one model as ranks; several numbers, separated by commas, are compared",
        flag="--tensor-parallel-size",
        metavar="N[,N...]",
    )
    link: str = option("nvlink4", "between these devices", choices=LINK_NAMES)
    cost_model: str = option(
        "",
        "step times from a fitted cost model or a run log, instead of the roofline model",
        basic=True,
        metavar="FILE",
    )
    host_step_s: float | None = option(
        None,
        "host time to plan a step, in seconds; overlapped with the device unless --depth is 0",
        low=0.0,
        high=10.0,
        default_text="0.0003, or from the cost model",
    )
    host_row_us: float = option(
        0.0,
        "host time for each decoding row of a step, in microseconds, as of engines that loop over requests",
        low=0.0,
        high=1e6,
    )
    calibrate: str = option(
        "",
        "fit a cost model to these run logs and write it; simulates nothing",
        basic=True,
        panel="Calibration",
        metavar="LOG[,LOG...]",
    )
    save_costs: str = option(
        "",
        "file for the cost model of --calibrate",
        panel="Calibration",
        metavar="FILE",
        default_text="name of the log with .costs.json",
    )
    compare: str = option(
        "",
        "repeat a run log, or a result of bench serve, in the simulator and print the error of each measure",
        basic=True,
        panel="Calibration",
        metavar="LOG|JSON",
    )
    speculative_config: str = option(
        "off",
        "speculative decoding: off, auto, or a JSON object with num_speculative_tokens",
        metavar="METHOD|JSON",
    )
    acceptance: str = option(
        "0.7",
        "chance of a draft to be right: a number, beta:A,B over requests, or the run log of a run with drafts",
        metavar="CHANCE|beta:A,B|LOG",
    )
    replicas: int = option(1, "engines behind the router", low=1, high=10_000, basic=True)
    jobs: int = option(
        1,
        "simulations that run in parallel, in separate processes; results do not depend on it",
        low=1,
        high=256,
    )
    routers: str = option(
        "soonest",
        f"how an engine is chosen for a request, separated by commas: {', '.join(ROUTER_NAMES)}, module:Class",
        flag="--router",
        metavar="ROUTER[,ROUTER...]",
    )
    autoscale: str = option(
        "off",
        "start and stop replicas, --replicas at most: wanted (by what comes, step times and --slo), keda (30 queued, "
        "KV 60 %)",
        choices=("off", "wanted", "keda"),
    )
    min_replicas: int = option(1, "engines that are always there, with --autoscale", low=1, high=10_000)
    start_s: float = option(60.0, "seconds that a replica takes to start", low=0.0, high=86_400.0)
    models: str = option(
        "",
        "models that share the device, each with its share; requests go to them by tenant, else in turn",
        metavar="NAME:SHARE[,...]",
    )

    world: str = option(
        "",
        "simulate the world in this file: thousands of replicas as flows, regions, a day",
        metavar="FILE.yaml",
    )
    curves: str = option(
        "",
        "file with what a replica of a world can do; measured, which takes minutes, where it is not there",
        metavar="FILE.json",
        default_text="name of the world with .curves.json",
    )

    seed: int = option(0, "seed of everything that is random", low=0, panel="Chance and faults")
    faults: str = option(
        "",
        "rates of injected faults, such as aborts=0.1,bursts=0.1; also stalls, alloc, preempt",
        panel="Chance and faults",
        metavar="FAULT=SHARE,...",
    )
    check: bool = option(
        False, "check all invariants twice in every step; about ten times slower", panel="Chance and faults"
    )

    slo: str = option(
        "",
        "goodput: bounds in seconds: ttft=1.0,itl=0.05,e2e=30",
        basic=True,
        panel="Results",
        metavar="BOUND=SECONDS,...",
    )
    device_hour_price: float | None = option(
        None, "price of a device per hour, for the cost of tokens", low=0.0, panel="Results", metavar="PRICE"
    )
    json: str = option(
        "", "write measures, settings and seed to this file", basic=True, panel="Results", metavar="FILE"
    )
    plot: str = option(
        "",
        "write a throughput-latency plot and a timeline (PNG)",
        basic=True,
        panel="Results",
        metavar="FILE.png",
    )
    log: str = option(
        "", "write the run log; one mode, one rate, one replica", basic=True, panel="Results", metavar="FILE"
    )
