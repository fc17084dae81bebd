"""The pictures of the concept pages, drawn from runs of the simulator and written with few colours to stay small.

Each function is one picture and its figures; what the pages say in numbers is what this prints.

    python -m benchmarks.doc_figures [--out docs/images] [--only paged-kv,preemption,fairness]
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.harness import ENGINE, Benchmark, Found, Given, flag, simulated
from paceline.lab.report import plot_style as style
from paceline.lab.report.plots import plot_timeline
from paceline.lab.report.run_record import FINISHED, RunRecord
from paceline.lab.report.summary import summarize
from paceline.lab.workload import load_workload
from paceline.lab.workload.workload import Workload

bench = Benchmark(__doc__)
SEED = 1
COLOURS = 48


def run(workload: Workload, label: str, options: Found) -> RunRecord:
    return simulated(workload, {**ENGINE, **options}, label=label)


def paged_kv(folder: Path) -> list[str]:
    """The same requests and memory, with blocks and with one rectangle for each batch."""
    workload = load_workload("azure-conv", num_requests=400, seed=SEED, rate=16.0, arrivals="poisson")
    memory = {"num_blocks": 3_000, "block_size": 16}
    paged = run(workload, "blocks", memory)
    plot_timeline(paged, folder / "paged-kv.png", title="One pool of blocks, under chat traffic")
    reserved = run(workload, "a rectangle for each batch", {**memory, "mode": "static", "batch_size": 32})
    found = []
    for record in (paged, reserved):
        summary = summarize(record)
        found.append(
            f"{record.label}: KV waste {100 * (summary.kv_waste or 0):.1f} %, "
            f"{summary.output_tokens_per_s:,.0f} output tokens/s, mean rows {record.step_rows.mean():.0f}"
        )
    return found


def preemption(folder: Path) -> list[str]:
    """A pool that is too small for what comes, and three things to do about it."""
    workload = load_workload("azure-conv", num_requests=400, seed=SEED, rate=14.0, arrivals="poisson")
    tight = {"num_blocks": 1_500, "block_size": 16, "num_host_blocks": 6_000, "enable_prefix_caching": False}
    records = [run(workload, kind, {**tight, "preemption": kind}) for kind in ("recompute", "swap", "auto")]
    plot_timeline(records[-1], folder / "preemption.png", title="A pool that is too small for what comes")
    found = []
    for record in records:
        took_s = (record.finished_s - record.arrival_s)[record.outcome == FINISHED]
        found.append(
            f"{record.label}: {int(record.preemptions.sum()):,} preemptions, "
            f"{int(record.recomputed_tokens.sum()):,} tokens recomputed, mean {took_s.mean():.2f} s"
        )
    return found


def fairness(folder: Path) -> list[str]:
    """A tenant that floods, a tenant that asks now and then; in the order of arrival and by shares."""
    workload, policies, found = _flood(), ("fcfs", "fair"), []
    heading = "A dot for each request: how long it waited for its first token"
    with style.figure_file(folder / "fairness.png", width=10.5, height=4.0, title=heading) as figure:
        for panel, policy in zip(figure.subplots(1, 2, sharey=True), policies, strict=True):
            record = run(workload, policy, {"scheduling_policy": policy, "max_num_seqs": 32})
            ttft_s = record.first_token_s - record.arrival_s
            panel.set_title(policy)
            panel.set_xlabel("arrival (s)")
            for tenant, name in enumerate(workload.tenants):
                mine = record.tenant == tenant
                colour = style.PALETTE[tenant]
                panel.plot(record.arrival_s[mine], ttft_s[mine], ".", color=colour, label=name)
                p50, p99 = np.percentile(ttft_s[mine], (50, 99))
                found.append(f"{name}, {policy}: TTFT p50 {p50:.2f} s, p99 {p99:.2f} s")
        style.seconds_axis(figure.axes[0], vertical=True, label="time to first token")
        style.legend_below(figure, figure.axes[0], 2)
    return found


def _flood() -> Workload:
    random = np.random.default_rng(SEED)
    counts, names = (600, 60), ("flood", "quiet")
    tenant = np.repeat(np.arange(2, dtype=np.int32), counts)
    # The flood comes within ten seconds; the other asks once a second for a minute.
    arrival_s = np.concatenate([np.sort(random.uniform(0.0, 10.0, counts[0])), np.arange(counts[1]) + 0.5])
    order = np.argsort(arrival_s, kind="stable")
    return Workload(
        name="flood",
        arrival_s=arrival_s[order],
        prompt_len=random.integers(400, 1_200, sum(counts)).astype(np.int32)[order],
        output_len=random.integers(150, 350, sum(counts)).astype(np.int32)[order],
        tenant=tenant[order],
        tenants=names,
    )


def shrink(path: Path) -> None:
    """The same picture with a palette: a third of the bytes."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOURS)
    small.save(path, optimize=True)


FIGURES = {"paged-kv": paged_kv, "preemption": preemption, "fairness": fairness}


@bench.part(
    flag("--out", Path("docs/images"), "folder", kind=Path), flag("--only", ",".join(FIGURES), "pictures")
)
def doc_figures(given: Given) -> None:
    for name in given.only.split(","):
        for line in FIGURES[name](given.out):
            print(line)
        path = given.out / f"{name}.png"
        shrink(path)
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    bench.main()
