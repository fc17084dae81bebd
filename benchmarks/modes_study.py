"""Continuous against the best static and the best dynamic batching, on one trace and one modelled machine.

For each load (saturation, equal load, 5 % load, on/off bursts) every static configuration (batch size, FIFO or
sorted) and every dynamic one (batch size, timeout) is simulated, the best of each kind is kept, and set beside
continuous batching. Writes one JSON with everything, the pictures, and prints the tables for the docs.

    python benchmarks/modes_study.py TRACE --out docs/concepts [--num-requests 2000] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.costs.presets import device_spec, model_shape
from paceline.report.plots import plot_cdfs, plot_modes, plot_timeline
from paceline.report.record import RunRecord
from paceline.report.summary import Summary, summarize
from paceline.report.table import to_json
from paceline.sim import Machine, SimConfig, engine_config, simulate
from paceline.workload import load_workload

SIZES = (8, 16, 32, 64, 128, 256, 512)
TIMEOUTS = (0.05, 0.5)
MODEL, DEVICE = "llama-3.1-8b", "h200"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One configuration at one load."""

    load: str
    kind: str  # continuous, static, dynamic
    name: str
    options: Mapping[str, Any]
    trace: str
    num_requests: int
    rate: float | None
    arrivals: str


def configurations(loads: Iterable[str]) -> list[tuple[str, str, dict[str, Any]]]:
    found: list[tuple[str, str, dict[str, Any]]] = [("continuous", "continuous", {"mode": "continuous"})]
    for size in SIZES:
        for order in ("fifo", "sorted"):
            options = {"mode": "static", "batch_size": size, "static_order": order}
            found.append(("static", f"static {size} {order}", options))
        for timeout_s in TIMEOUTS:
            options = {"mode": "dynamic", "batch_size": size, "batch_timeout_s": timeout_s}
            found.append(("dynamic", f"dynamic {size}, {timeout_s:g} s", options))
    return found


def run(case: Case) -> tuple[Case, RunRecord]:
    machine = Machine.of(model_shape(MODEL), device_spec(DEVICE))
    workload = load_workload(
        case.trace, num_requests=case.num_requests, seed=1, rate=case.rate, arrivals=case.arrivals
    )
    common = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    config = SimConfig(machine=machine, engine=engine_config(machine, workload, {**common, **case.options}))
    return case, simulate(config, workload, label=case.name)


def study(cases: list[Case], jobs: int) -> list[tuple[Case, RunRecord, Summary]]:
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        results = []
        for case, record in pool.imap_unordered(run, cases, chunksize=1):
            results.append((case, record, summarize(record)))
            print(f"  {case.load}: {case.name}: {results[-1][2].requests_per_s:.2f} requests/s", flush=True)
    return sorted(results, key=lambda result: result[0].name)


def best(
    results: list[tuple[Case, RunRecord, Summary]], kind: str, load: str
) -> tuple[Case, RunRecord, Summary]:
    """The highest throughput at saturation; elsewhere the lowest median latency among those that keep up."""
    mine = [result for result in results if result[0].kind == kind]
    if load == "saturation":
        return max(mine, key=lambda result: result[2].requests_per_s or 0.0)
    return min(mine, key=lambda result: result[2].e2e_s.p50 or float("inf"))


def row(case: Case, summary: Summary) -> str:
    e2e = summary.e2e_s
    spread = f"{e2e.p99 / e2e.p50:.1f}" if e2e.p99 is not None and e2e.p50 else "-"
    return (
        f"| {case.name} | {summary.requests_per_s:.2f} | {summary.output_tokens_per_s:,.0f} | {e2e.p50:.2f} | "
        f"{e2e.p99:.2f} | {spread} | {summary.ttft_s.p50:.2f} | "
        f"{100 * (summary.padded_share or 0):.1f} % | {100 * (summary.kv_waste or 0):.1f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    def cases(load: str, rate: float | None, arrivals: str) -> list[Case]:
        return [
            Case(
                load=load,
                kind=kind,
                name=name,
                options=options,
                trace=arguments.trace,
                num_requests=arguments.num_requests,
                rate=rate,
                arrivals=arrivals,
            )
            for kind, name, options in configurations(load)
            if not (load == "saturation" and kind == "dynamic" and options["batch_timeout_s"] != TIMEOUTS[0])
        ]

    saturated = study(cases("saturation", None, "all-at-once"), arguments.jobs)
    top = {kind: best(saturated, kind, "saturation") for kind in ("continuous", "static", "dynamic")}
    equal = 0.8 * (top["static"][2].requests_per_s or 0.0)
    low = 0.05 * (top["continuous"][2].requests_per_s or 0.0)
    loads = {
        "saturation": (None, "all-at-once"),
        "equal load": (equal, "poisson"),
        "5 % load": (low, "poisson"),
        "on/off bursts": (equal, "onoff:10,10"),
    }
    everything: dict[str, Any] = {
        "trace": Path(arguments.trace).name,
        "model": MODEL,
        "device": DEVICE,
        "loads": {},
    }
    for load, (rate, arrivals) in loads.items():
        results = saturated if load == "saturation" else study(cases(load, rate, arrivals), arguments.jobs)
        publish(load, rate, results, arguments.out, everything)
    (arguments.out / "batching-modes.json").write_text(json.dumps(everything, indent=1) + "\n")


def publish(
    load: str,
    rate: float | None,
    results: list[tuple[Case, RunRecord, Summary]],
    out: Path,
    everything: dict[str, Any],
) -> None:
    chosen = [best(results, kind, load) for kind in ("continuous", "static", "dynamic")]
    if load == "saturation":
        chosen += [result for result in results if result[0].name == "static 8 fifo"]
    print(f"\n### {load}" + (f" ({rate:.2f} requests/s)" if rate else ""))
    for case, _, summary in chosen:
        print(row(case, summary))
    everything["loads"][load] = {
        "rate": rate,
        "best": [case.name for case, _, _ in chosen],
        "all": {case.name: to_json(summary) for case, _, summary in results},
    }
    slug = load.replace("%", "percent").replace("/", "-").replace(" ", "-")
    plot_modes(
        [summary for _, _, summary in chosen], out / f"modes-{slug}.png", title=f"Azure conversation, {load}"
    )
    plot_cdfs(
        [record for _, record, _ in chosen], out / f"cdfs-{slug}.png", title=f"Azure conversation, {load}"
    )
    if load == "saturation":
        for case, record, _ in chosen[:2]:
            plot_timeline(record, out / f"timeline-{case.kind}.png", title=f"{case.name}, saturation")


if __name__ == "__main__":
    main()
