"""Three questions to the scheduler in the simulator, on an 8B model and a modelled H200.

*modes*: continuous against the best static and the best dynamic batching, on one trace. For each load (saturation,
equal load, 5 % load, on/off bursts) every static configuration (batch size, FIFO or sorted) and every dynamic one
(batch size, timeout) is simulated; the best of each kind is run once more and compared with continuous batching.
Writes one JSON with every run, the pictures, and prints the tables for the docs.

*pace*: which pace keeps streams flowing and works a queue off, on the online workloads of the benchmark. Steps cost
what those of an 8B model took on an H200: fitted to 3,353 steps recorded there with a constant budget of 1,280 tokens,
four in five of them predicted within 4 %. Larger steps were not observed and are taken to cost as much per token. With
--others, the mean over ten other parts of the trace with separate arrivals: settings chosen on one part of 500
requests, of which five make the p99, may suit that part only.

*preemption*: the KV of a preempted request is always recomputed, always swapped, or the cheaper of the two; with a
small pool, so that requests are preempted all the time, and host links of three speeds. Figures are the mean time from
arrival to the last token, and the time until everything is done. The choice by cost must never be more than 5 % worse
than the better of the other two, and better than both where requests are long and short.

    python -m benchmarks.scheduler_study modes TRACE --out docs/concepts [--num-requests 1500] [--jobs 2]
    python -m benchmarks.scheduler_study pace --trace azure2023_conv.csv [--others]
    python -m benchmarks.scheduler_study preemption [--requests 400] [--seed 1] [--loads short,mixed]
"""

from __future__ import annotations

import json
import multiprocessing
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import ENGINE, Benchmark, Found, Given, flag, one_tenant, row, simulated, table
from paceline.costs.cost_model import PiecewiseLinear, StepShape
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.bench.workloads import LONGEST_OUTPUT, LONGEST_PROMPT, ONLINE, make_workload, read_lengths
from paceline.lab.report.plots import plot_cdfs, plot_modes, plot_timeline
from paceline.lab.report.run_record import FINISHED, RunRecord
from paceline.lab.report.summary import Summary, summarize
from paceline.lab.report.table import to_json
from paceline.lab.sim import Machine
from paceline.lab.workload import load_workload
from paceline.lab.workload.workload import Workload

bench = Benchmark(__doc__)
MODEL, DEVICE = "llama-3.1-8b", "h200"


# -- batching modes ------------------------------------------------------------------------------------------

SIZES = (8, 16, 32, 64, 128, 256, 512)
TIMEOUTS = (0.05, 0.5)
ARRIVALS = {
    "saturation": "all-at-once",
    "equal load": "poisson",
    "5 % load": "poisson",
    "on/off bursts": "onoff:10,10",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load."""

    load: str
    trace: str
    num_requests: int
    rate: float | None


def configurations() -> dict[str, Found]:
    """Options of the engine by name."""
    found: dict[str, Found] = {"continuous": {"mode": "continuous"}}
    for size in SIZES:
        for order in ("fifo", "sorted"):
            found[f"static {size} {order}"] = {"mode": "static", "batch_size": size, "static_order": order}
        for timeout_s in TIMEOUTS:
            options = {"mode": "dynamic", "batch_size": size, "batch_timeout_s": timeout_s}
            found[f"dynamic {size}, {timeout_s:g} s"] = options
    return found


def run(case: Case, name: str) -> RunRecord:
    requests = {"num_requests": case.num_requests, "seed": 1, "rate": case.rate}
    workload = load_workload(case.trace, arrivals=ARRIVALS[case.load], **requests)  # type: ignore[arg-type]
    common = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    return simulated(workload, {**common, **configurations()[name]}, label=name)


def summarized(case: Case, name: str) -> tuple[str, Any]:
    return name, to_json(summarize(run(case, name)))


def sweep(case: Case, jobs: int) -> Found:
    """The summary of every configuration, by name."""
    summaries = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for name, summary in pool.imap_unordered(partial(summarized, case), configurations(), chunksize=1):
            summaries[name] = summary
            print(f"  {case.load}: {name}", flush=True)
    return dict(sorted(summaries.items()))


def best(summaries: Found, kind: str, rate: float | None) -> str:
    """Of those that keep up with the offered rate the lowest median latency; if none does, the highest throughput."""
    known = configurations()
    mine = [name for name in known if known[name]["mode"] == kind and name in summaries]
    keeping_up = [name for name in mine if rate and summaries[name]["requests_per_s"] >= 0.95 * rate]
    if keeping_up:
        return min(keeping_up, key=lambda name: summaries[name]["e2e_s"]["p50"])
    return max(mine, key=lambda name: summaries[name]["requests_per_s"])


def figures(summary: Summary) -> list[object]:
    e2e = summary.e2e_s
    spread = f"{e2e.p99 / e2e.p50:.1f}" if e2e.p99 is not None and e2e.p50 else "-"
    shares = (f"{100 * (share or 0):.1f} %" for share in (summary.padded_share, summary.kv_waste))
    times = (f"{seconds:.2f}" for seconds in (e2e.p50, e2e.p99))
    rates = f"{summary.requests_per_s:.2f}", f"{summary.output_tokens_per_s:,.0f}"
    return [*rates, *times, spread, f"{summary.ttft_s.p50:.2f}", *shares]


@bench.part(
    flag("trace"),
    flag("--out", Path("docs/concepts"), "folder", kind=Path),
    flag("--num-requests", 1500),
    flag("--jobs", 2, "processes"),
)
def modes(given: Given) -> None:
    """Continuous, static and dynamic batching on one trace."""
    given.out.mkdir(parents=True, exist_ok=True)
    study: Found = {"trace": Path(given.trace).name, "num_requests": given.num_requests}
    study |= {"model": MODEL, "device": DEVICE, "loads": {}}
    rates: dict[str, float | None] = {"saturation": None}
    for load in ARRIVALS:
        case = Case(load=load, trace=given.trace, num_requests=given.num_requests, rate=rates[load])
        found = sweep(case, given.jobs)
        if load == "saturation":
            rates["equal load"] = 0.8 * float(found[best(found, "static", None)]["requests_per_s"])
            rates["5 % load"] = 0.05 * float(found["continuous"]["requests_per_s"])
            rates["on/off bursts"] = rates["equal load"]
        study["loads"][load] = {"rate": rates[load], "all": found}
        draw(case, found, given.out)
        (given.out / "batching-modes.json").write_text(json.dumps(study, indent=1) + "\n")


def draw(case: Case, found: Found, out: Path) -> None:
    """Run the best of each kind again, print their rows and draw them."""
    load, rate = case.load, case.rate
    names = [best(found, kind, rate) for kind in ("continuous", "static", "dynamic")]
    if load == "saturation":
        names.append("static 8 fifo")
    print(f"\n### {load}" + (f" ({rate:.2f} requests/s)" if rate else ""))
    records = [run(case, name) for name in names]
    summaries = [summarize(record) for record in records]
    for name, summary in zip(names, summaries, strict=True):
        row(name, *figures(summary))
    slug = load.replace("%", "percent").replace("/", "-").replace(" ", "-")
    title = f"Azure conversation, {load}"
    plot_modes(summaries, out / f"modes-{slug}.png", title=title)
    plot_cdfs(records, out / f"cdfs-{slug}.png", title=title)
    if load == "saturation":
        for name, record in zip(names[:2], records[:2], strict=True):
            kind = configurations()[name]["mode"]
            plot_timeline(record, out / f"timeline-{kind}.png", title=f"{name}, saturation")


# -- paces ---------------------------------------------------------------------------------------------------

OLD_SIZES = (64, 128, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096)
STEP_SIZES = tuple(sorted((*OLD_SIZES, 1152, 1408, 1664, 1792, 2304, 2560)))
PACED = {"max_num_seqs": 1024, "num_blocks": 13_697, "max_model_len": 4096, "depth": 1}
HOST_STEP_S = 6e-4
# Steps with prompts by their number of tokens, contexts left out.
MIXED_MS = PiecewiseLinear(
    (128, 256, 384, 512, 640, 768, 1024, 1280), (6.3, 8.2, 10.2, 12.7, 16.5, 18.3, 23.5, 29.9), 23.3e-3
)

PACE: dict[str, Any] = {"max_num_batched_tokens": 3072, "step_target_ms": 34.0}
SHORT_FIRST = {**PACE, "scheduling_policy": "shortest", "output_handicap_ms": 0.0, "long_prefill_share": 1.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "1,280 tokens": {"max_num_batched_tokens": 1280},
    "33 ms, never stretched": {**PACE, "step_target_ms": 33.0, "step_stretch": 1.0},
    "58 ms, never stretched": {**PACE, "step_target_ms": 58.0, "step_stretch": 1.0},
    "34 to 58 ms": PACE,
    "34 to 58 ms, patience 0.15 s": {**PACE, "step_patience_s": 0.15},
    "34 to 58 ms, whole prompts": {**PACE, "long_prefill_share": 1.0},
    "34 to 58 ms, short first, halves": {**SHORT_FIRST, "long_prefill_share": 0.5},
    "34 to 58 ms, short first": SHORT_FIRST,
    "34 to 58 ms, short first by 0.2": {**SHORT_FIRST, "prompt_handicap_ms": 0.2},
    "32.5 to 57 ms, short first": {**SHORT_FIRST, "step_target_ms": 32.5, "step_stretch": 1.75},
}


@dataclass(frozen=True)
class Card:
    """An 8B model on an H200, as far as the recorded steps show it."""

    sizes: tuple[int, ...] = STEP_SIZES

    def step_seconds(self, shape: StepShape) -> float:
        tokens = shape.tokens
        if not shape.prefill_tokens:
            return 4.84e-3 + 11.6e-6 * tokens + 29.4e-9 * shape.decode_context
        if tokens <= self.sizes[-1]:
            tokens = self.sizes[bisect_left(self.sizes, tokens)]
        read_s = 33.9e-9 * shape.decode_context + 1.62e-9 * shape.prefill_context_products
        return 1e-3 * MIXED_MS(tokens) + read_s


def online(name: str, trace: list[tuple[int, int]]) -> Workload:
    """A workload of the benchmark, without its tokens."""
    requests = make_workload(name, ONLINE, trace).requests
    prompts = [len(request.prompt) for request in requests]
    outputs = [request.num_output for request in requests]
    return one_tenant(name, [request.arrival_s for request in requests], prompts, outputs)


def others(rate: int, count: int, trace: list[tuple[int, int]]) -> list[Workload]:
    """Other requests of the trace, in ten parts that may overlap."""
    loads = []
    for part in range(10):
        gaps = np.random.default_rng(100 + part).exponential(1.0 / rate, count)
        prompts, outputs = np.array(trace[6000 + 800 * part :][:count]).T
        sizes = np.minimum(prompts, LONGEST_PROMPT), np.minimum(outputs, LONGEST_OUTPUT)
        loads.append(one_tenant(f"others@{rate}", np.cumsum(gaps).tolist(), *sizes))
    return loads


def paced(workload: Workload, options: Found) -> list[float]:
    """Time to first token at p50, p90 and p99, and between tokens at p99, in milliseconds."""
    card = Card() if "step_target_ms" in options else Card(OLD_SIZES)
    machine = Machine.of(model_shape(MODEL), device_spec(DEVICE), card)
    summary = summarize(simulated(workload, {**PACED, **options}, machine=machine, host_step_s=HOST_STEP_S))
    ttft, itl = summary.ttft_s, summary.itl_s
    return [1e3 * (seconds or 0.0) for seconds in (ttft.p50, ttft.p90, ttft.p99, itl.p99)]


@bench.part(
    flag("--trace", None, "the Azure 2023 conversation trace", kind=Path, required=True),
    flag("--others", False, "ten other parts of the trace instead"),
)
def pace(given: Given) -> Found:
    """Step durations and orders on the online workloads."""
    trace = list(read_lengths(given.trace))
    groups = [[online(name, trace)] for name in ("azure-conv@20", "azure-conv@32")]
    if given.others:
        groups = [others(20, 500, trace), others(32, 800, trace)]
    table("setting", "rate", "TTFT p50", "p90", "p99", "ITL p99")
    found = {}
    for label, options in SETTINGS.items():
        for group in groups:
            means = np.mean([paced(workload, options) for workload in group], axis=0).tolist()
            rate = group[0].name[-2:]
            found[f"{label}, {rate}/s"] = means
            row(label, rate, *(f"{milliseconds:.1f}" for milliseconds in means))
    return found


# -- preemption ----------------------------------------------------------------------------------------------

KINDS = ("recompute", "swap", "auto")
POOL_TOKENS = 50_000
BLOCK = 16
LINKS_GB_S = (3.0, 10.0, 50.0)
# Prompt and output tokens, each with its share of the requests.
LOADS = {
    "short": ((200, 800, 1.0),),
    "long": ((6_000, 3_000, 1.0),),
    "long outputs": ((300, 2_500, 1.0),),
    "mixed": ((150, 900, 0.8), (16_000, 4_000, 0.2)),
}


def make_load(name: str, count: int, seed: int) -> Workload:
    """All there within the first seconds: the pool decides how many run."""
    random = np.random.default_rng(seed)
    prompts, outputs, shares = (np.array(column) for column in zip(*LOADS[name], strict=True))
    kind = random.choice(len(shares), count, p=shares)
    spread = random.uniform(0.5, 1.5, (2, count))
    arrival_s = np.sort(random.uniform(0.0, 5.0, count))
    sizes = (np.maximum(1, each[kind] * own) for each, own in zip((prompts, outputs), spread, strict=True))
    return one_tenant(name, arrival_s, *sizes)  # type: ignore[arg-type]


def preempted(load: Workload, kind: str, link_gb_s: float) -> Found:
    device = replace(device_spec(DEVICE), host_link_bandwidth=link_gb_s * 1e9)
    blocks = POOL_TOKENS // BLOCK + 1
    pool = {"block_size": BLOCK, "num_blocks": blocks, "num_host_blocks": 4 * blocks}
    options = {**ENGINE, **pool, "preemption": kind, "enable_prefix_caching": False}
    record = simulated(load, options, label=kind, machine=Machine.of(model_shape(MODEL), device))
    done = record.outcome == FINISHED
    return {
        "mean_s": float((record.finished_s - record.arrival_s)[done].mean()),
        "whole_s": float(np.nanmax(record.finished_s)),
        "preemptions": int(record.preemptions.sum()),
    }


@bench.part(flag("--requests", 400), flag("--seed", 1), flag("--loads", ",".join(LOADS)))
def preemption(given: Given) -> Found:
    """Recompute, swap, or the cheaper of the two."""
    table("load", "link", *KINDS, "auto / better", "holds")
    found, worst = Found(), 0.0
    for name in given.loads.split(","):
        load = make_load(name, given.requests, given.seed)
        for link_gb_s in LINKS_GB_S:
            runs = {kind: preempted(load, kind, link_gb_s) for kind in KINDS}
            ratio = runs["auto"]["mean_s"] / min(runs["recompute"]["mean_s"], runs["swap"]["mean_s"])
            worst = max(worst, ratio)
            cells = (
                f"{run['mean_s']:.2f} s, {run['whole_s']:.1f} s, {run['preemptions']:,} preempted"
                for run in runs.values()
            )
            row(name, f"{link_gb_s:g} GB/s", *cells, f"{ratio:.3f}", "yes" if ratio <= 1.05 else "NO")
            found[f"{name}, {link_gb_s:g} GB/s"] = runs
    return {"runs": found, "worst": round(worst, 3)}


if __name__ == "__main__":
    bench.main()
