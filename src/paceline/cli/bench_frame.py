"""What both commands of `paceline bench` do around their runs: look at the destination, begin a report.

Holds no engine: a command that loads several gives each up before the next. What is measured is theirs.
"""

from __future__ import annotations

from pathlib import Path

from paceline.bench.options import BenchOptions
from paceline.bench.workloads import check_fits, check_vocabulary
from paceline.cli.bench_output import Report, note_skipped
from paceline.cli.bench_plan import Asked
from paceline.cli.targets import writable
from paceline.llm.async_llm import AsyncLLM
from paceline.llm.llm import LLM


def begin(options: BenchOptions, asked: Asked) -> Path | None:
    """Before anything is loaded: where the JSON goes, if anywhere."""
    target = writable("--json", options.json)
    note_skipped(asked.skipped)
    return target


def report_of(kind: str, asked: Asked, llm: LLM | AsyncLLM, startup_s: float) -> Report:
    """An empty report on an engine that can take the workloads."""
    check_vocabulary(llm.loaded.checkpoint.spec.vocab_size)
    check_fits(asked.workloads, llm.max_model_len)
    report = Report.of(kind, asked.model, llm.loaded, startup_s)
    report.skipped, report.seed = list(asked.skipped), asked.engine.get("seed", 0)
    return report
