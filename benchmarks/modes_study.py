"""Continuous against the best static and the best dynamic batching, on one trace and one modelled machine.

For each load (saturation, equal load, 5 % load, on/off bursts) every static configuration (batch size, FIFO or
sorted) and every dynamic one (batch size, timeout) is simulated; the best of each kind is run once more and set
beside continuous batching. Writes one JSON with every run, the pictures, and prints the tables for the docs.

    python benchmarks/modes_study.py TRACE --out docs/concepts [--num-requests 1500] [--jobs 2]
    python benchmarks/modes_study.py TRACE --out docs/concepts --sweep batching-modes.json    # only draw again
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.costs.presets import device_spec, model_shape
from paceline.lab.report.plots import plot_cdfs, plot_modes, plot_timeline
from paceline.lab.report.record import RunRecord
from paceline.lab.report.summary import Summary, summarize
from paceline.lab.report.table import to_json
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.workload import load_workload

SIZES = (8, 16, 32, 64, 128, 256, 512)
TIMEOUTS = (0.05, 0.5)
MODEL, DEVICE = "llama-3.1-8b", "h200"
LOADS = {
    "saturation": "all-at-once",
    "equal load": "poisson",
    "5 % load": "poisson",
    "on/off bursts": "onoff:10,10",
}


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


def configurations() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name -> kind and options."""
    found: dict[str, tuple[str, dict[str, Any]]] = {"continuous": ("continuous", {"mode": "continuous"})}
    for size in SIZES:
        for order in ("fifo", "sorted"):
            options = {"mode": "static", "batch_size": size, "static_order": order}
            found[f"static {size} {order}"] = ("static", options)
        for timeout_s in TIMEOUTS:
            options = {"mode": "dynamic", "batch_size": size, "batch_timeout_s": timeout_s}
            found[f"dynamic {size}, {timeout_s:g} s"] = ("dynamic", options)
    return found


def run(case: Case) -> tuple[Case, RunRecord]:
    machine = Machine.of(model_shape(MODEL), device_spec(DEVICE))
    workload = load_workload(
        case.trace, num_requests=case.num_requests, seed=1, rate=case.rate, arrivals=case.arrivals
    )
    common = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    config = SimConfig(machine=machine, engine=engine_config(machine, workload, {**common, **case.options}))
    return case, simulate(config, workload, label=case.name)


def sweep(cases: list[Case], jobs: int) -> dict[str, Any]:
    """The summary of every case, by name."""
    summaries = {}
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for case, record in pool.imap_unordered(run, cases, chunksize=1):
            summaries[case.name] = to_json(summarize(record))
            print(f"  {case.load}: {case.name}", flush=True)
    return dict(sorted(summaries.items()))


def best(summaries: dict[str, Any], kind: str, rate: float | None) -> str:
    """Of those that keep up with the offered rate the lowest median latency; if none does, the highest throughput."""
    mine = [
        name for name, (its_kind, _) in configurations().items() if its_kind == kind and name in summaries
    ]
    keeping_up = [name for name in mine if rate and summaries[name]["requests_per_s"] >= 0.95 * rate]
    if keeping_up:
        return min(keeping_up, key=lambda name: summaries[name]["e2e_s"]["p50"])
    return max(mine, key=lambda name: summaries[name]["requests_per_s"])


def row(name: str, summary: Summary) -> str:
    e2e = summary.e2e_s
    spread = f"{e2e.p99 / e2e.p50:.1f}" if e2e.p99 is not None and e2e.p50 else "-"
    return (
        f"| {name} | {summary.requests_per_s:.2f} | {summary.output_tokens_per_s:,.0f} | {e2e.p50:.2f} | "
        f"{e2e.p99:.2f} | {spread} | {summary.ttft_s.p50:.2f} | "
        f"{100 * (summary.padded_share or 0):.1f} % | {100 * (summary.kv_waste or 0):.1f} % |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num-requests", type=int, default=1500)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sweep", type=Path, help="take the sweep from this file instead of running it")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    given = json.loads(arguments.sweep.read_text()) if arguments.sweep is not None else None
    study: dict[str, Any] = {
        "trace": Path(arguments.trace).name,
        "num_requests": arguments.num_requests,
        "model": MODEL,
        "device": DEVICE,
        "loads": {},
    }
    rates: dict[str, float | None] = {"saturation": None}
    for load, arrivals in LOADS.items():
        cases = {
            name: Case(
                load=load,
                kind=kind,
                name=name,
                options=options,
                trace=arguments.trace,
                num_requests=arguments.num_requests,
                rate=rates[load],
                arrivals=arrivals,
            )
            for name, (kind, options) in configurations().items()
        }
        found = given["loads"][load]["all"] if given else sweep(list(cases.values()), arguments.jobs)
        if load == "saturation":
            rates["equal load"] = 0.8 * float(found[best(found, "static", None)]["requests_per_s"])
            rates["5 % load"] = 0.05 * float(found["continuous"]["requests_per_s"])
            rates["on/off bursts"] = rates["equal load"]
        study["loads"][load] = {"rate": rates[load], "all": found}
        draw(load, rates[load], cases, found, arguments.out)
        (arguments.out / "batching-modes.json").write_text(json.dumps(study, indent=1) + "\n")


def draw(load: str, rate: float | None, cases: dict[str, Case], found: dict[str, Any], out: Path) -> None:
    """Run the best of each kind again, print their rows and draw them."""
    names = [best(found, kind, rate) for kind in ("continuous", "static", "dynamic")]
    if load == "saturation":
        names.append("static 8 fifo")
    print(f"\n### {load}" + (f" ({rate:.2f} requests/s)" if rate else ""))
    records = [run(cases[name])[1] for name in names]
    summaries = [summarize(record) for record in records]
    for name, summary in zip(names, summaries, strict=True):
        print(row(name, summary), flush=True)
    slug = load.replace("%", "percent").replace("/", "-").replace(" ", "-")
    title = f"Azure conversation, {load}"
    plot_modes(summaries, out / f"modes-{slug}.png", title=title)
    plot_cdfs(records, out / f"cdfs-{slug}.png", title=title)
    if load == "saturation":
        for name, record in zip(names[:2], records[:2], strict=True):
            kind = cases[name].kind
            plot_timeline(record, out / f"timeline-{kind}.png", title=f"{name}, saturation")


if __name__ == "__main__":
    main()
