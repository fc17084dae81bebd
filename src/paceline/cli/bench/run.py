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
from typing import Any

from paceline.cli.bench.view import Report, note, show, write
from paceline.cli.flags import engine_options, split_list, writable
from paceline.cli.terminal import RequestBar
from paceline.config.options import from_values
from paceline.core.sampling import SamplingParams
from paceline.core.structure import Structure
from paceline.errors import InputError, InvalidRequest
from paceline.lab.bench.bench_options import (
    EmbedBenchOptions,
    EngineBenchOptions,
    LatencyOptions,
    StructuredOptions,
    ThroughputOptions,
)
from paceline.lab.bench.latency import LatencyResult, run_online, warm_up_online
from paceline.lab.bench.machine import BUDGETS, engine_sizes
from paceline.lab.bench.shapes import write_shape, write_tokenizer
from paceline.lab.bench.structured import (
    SCHEMAS,
    StructuredResult,
    read_schema,
    run_structured,
    structure_of,
    total_of,
)
from paceline.lab.bench.tables import (
    embed_json,
    embed_table,
    latency_json,
    latency_table,
    recheck_json,
    recheck_lines,
    structured_json,
    structured_table,
    throughput_json,
    throughput_table,
)
from paceline.lab.bench.throughput import (
    Case,
    ThroughputResult,
    choose,
    eager_llm,
    load,
    recheck,
    release_memory,
    run_workload,
    sampling_of,
    warm_up,
)
from paceline.lab.bench.vector_runs import make_texts, run_embed
from paceline.lab.bench.workloads import (
    OFFLINE,
    ONLINE,
    BenchWorkload,
    check_fits,
    check_vocabulary,
    make_workload,
    online_fixed,
    read_lengths,
    select,
)
from paceline.llm.arguments import split_arguments
from paceline.llm.async_llm import AsyncLLM
from paceline.llm.llm import LLM
from paceline.models.files.fetch import DEFAULT_NAME, MINILM
from paceline.text.guide.check import check


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTask:
    """What a command line asks for, as far as that needs no model."""

    model: str  # as it is called in the results
    engine: Mapping[str, Any]  # the options of `LLM`
    workloads: Sequence[BenchWorkload]
    skipped: Sequence[str]  # workloads that lack a trace
    target: Path | None  # where the JSON goes


def throughput(values: Mapping[str, Any]) -> None:
    options = from_values(ThroughputOptions, values)
    modes = _modes(options)
    with _task(options, values, *_offline(options)) as task:
        run_throughput(options, task, modes)


def latency(values: Mapping[str, Any]) -> None:
    options = from_values(LatencyOptions, values)
    with _task(options, values, *_online(options)) as task:
        run_latency(options, task)


def structured(values: Mapping[str, Any]) -> None:
    options = from_values(StructuredOptions, values)
    chosen = (
        SCHEMAS if options.schema is None else {Path(options.schema).stem: read_schema(Path(options.schema))}
    )
    forms = {name: structure_of(schema, compact=not options.whitespace) for name, schema in chosen.items()}
    try:
        for structure in forms.values():
            check(structure, "--schema")
    except InvalidRequest as error:
        raise InputError(str(error)) from error
    with _task(
        options, {**values, "max_num_seqs": values.get("max_num_seqs") or options.clients}, (), ()
    ) as task:
        run_forms(options, task, forms)


def embed(values: Mapping[str, Any]) -> None:
    options = from_values(EmbedBenchOptions, values)
    model = values.get("model") or (MINILM.name if options.shape is None else None)
    with _task(options, {**values, "model": model}, (), ()) as task:
        run_vectors(options, task)


@contextmanager
def _task(
    options: EngineBenchOptions,
    values: Mapping[str, Any],
    workloads: Sequence[BenchWorkload],
    skipped: Sequence[str],
) -> Iterator[BenchTask]:
    """The task; a shape's folder is there as long as this is entered."""
    engine = engine_options(values)
    if options.shape is not None and "model" in engine:
        raise InputError("--shape and --model name two models; give one of them")
    target = writable("--json", options.json)
    model = options.shape or engine.get("model") or DEFAULT_NAME
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        own = {"skip_tokenizer_init": True}
        if options.shape is not None:
            own = write_shape(options.shape, Path(folder))
        engine = {**own, **engine}
        if "max_model_len" in engine:  # else it is known when the model is loaded
            check_fits(workloads, engine["max_model_len"])
        for name in skipped:
            note(f"{name} is left out: its lengths come from a trace; name the file with --trace")
        yield BenchTask(model=model, engine=engine, workloads=workloads, skipped=skipped, target=target)


def _modes(options: ThroughputOptions) -> list[str]:
    modes = split_list(options.modes, "--mode")
    for mode in modes:
        split_arguments(None, {"mode": mode})
    if len(modes) > 1 and options.recheck:
        raise InputError("--recheck generates requests of one engine again; give one --mode with it")
    return modes


def _offline(options: ThroughputOptions) -> tuple[list[BenchWorkload], tuple[str, ...]]:
    chosen = select(options.workload, OFFLINE, has_trace=options.trace is not None)
    _need_some(chosen.names, chosen.without_trace)
    lengths = [] if options.trace is None else read_lengths(Path(options.trace))
    return [make_workload(name, OFFLINE, lengths) for name in chosen.names], chosen.without_trace


def _online(options: LatencyOptions) -> tuple[list[BenchWorkload], tuple[str, ...]]:
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


# What both commands do around their runs. No engine is held here: a command that loads several gives each up before
# the next.


def report_of(kind: str, task: BenchTask, llm: LLM | AsyncLLM, startup_s: float) -> Report:
    """An empty report on an engine that can take the workloads."""
    check_vocabulary(llm.loaded.checkpoint.spec.vocab_size)
    check_fits(task.workloads, llm.max_model_len)
    return Report(
        kind=kind,
        model=task.model,
        startup_s=startup_s,
        engine=engine_sizes(llm.loaded),
        seed=task.engine.get("seed", 0),
        skipped=list(task.skipped),
    )


# The runs of `paceline bench latency`: load, warm up, every workload at its own pace.
#
# Figures that were measured are shown and written also when something later fails.


def run_latency(options: LatencyOptions, task: BenchTask) -> None:
    llm, startup_s = load(AsyncLLM, task.engine)
    try:
        report = report_of("latency", task, llm, startup_s)
        with write(report, task.target) as save:
            asyncio.run(_run_all(llm, task.workloads, options, report, save))
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
            bar = RequestBar(workload.name, len(workload.requests))
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


# The runs of `paceline bench structured`: load, then every schema.


def run_forms(options: StructuredOptions, task: BenchTask, forms: Mapping[str, Structure]) -> None:
    engine = {**task.engine, "skip_tokenizer_init": False}
    if options.shape is not None:
        write_tokenizer(options.shape, Path(engine["model"]))
    llm, startup_s = load(LLM, engine)
    report = report_of("structured", task, llm, startup_s)
    sampling = SamplingParams(temperature=options.temperature or 0.0, max_tokens=options.output_tokens)
    results: list[StructuredResult] = []
    with write(report, task.target) as save:
        try:
            warm_up(llm)
            for name, structure in forms.items():
                result = run_structured(
                    llm, name, structure, sampling, clients=options.clients, rounds=options.rounds
                )
                results.append(result)
                report.results.append(structured_json(result))
                save()
        finally:
            if results:
                show(report.title, structured_table([*results, total_of(results)]))


# The run of `paceline bench embed`: load, warm up, all texts.


def run_vectors(options: EmbedBenchOptions, task: BenchTask) -> None:
    llm, startup_s = load(AsyncLLM, task.engine)
    try:
        report = report_of("embed", task, llm, startup_s)
        longest = max(options.short, options.long)
        if longest > llm.max_model_len:
            raise InputError(f"a text of {longest} tokens is longer than the model's {llm.max_model_len}")
        vocab_size = llm.loaded.checkpoint.spec.vocab_size
        texts = make_texts(options.texts, options.short, options.long, options.long_share, vocab_size)
        bar = RequestBar(f"{options.clients} clients", len(texts))
        with write(report, task.target) as save:
            try:
                result = asyncio.run(run_embed(llm, texts, options.clients, bar.advance))
            finally:
                bar.close()
            report.results.append(embed_json(result))
            save()
            show(report.title, embed_table([result]))
    finally:
        llm.shutdown()


# The runs of `paceline bench throughput`: load, warm up, every workload, the check afterwards.
#
# Each of several modes has a separate engine, one after the other. Figures that were measured are shown and
# written also when something later fails.


def run_throughput(options: ThroughputOptions, task: BenchTask, modes: Sequence[str]) -> None:
    engine = {**task.engine, "mode": modes[0]}
    llm, startup_s = load(LLM, engine)
    report = report_of("throughput", task, llm, startup_s)
    results: list[ThroughputResult] = []
    with write(report, task.target) as save:
        try:
            cases = _run_throughput(llm, task, options, report, results, save)
            for mode in modes[1:]:
                del llm  # two engines may not fit: the one before goes
                release_memory()
                llm = _next_llm(task, mode, report)
                _run_throughput(llm, task, options, report, results, save)
        finally:
            if results:
                show(report.title, throughput_table(results))
        if not cases:
            return
        is_eager = report.gpu is not None  # a CPU captures nothing anyway
        if is_eager:
            del llm
            llm = eager_llm(engine)
        outcome = recheck(llm, cases, is_eager=is_eager)
        report.recheck = recheck_json(outcome)
        print("\n".join(recheck_lines(outcome)))


def _next_llm(task: BenchTask, mode: str, report: Report) -> LLM:
    """An engine of another mode, with the token budget that the first one took: only the mode differs."""
    budgets = {name: report.engine[name] for name in BUDGETS}
    llm, startup_s = load(LLM, {**task.engine, "mode": mode, **budgets})
    report.further.append({"startup_s": startup_s, **engine_sizes(llm.loaded)})
    return llm


def _run_throughput(
    llm: LLM,
    task: BenchTask,
    options: ThroughputOptions,
    report: Report,
    results: list[ThroughputResult],
    save: Callable[[], None],
) -> list[Case]:
    """Run every workload; returns the requests to generate again."""
    seed = report.seed
    chosen = choose(task.workloads, options.recheck, seed)
    cases: list[Case] = []
    show_progress = sys.stderr.isatty()
    warm_up(llm)
    for workload in task.workloads:
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
