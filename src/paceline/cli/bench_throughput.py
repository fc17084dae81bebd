"""The runs of `paceline bench throughput`: load, warm up, every workload, the check afterwards.

Figures that were measured are shown and written also when something later fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.bench.options import ThroughputOptions
from paceline.bench.recheck import Case, choose, eager_llm, has_eager_option, recheck
from paceline.bench.tables import recheck_json, recheck_lines, throughput_json, throughput_table
from paceline.bench.throughput import ThroughputResult, load_llm, run_workload, sampling_of, warm_up
from paceline.bench.workloads import BenchWorkload, check_fits, check_vocabulary
from paceline.cli.bench_output import Report, checked_target, note, note_skipped, show, write
from paceline.llm.llm import LLM


def run_throughput(
    options: ThroughputOptions,
    engine: Mapping[str, Any],
    model: str,
    workloads: Sequence[BenchWorkload],
    skipped: Sequence[str],
) -> None:
    target = checked_target(options.json)
    note_skipped(skipped)
    llm, startup_s = load_llm(engine)
    check_vocabulary(llm.loaded.checkpoint.spec.vocab_size)
    check_fits(workloads, llm.max_model_len)
    report = Report.of("throughput", model, llm.loaded, startup_s)
    report.skipped, report.seed = list(skipped), engine.get("seed", 0)
    with write(report, target) as save:
        warm_up(llm)
        cases = _run_all(llm, workloads, options, report, save)
        if not cases:
            return
        is_eager = report.gpu is not None and has_eager_option()  # a CPU captures nothing anyway
        if is_eager:  # two engines may not fit: the first one goes
            del llm
            llm = eager_llm(engine)
        outcome = recheck(llm, cases, is_eager=is_eager)
        report.recheck = recheck_json(outcome)
        print("\n".join(recheck_lines(outcome)))


def _run_all(
    llm: LLM,
    workloads: Sequence[BenchWorkload],
    options: ThroughputOptions,
    report: Report,
    save: Callable[[], None],
) -> list[Case]:
    """Run every workload; returns the requests to generate again."""
    seed = report.seed
    chosen = choose(workloads, options.recheck, seed)
    results: list[ThroughputResult] = []
    cases: list[Case] = []
    show_progress = sys.stderr.isatty()
    try:
        for workload in workloads:
            if show_progress:
                note(f"{workload.name}: {len(workload.requests):,} requests")
            sampling = sampling_of(workload, options.temperature, seed)
            result, outputs = run_workload(llm, workload, sampling, show_progress=show_progress)
            results.append(result)
            report.results.append(throughput_json(result))
            save()
            cases += [
                Case(
                    workload=workload.name,
                    request=index,
                    prompt=workload.requests[index].prompt,
                    sampling=sampling[index],
                    token_ids=outputs[index].outputs[0].token_ids,
                )
                for index in chosen[workload.name]
            ]
    finally:
        if results:
            show(report.title, throughput_table(results))
    return cases
