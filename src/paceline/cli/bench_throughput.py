"""The runs of `paceline bench throughput`: load, warm up, every workload, the check afterwards.

Of several modes each has an engine of its own, one after the other. Figures that were measured are shown and written
also when something later fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from paceline.bench.machine import BUDGETS, engine_sizes
from paceline.bench.options import ThroughputOptions
from paceline.bench.recheck import Case, choose, eager_llm, has_eager_option, recheck
from paceline.bench.tables import recheck_json, recheck_lines, throughput_json, throughput_table
from paceline.bench.throughput import (
    ThroughputResult,
    load,
    release_memory,
    run_workload,
    sampling_of,
    warm_up,
)
from paceline.cli.bench_frame import begin, report_of
from paceline.cli.bench_output import Report, note, show, write
from paceline.cli.bench_plan import Asked
from paceline.llm.llm import LLM


def run_throughput(options: ThroughputOptions, asked: Asked, modes: Sequence[str]) -> None:
    target = begin(options, asked)
    engine = {**asked.engine, "mode": modes[0]}
    llm, startup_s = load(LLM, engine)
    report = report_of("throughput", asked, llm, startup_s)
    results: list[ThroughputResult] = []
    with write(report, target) as save:
        try:
            cases = _run_all(llm, asked, options, report, results, save)
            for mode in modes[1:]:
                del llm  # two engines may not fit: the one before goes
                release_memory()
                llm = _next_llm(asked, mode, report)
                _run_all(llm, asked, options, report, results, save)
        finally:
            if results:
                show(report.title, throughput_table(results))
        if not cases:
            return
        is_eager = report.gpu is not None and has_eager_option()  # a CPU captures nothing anyway
        if is_eager:
            del llm
            llm = eager_llm(engine)
        outcome = recheck(llm, cases, is_eager=is_eager)
        report.recheck = recheck_json(outcome)
        print("\n".join(recheck_lines(outcome)))


def _next_llm(asked: Asked, mode: str, report: Report) -> LLM:
    """An engine of another mode, with the token budget that the first one took: only the mode differs."""
    budgets = {name: report.engine[name] for name in BUDGETS}
    llm, startup_s = load(LLM, {**asked.engine, "mode": mode, **budgets})
    report.further.append({"startup_s": startup_s, **engine_sizes(llm.loaded)})
    return llm


def _run_all(
    llm: LLM,
    asked: Asked,
    options: ThroughputOptions,
    report: Report,
    results: list[ThroughputResult],
    save: Callable[[], None],
) -> list[Case]:
    """Run every workload; returns the requests to generate again."""
    seed = report.seed
    chosen = choose(asked.workloads, options.recheck, seed)
    cases: list[Case] = []
    show_progress = sys.stderr.isatty()
    warm_up(llm)
    for workload in asked.workloads:
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
    return cases
