"""From the values of a command line to the runs of `paceline bench`.

Owns the order of things: check everything that needs no model, make the workloads, run. What is measured is in the
bench part. Knows no command-line library, so that a machine without one can measure too; heavy imports happen late.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from paceline.bench.options import BenchOptions, LatencyOptions, ThroughputOptions
from paceline.cli.lists import split_list
from paceline.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from paceline.errors import InputError
from paceline.llm.arguments import split_arguments

if TYPE_CHECKING:
    from paceline.bench.workloads import BenchWorkload

Options = TypeVar("Options", bound=BenchOptions)
AnyOptions = TypeVar("AnyOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a command line asks for, as far as that needs no model."""

    model: str  # as it is called in the results
    engine: Mapping[str, Any]  # the options of `LLM`
    workloads: Sequence[BenchWorkload]
    skipped: Sequence[str]  # workloads that lack a trace


def throughput(values: Mapping[str, Any]) -> None:
    options = own_options(ThroughputOptions, values)
    modes = _modes(options)
    with _asked(options, values, _offline) as asked:
        from paceline.cli.bench_throughput import run_throughput

        run_throughput(options, asked, modes)


def latency(values: Mapping[str, Any]) -> None:
    options = own_options(LatencyOptions, values)
    with _asked(options, values, _online) as asked:
        from paceline.cli.bench_latency import run_latency

        run_latency(options, asked)


@contextmanager
def _asked(
    options: Options,
    values: Mapping[str, Any],
    make: Callable[[Options], tuple[list[BenchWorkload], tuple[str, ...]]],
) -> Iterator[Asked]:
    with _engine(options, values) as engine:
        workloads, skipped = make(options)
        _check_length(workloads, engine)
        yield Asked(model=_model_name(options, engine), engine=engine, workloads=workloads, skipped=skipped)


def _modes(options: ThroughputOptions) -> list[str]:
    modes = split_list(options.modes, "--mode")
    for mode in modes:
        split_arguments(None, {"mode": mode})
    if len(modes) > 1 and options.recheck:
        raise InputError("--recheck generates requests of one engine again; give one --mode with it")
    return modes


def own_options(config: type[AnyOptions], values: Mapping[str, Any]) -> AnyOptions:
    """The declared options of `config` among all values of a command line."""
    names = {spec.name for spec in fields(cast(Any, config))}
    return config(**{name: value for name, value in values.items() if name in names})


@contextmanager
def _engine(options: BenchOptions, values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options of `LLM`; a shape's folder is there as long as this is entered."""
    configs = (ModelConfig, KVConfig, SchedulerConfig, EngineConfig)
    known = {spec.name for config in configs for spec in fields(config)}
    given = {name: value for name, value in values.items() if name in known and value is not None}
    split_arguments(None, given)
    if options.shape is None:
        yield {"skip_tokenizer_init": True, **given}
        return
    if "model" in given:
        raise InputError("--shape and --model name two models; give one of them")
    from paceline.bench.shapes import write_shape

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        yield {**write_shape(options.shape, Path(folder)), **given}


def _model_name(options: BenchOptions, engine: Mapping[str, Any]) -> str:
    from paceline.checkpoint.default_model import DEFAULT_NAME

    return options.shape or engine.get("model") or DEFAULT_NAME


def _offline(options: ThroughputOptions) -> tuple[list[BenchWorkload], tuple[str, ...]]:
    from paceline.bench.workloads import OFFLINE, make_workload, read_lengths, select

    chosen = select(options.workload, OFFLINE, has_trace=options.trace is not None)
    _need_some(chosen.names, chosen.without_trace)
    lengths = [] if options.trace is None else read_lengths(Path(options.trace))
    return [make_workload(name, OFFLINE, lengths) for name in chosen.names], chosen.without_trace


def _online(options: LatencyOptions) -> tuple[list[BenchWorkload], tuple[str, ...]]:
    from paceline.bench.workloads import ONLINE, make_workload, online_fixed, read_lengths, select

    if options.rate is not None:
        if options.workload is not None:
            raise InputError(
                "--rate makes a workload of its own and --workload names others; give one of them"
            )
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
    from paceline.bench.workloads import check_fits

    if "max_model_len" in engine:
        check_fits(workloads, engine["max_model_len"])
