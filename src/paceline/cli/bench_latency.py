"""The runs of `paceline bench latency`: load, warm up, every workload at its own pace.

Figures that were measured are shown and written also when something later fails.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

from paceline.bench.latency import LatencyResult, run_online, warm_up
from paceline.bench.options import LatencyOptions
from paceline.bench.tables import latency_json, latency_table
from paceline.bench.throughput import load, sampling_of
from paceline.bench.workloads import BenchWorkload
from paceline.cli.bench_frame import begin, report_of
from paceline.cli.bench_output import Report, show, write
from paceline.cli.bench_plan import Asked
from paceline.llm.async_llm import AsyncLLM


def run_latency(options: LatencyOptions, asked: Asked) -> None:
    target = begin(options, asked)
    llm, startup_s = load(AsyncLLM, asked.engine)
    try:
        report = report_of("latency", asked, llm, startup_s)
        with write(report, target) as save:
            asyncio.run(_run_all(llm, asked.workloads, options, report, save))
    finally:
        llm.shutdown()


async def _run_all(
    llm: AsyncLLM,
    workloads: Sequence[BenchWorkload],
    options: LatencyOptions,
    report: Report,
    save: Callable[[], None],
) -> None:
    results: list[LatencyResult] = []
    try:
        await warm_up(llm)
        for workload in workloads:
            bar = _Bar(workload)
            try:
                sampling = sampling_of(workload, options.temperature, report.seed)
                result = await run_online(llm, workload, sampling, on_finish=bar.advance)
            finally:
                bar.close()
            results.append(result)
            report.results.append(latency_json(result))
            save()
    finally:
        if results:
            show(report.title, latency_table(results))


class _Bar:
    """Requests that have finished, where somebody looks."""

    def __init__(self, workload: BenchWorkload) -> None:
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=len(workload.requests), desc=workload.name, unit="req", dynamic_ncols=True)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
