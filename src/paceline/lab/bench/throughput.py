"""Offline throughput: a workload through `LLM.generate`, all requests at once.

Owns what is measured: the clock runs from the call until it has returned every token, the prefix cache is empty
before, and every request must have got exactly its tokens; some can be generated again and compared. Prints nothing.
"""

from __future__ import annotations

import gc
import importlib
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from paceline.core.sampling import SamplingParams
from paceline.errors import EngineFailed
from paceline.lab.bench.workloads import LARGEST_TOKEN, BenchWorkload
from paceline.lab.report.summary import Distribution, distribution
from paceline.llm.llm import LLM
from paceline.llm.outputs import RequestOutput

Loaded = TypeVar("Loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputResult:
    """What one workload took."""

    workload: str
    mode: str
    temperature: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int  # of the prompts: what requests of this workload found of each other
    seconds: float
    steps: int
    preemptions: int
    e2e_s: Distribution  # of its requests, from when they were added
    padded_share: float  # of all tokens computed: what static and dynamic batching fill up
    output_tokens_per_request: int | None  # where all have the same, and a step is one token of each

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.seconds

    @property
    def ms_per_step(self) -> float | None:
        """The whole time, prompts included, over the tokens of one request."""
        count = self.output_tokens_per_request
        return None if count is None else self.seconds / count * 1e3


def load(make: Callable[..., Loaded], options: Mapping[str, Any]) -> tuple[Loaded, float]:
    """What `make` makes, and the seconds that took; whatever it imports is imported before."""
    import_engine()
    started_s = time.perf_counter()
    made = make(**options)
    return made, time.perf_counter() - started_s


def release_memory() -> None:
    """Free what a deleted engine held: two may not fit beside each other."""
    gc.unfreeze()  # objects that lived through the capture of graphs are hidden from the collector
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def import_engine() -> None:
    """Import what loading a model would import, so that start-up is the engine's own."""
    for name in ("torch", "paceline.models.load", "paceline.runner.cpu", "paceline.models.files.open"):
        importlib.import_module(name)
    with suppress(ImportError):  # its kernels need what only machines with a GPU have
        importlib.import_module("paceline.runner.gpu.build")


def sampling_of(workload: BenchWorkload, temperature: float | None, seed: int) -> list[SamplingParams]:
    """Sampling for each request: its number of tokens exactly, and a separate seed."""
    chosen = workload.temperature if temperature is None else temperature
    return [
        SamplingParams(
            temperature=chosen,
            max_tokens=request.num_output,
            ignore_eos=True,
            detokenize=False,
            seed=seed + index if chosen > 0 else None,
        )
        for index, request in enumerate(workload.requests)
    ]


def warm_up_requests(vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """A few requests with tokens that no workload has: greedy and sampled, short and longer."""
    draw = random.Random(5)
    lengths = (16, 16, 100, 100)
    prompts = [[draw.randrange(LARGEST_TOKEN + 1, vocab_size) for _ in range(count)] for count in lengths]
    sampling = [
        SamplingParams(temperature=temperature, max_tokens=8, ignore_eos=True, detokenize=False, seed=index)
        for index, temperature in enumerate((0.0, 0.6, 0.0, 0.6))
    ]
    return prompts, sampling


def warm_up(llm: LLM) -> None:
    prompts, sampling = warm_up_requests(llm.loaded.checkpoint.spec.vocab_size)
    llm.generate(prompts, sampling, use_tqdm=False)


def run_workload(
    llm: LLM, workload: BenchWorkload, sampling: Sequence[SamplingParams], *, show_progress: bool = False
) -> tuple[ThroughputResult, list[RequestOutput]]:
    """Run it once, on an empty prefix cache."""
    prompts = [request.prompt for request in workload.requests]
    llm.reset_prefix_cache()
    gc.collect()
    engine = llm.loaded.engine
    steps_before = engine.num_submitted
    counters = engine.scheduler.state.counters
    computed, padding = counters.computed_tokens, counters.padding_tokens
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=show_progress)
    seconds = time.perf_counter() - started_s
    check_complete(workload, outputs)
    result = ThroughputResult(
        workload=workload.name,
        mode=llm.loaded.config.scheduler.mode,
        temperature=sampling[0].temperature,
        num_requests=len(outputs),
        prompt_tokens=workload.num_prompt_tokens,
        output_tokens=workload.num_output_tokens,
        cached_tokens=sum(output.num_cached_tokens for output in outputs),
        seconds=seconds,
        steps=engine.num_submitted - steps_before,
        preemptions=sum(output.metrics.preemptions for output in outputs if output.metrics is not None),
        e2e_s=distribution(np.array([_seconds_of(output) for output in outputs])),
        padded_share=(counters.padding_tokens - padding) / max(1, counters.computed_tokens - computed),
        output_tokens_per_request=workload.requests[0].num_output if workload.is_decode else None,
    )
    return result, outputs


def _seconds_of(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.finished_s is not None
    return metrics.finished_s - metrics.arrival_s


def check_complete(workload: BenchWorkload, outputs: Sequence[RequestOutput]) -> None:
    """Every request got exactly its tokens, or the figures mean nothing."""
    wrong = [
        (index, output.outputs[0])
        for index, (request, output) in enumerate(zip(workload.requests, outputs, strict=True))
        if len(output.outputs[0].token_ids) != request.num_output
    ]
    if wrong:
        index, part = wrong[0]
        raise EngineFailed(
            f"{workload.name}: {len(wrong)} of {len(outputs)} requests did not get their tokens; request {index} "
            f"has {len(part.token_ids)} of {workload.requests[index].num_output} and ended with "
            f"{part.error or part.finish_reason}"
        )


# Generating requests of a run again, each alone, and comparing token by token.
#
# Owns the choice of requests and what a difference is. A request has the same seed both times, so that equal numbers
# give equal tokens; where they differ the place is reported, and for greedy requests how close the two best tokens
# were.


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request of the run and the tokens it got there."""

    workload: str
    request: int  # its number in the workload
    prompt: list[int]
    sampling: SamplingParams
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """Where a request went another way."""

    workload: str
    request: int
    num_tokens: int
    first: int  # number of the first token that differs, from 0
    num_different: int  # tokens that differ, place by place
    in_run: int  # the token of the run
    alone: int  # the token when generated alone
    logit_gap: float | None = None  # between the two likeliest tokens there, for greedy requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """The outcome for all requests."""

    num_requests: int
    num_tokens: int
    is_eager: bool  # with another engine that captures nothing; else with the engine of the run
    differences: tuple[TokenDifference, ...]


def choose(workloads: Sequence[BenchWorkload], count: int, seed: int) -> dict[str, list[int]]:
    """Numbers of `count` random requests, spread over the workloads as evenly as they allow."""
    draw = random.Random(seed)
    left = {work.name: draw.sample(range(len(work.requests)), len(work.requests)) for work in workloads}
    chosen: dict[str, list[int]] = {name: [] for name in left}
    for _ in range(min(count, sum(len(numbers) for numbers in left.values()))):
        name = min((name for name in left if left[name]), key=lambda name: len(chosen[name]))
        chosen[name].append(left[name].pop())
    return chosen


def eager_llm(options: Mapping[str, Any]) -> LLM:
    """An engine like that of the run which captures nothing. That of the run must be gone: both may not fit."""
    release_memory()
    return LLM(**{**options, "enforce_eager": True})


def recheck(llm: LLM, cases: Sequence[Case], *, is_eager: bool) -> Recheck:
    """Generate every case alone, on an empty prefix cache."""
    differences = [difference for case in cases if (difference := _compare(llm, case)) is not None]
    return Recheck(
        num_requests=len(cases),
        num_tokens=sum(len(case.token_ids) for case in cases),
        is_eager=is_eager,
        differences=tuple(differences),
    )


def _compare(llm: LLM, case: Case) -> TokenDifference | None:
    llm.reset_prefix_cache()
    (output,) = llm.generate([case.prompt], [case.sampling], use_tqdm=False)
    again = output.outputs[0].token_ids
    first = first_difference(case.token_ids, again)
    if first is None:
        return None
    missing = -1  # what a list that is too short has
    is_same = [one == two for one, two in zip(case.token_ids, again, strict=False)]
    return TokenDifference(
        workload=case.workload,
        request=case.request,
        num_tokens=len(case.token_ids),
        first=first,
        num_different=max(len(case.token_ids), len(again)) - sum(is_same),
        in_run=case.token_ids[first] if first < len(case.token_ids) else missing,
        alone=again[first] if first < len(again) else missing,
        logit_gap=_logit_gap(llm, case, again[:first]) if case.sampling.temperature == 0 else None,
    )


def first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    """The first place where they differ; a list that ends early differs where it ends."""
    for place, (left, right) in enumerate(zip(one, two, strict=False)):
        if left != right:
            return place
    return None if len(one) == len(two) else min(len(one), len(two))


def _logit_gap(llm: LLM, case: Case, before: list[int]) -> float | None:
    """How far the two likeliest tokens lay apart where the outputs parted; None where nothing can tell."""
    sampling = replace(case.sampling, max_tokens=1, logprobs=2)
    (output,) = llm.generate([case.prompt + before], [sampling], use_tqdm=False)
    entries = output.outputs[0].logprobs
    if not entries:
        return None
    likeliest = sorted((entry.logprob for entry in entries[0].values()), reverse=True)[:2]
    return likeliest[0] - likeliest[1] if len(likeliest) == 2 else None
