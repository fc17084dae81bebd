"""Generating requests of a run again, each alone, and comparing token by token.

Owns the choice of requests and what a difference is. A request has the same seed both times, so that equal numbers
give equal tokens; where they differ the place is reported, and for greedy requests how close the two best tokens were.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.sampling import SamplingParams
from paceline.lab.bench.throughput import release_memory
from paceline.lab.bench.workloads import BenchWorkload
from paceline.llm.llm import LLM


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
