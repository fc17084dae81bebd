"""The workloads engines are compared on: requests as arrival, prompt token ids and tokens to generate.

Deterministic: a name gives the same requests on every machine, to the last token id, so that two engines do the
same work. Python's own generator is used because its draws are fixed by its documentation. Knows no engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InputError, did_you_mean
from paceline.lab.workload.traces import read_trace

LARGEST_TOKEN = 10_000  # ids of every prompt lie between 0 and this
ALL = "all"
LONGEST_PROMPT, LONGEST_OUTPUT = 3500, 500  # requests of a trace are cut to these

Lengths = Sequence[tuple[int, int]]  # prompt and output of the requests of a trace


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One request of a workload."""

    prompt: list[int]
    num_output: int  # exactly this number of tokens is generated
    arrival_s: float = 0.0  # after the start


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWorkload:
    """Requests under a name. Each has its own seed, so that any of them can be generated again alone."""

    name: str
    requests: tuple[BenchRequest, ...]
    temperature: float = 0.6
    is_decode: bool = False  # all prompts are short and all outputs equally long: a step has a meaning

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output for request in self.requests)

    @property
    def longest(self) -> int:
        return max(len(request.prompt) + request.num_output for request in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """How a workload is made."""

    make: Callable[[Lengths], list[BenchRequest]]  # from the trace, where it takes one
    trace_rows: range | None = None  # which requests of the trace it takes
    is_decode: bool = False


def uniform(count: int, low: int, high: int) -> list[BenchRequest]:
    """Prompts and outputs of `low` to `high` tokens, all at once."""
    draw = random.Random(0)
    prompts = [_tokens(draw, draw.randint(low, high)) for _ in range(count)]
    return [BenchRequest(prompt=prompt, num_output=draw.randint(low, high)) for prompt in prompts]


def fixed(
    count: int, num_prompt: int, num_output: int, *, seed: int, rate: float | None = None
) -> list[BenchRequest]:
    """Requests of one size, all at once or with Poisson arrivals at `rate` a second."""
    return _drawn([(num_prompt, num_output)] * count, random.Random(seed), rate)


def shared_prefix(count: int, num_shared: int, num_own: int, num_output: int) -> list[BenchRequest]:
    """Requests whose first `num_shared` tokens are the same."""
    draw = random.Random(3)
    shared = _tokens(draw, num_shared)
    return [BenchRequest(prompt=shared + _tokens(draw, num_own), num_output=num_output) for _ in range(count)]


def traced(lengths: Lengths, rate: float | None = None) -> list[BenchRequest]:
    """Requests of recorded lengths, cut to what fits everywhere."""
    cut = [(min(prompt, LONGEST_PROMPT), min(output, LONGEST_OUTPUT)) for prompt, output in lengths]
    return _drawn(cut, random.Random(1), rate)


def online_fixed(rate: float, count: int, num_prompt: int, num_output: int) -> BenchWorkload:
    """Poisson arrivals of requests of one size."""
    requests = fixed(count, num_prompt, num_output, seed=4, rate=rate)
    return BenchWorkload(name=f"{num_prompt}x{num_output}@{rate:g}", requests=tuple(requests))


def _drawn(lengths: Lengths, draw: random.Random, rate: float | None) -> list[BenchRequest]:
    now_s, requests = 0.0, []
    for num_prompt, num_output in lengths:
        if rate is not None:  # the gap is drawn before the prompt
            now_s += draw.expovariate(rate)
        prompt = _tokens(draw, num_prompt)
        requests.append(BenchRequest(prompt=prompt, num_output=num_output, arrival_s=now_s))
    return requests


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(0, LARGEST_TOKEN) for _ in range(count)]


def _decode(rows: int) -> _Kind:
    return _Kind(make=lambda _: fixed(rows, 16, 256, seed=20 + rows), is_decode=True)


def _azure_at(rate: int, first: int, count: int) -> _Kind:
    return _Kind(make=lambda lengths: traced(lengths, rate), trace_rows=range(first, first + count))


OFFLINE: dict[str, _Kind] = {
    "nano": _Kind(make=lambda _: uniform(256, 100, 1024)),
    **{f"decode-b{rows}": _decode(rows) for rows in (1, 8, 64, 256, 1024)},
    "azure-conv-1000": _Kind(make=traced, trace_rows=range(1000)),
    "prefix-2048x256": _Kind(make=lambda _: shared_prefix(256, 2048, 128, 64)),
    "prefill-64x3500": _Kind(make=lambda _: fixed(64, 3500, 1, seed=31)),
    "1000x1000": _Kind(make=lambda _: fixed(1024, 1000, 1000, seed=32)),
}
ONLINE: dict[str, _Kind] = {
    "azure-conv@8": _azure_at(8, 2000, 240),
    "azure-conv@20": _azure_at(20, 3000, 500),
    "azure-conv@32": _azure_at(32, 4000, 800),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Names a user asked for, those that can run and those that lack their trace."""

    names: tuple[str, ...]
    without_trace: tuple[str, ...] = ()


def select(asked: str, known: dict[str, _Kind], *, has_trace: bool) -> Selection:
    """Take a comma-separated list of names apart; `all` is every workload."""
    names = [part.strip() for part in asked.split(",") if part.strip()]
    for name in names:
        if name not in known and name != ALL:
            hint = did_you_mean(name, known)
            raise InputError(f"there is no workload {name!r}{hint} (known: {', '.join(known)}, {ALL})")
    if not names:
        raise InputError(f"name a workload: {', '.join(known)}, or {ALL}")
    wanted = list(known) if ALL in names else list(dict.fromkeys(names))
    lacking = tuple(name for name in wanted if known[name].trace_rows is not None and not has_trace)
    return Selection(names=tuple(name for name in wanted if name not in lacking), without_trace=lacking)


def make_workload(name: str, known: dict[str, _Kind], trace: Lengths = ()) -> BenchWorkload:
    """The requests of one workload; `trace` is what `read_lengths` gave, for those that need one."""
    kind = known[name]
    rows = kind.trace_rows
    if rows is not None and len(trace) < rows.stop:
        raise InputError(
            f"{name} takes requests {rows.start:,} to {rows.stop:,} of its trace, and the one given has "
            f"{len(trace):,}; give a longer one (the Azure 2023 conversation trace)"
        )
    lengths = [] if rows is None else trace[rows.start : rows.stop]
    return BenchWorkload(
        name=name,
        requests=tuple(kind.make(lengths)),
        temperature=0.0 if kind.is_decode else 0.6,
        is_decode=kind.is_decode,
    )


def read_lengths(path: Path) -> Lengths:
    """Prompt and output lengths of the requests of a trace file."""
    trace = read_trace(path)
    return list(zip(trace.prompt_len.tolist(), trace.output_len.tolist(), strict=True))


def check_fits(workloads: Sequence[BenchWorkload], max_model_len: int) -> None:
    """Refuse a workload with a request that the engine could not take."""
    for workload in workloads:
        if workload.longest > max_model_len:
            raise InputError(
                f"{workload.name} has a request of {workload.longest:,} tokens, prompt and output together, and "
                f"the engine takes {max_model_len:,}: raise --max-model-len or leave the workload out"
            )


def check_vocabulary(vocab_size: int) -> None:
    """Refuse a model that lacks tokens of the workloads; one more is needed for the warm-up."""
    if vocab_size < LARGEST_TOKEN + 2:
        raise InputError(
            f"the workloads use token ids up to {LARGEST_TOKEN:,} and the model's vocabulary has {vocab_size:,}: "
            "take a model with a larger one, or --shape tiny"
        )
