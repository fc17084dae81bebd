"""From the values of a command line to the runs of `paceline bench`.

Owns the order of things: check everything that needs no model, make the workloads, run. What is measured is in the
bench part. Needs no library for tables or progress, so that a machine without one can measure too.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.cli.bench.view import Report, note, note_skipped, show, write
from paceline.cli.flags import engine_options, split_list, writable
from paceline.config.options import pick
from paceline.errors import InputError
from paceline.lab.bench.bench_options import BenchOptions, LatencyOptions, ThroughputOptions
from paceline.lab.bench.latency import LatencyResult, run_online, warm_up_online
from paceline.lab.bench.machine import BUDGETS, engine_sizes
from paceline.lab.bench.recheck import Case, choose, eager_llm, has_eager_option, recheck
from paceline.lab.bench.tables import (
    latency_json,
    latency_table,
    recheck_json,
    recheck_lines,
    throughput_json,
    throughput_table,
)
from paceline.lab.bench.throughput import (
    ThroughputResult,
    load,
    release_memory,
    run_workload,
    sampling_of,
    warm_up,
)
from paceline.lab.bench.workloads import BenchWorkload, check_fits, check_vocabulary
from paceline.llm.arguments import split_arguments
from paceline.llm.async_llm import AsyncLLM
from paceline.llm.llm import LLM

if TYPE_CHECKING:
    from paceline.lab.bench.workloads import BenchWorkload


Options = TypeVar("Options", bound=BenchOptions)
AnyOptions = TypeVar("AnyOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTask:
    """What a command line asks for, as far as that needs no model."""

    model: str  # as it is called in the results
    engine: Mapping[str, Any]  # the options of `LLM`
    workloads: Sequence[BenchWorkload]
    skipped: Sequence[str]  # workloads that lack a trace


def throughput(values: Mapping[str, Any]) -> None:
    options = own_options(ThroughputOptions, values)
    modes = _modes(options)
    with _asked(options, values, _offline) as asked:
        run_throughput(options, asked, modes)


def latency(values: Mapping[str, Any]) -> None:
    options = own_options(LatencyOptions, values)
    with _asked(options, values, _online) as asked:
        run_latency(options, asked)


@contextmanager
def _asked(
    options: Options,
    values: Mapping[str, Any],
    make: Callable[[Options], tuple[list[BenchWorkload], tuple[str, ...]]],
) -> Iterator[BenchTask]:
    with _engine(options, values) as engine:
        workloads, skipped = make(options)
        _check_length(workloads, engine)
        yield BenchTask(
            model=_model_name(options, engine), engine=engine, workloads=workloads, skipped=skipped
        )


def _modes(options: ThroughputOptions) -> list[str]:
    modes = split_list(options.modes, "--mode")
    for mode in modes:
        split_arguments(None, {"mode": mode})
    if len(modes) > 1 and options.recheck:
        raise InputError("--recheck generates requests of one engine again; give one --mode with it")
    return modes


def own_options(config: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    """The declared options of `config` among all values of a command line."""
    return config(**pick(config, values))


@contextmanager
def _engine(options: BenchOptions, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options of `LLM`; a shape's folder is there as long as this is entered."""
    given = engine_options(values)
    if options.shape is None:
        yield {"skip_tokenizer_init": True, **given}
        return
    if "model" in given:
        raise InputError("--shape and --model name two models; give one of them")
    from paceline.lab.bench.shapes import write_shape

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        yield {**write_shape(options.shape, Path(folder)), **given}


def _model_name(options: BenchOptions, engine: Mapping[str, Any]) -> str:
    from paceline.models.files.fetch import DEFAULT_NAME

    return options.shape or engine.get("model") or DEFAULT_NAME


def _offline(options: ThroughputOptions) -> tuple[list[BenchWorkload], tuple[str, ...]]:
    from paceline.lab.bench.workloads import OFFLINE, make_workload, read_lengths, select

    chosen = select(options.workload, OFFLINE, has_trace=options.trace is not None)
    _need_some(chosen.names, chosen.without_trace)
    lengths = [] if options.trace is None else read_lengths(Path(options.trace))
    return [make_workload(name, OFFLINE, lengths) for name in chosen.names], chosen.without_trace


def _online(options: LatencyOptions) -> tuple[list[BenchWorkload], tuple[str, ...]]:
    from paceline.lab.bench.workloads import ONLINE, make_workload, online_fixed, read_lengths, select

    if options.rate is not None:
        if options.workload is not None:
            raise InputError("--rate makes a workload and --workload names others; give one of them")
        made = online_fixed(options.rate, options.num, options.prompt_tokens, options.output_tokens)
        return [made], ()
    if options.workload is None and options.trace is None:
        raise InputError(
            "give --rate R with --num, --prompt-tokens and --output-tokens, or --trace FILE for the workloads "
            f"{', '.join(ONLINE)}"
        )
    chosen = select(options.workload or "all", ONLINE, has_trace=options.trace is not None)
    _need_some(chosen.names, chosen.without_trace)
    assert options.trace is not None  # every online workload needs one
    lengths = read_lengths(Path(options.trace))
    return [make_workload(name, ONLINE, lengths) for name in chosen.names], chosen.without_trace


def _need_some(names: Sequence[str], without_trace: Sequence[str]) -> None:
    if not names:
        raise InputError(
            f"{', '.join(without_trace)}: the lengths come from a trace; name its file with --trace"
        )


def _check_length(workloads: Sequence[BenchWorkload], engine: Mapping[str, Any]) -> None:
    """As far as it is known before a model is loaded; the engine's own length is looked at again."""
    from paceline.lab.bench.workloads import check_fits

    if "max_model_len" in engine:
        check_fits(workloads, engine["max_model_len"])


# What both commands of `paceline bench` do around their runs: look at the destination, begin a report.
#
# Holds no engine: a command that loads several gives each up before the next. What is measured is theirs.


def begin(options: BenchOptions, asked: BenchTask) -> Path | None:
    """Before anything is loaded: where the JSON goes, if anywhere."""
    target = writable("--json", options.json)
    note_skipped(asked.skipped)
    return target


def report_of(kind: str, asked: BenchTask, llm: LLM | AsyncLLM, startup_s: float) -> Report:
    """An empty report on an engine that can take the workloads."""
    check_vocabulary(llm.loaded.checkpoint.spec.vocab_size)
    check_fits(asked.workloads, llm.max_model_len)
    report = Report.of(kind, asked.model, llm.loaded, startup_s)
    report.skipped, report.seed = list(asked.skipped), asked.engine.get("seed", 0)
    return report


# The runs of `paceline bench latency`: load, warm up, every workload at its own pace.
#
# Figures that were measured are shown and written also when something later fails.


def run_latency(options: LatencyOptions, asked: BenchTask) -> None:
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
        await warm_up_online(llm)
        for workload in workloads:
            bar = _LatencyBar(workload)
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


class _LatencyBar:
    """Progress by finished requests, on a terminal."""

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


# The runs of `paceline bench throughput`: load, warm up, every workload, the check afterwards.
#
# Of several modes each has an engine of its own, one after the other. Figures that were measured are shown and
# written also when something later fails.


def run_throughput(options: ThroughputOptions, asked: BenchTask, modes: Sequence[str]) -> None:
    target = begin(options, asked)
    engine = {**asked.engine, "mode": modes[0]}
    llm, startup_s = load(LLM, engine)
    report = report_of("throughput", asked, llm, startup_s)
    results: list[ThroughputResult] = []
    with write(report, target) as save:
        try:
            cases = _run_throughput(llm, asked, options, report, results, save)
            for mode in modes[1:]:
                del llm  # two engines may not fit: the one before goes
                release_memory()
                llm = _next_llm(asked, mode, report)
                _run_throughput(llm, asked, options, report, results, save)
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


def _next_llm(asked: BenchTask, mode: str, report: Report) -> LLM:
    """An engine of another mode, with the token budget that the first one took: only the mode differs."""
    budgets = {name: report.engine[name] for name in BUDGETS}
    llm, startup_s = load(LLM, {**asked.engine, "mode": mode, **budgets})
    report.further.append({"startup_s": startup_s, **engine_sizes(llm.loaded)})
    return llm


def _run_throughput(
    llm: LLM,
    asked: BenchTask,
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
