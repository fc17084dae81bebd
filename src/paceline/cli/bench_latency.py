"""The runs of `paceline bench latency`: load, warm up, every workload at its own pace.

Figures that were measured are shown and written also when something later fails.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.bench.latency import LatencyResult, run_online, warm_up
from paceline.bench.options import LatencyOptions
from paceline.bench.tables import latency_json, latency_table
from paceline.bench.throughput import import_engine, sampling_of
from paceline.bench.workloads import BenchWorkload, check_fits, check_vocabulary
from paceline.cli.bench_output import Report, checked_target, note_skipped, show, write
from paceline.llm.async_llm import AsyncLLM


def run_latency(
    options: LatencyOptions,
    engine: Mapping[str, Any],
    model: str,
    workloads: Sequence[BenchWorkload],
    skipped: Sequence[str],
) -> None:
    target = checked_target(options.json)
    note_skipped(skipped)
    import_engine()
    started_s = time.perf_counter()
    llm = AsyncLLM(**engine)
    startup_s = time.perf_counter() - started_s
    try:
        check_vocabulary(llm.loaded.checkpoint.spec.vocab_size)
        check_fits(workloads, llm.max_model_len)
        report = Report.of("latency", model, llm.loaded, startup_s)
        report.skipped, report.seed = list(skipped), engine.get("seed", 0)
        with write(report, target) as save:
            asyncio.run(_run_all(llm, workloads, options, report, save))
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
