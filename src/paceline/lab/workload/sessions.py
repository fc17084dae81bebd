"""Conversations: a workload whose requests share blocks of their prompts.

Owns the model of sessions behind the `mooncake` generator. Every prompt opens with one common system block.
A session is a first prompt and turns that follow it; a turn brings back the earlier prompt and the answer to
it and adds to them, asks the same again, or replaces most of a retrieved context. Block ids are handed out
in order of first use. Knows nothing of files, and of time only the arrivals it is given.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np

from paceline.lab.workload.arrivals import (
    NORMAL,
    Floats,
    QuantileTable,
    RandomStream,
    normal_correlation,
    normal_levels,
    stream,
)
from paceline.lab.workload.workload import Workload

SYSTEM_BLOCK = 0
Steps = tuple[tuple[int, float], ...]  # (from this length on, value), ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionModel:
    block: int  # tokens per block id
    first_prompt: QuantileTable
    output: QuantileTable
    rank_correlation: float  # of a prompt's and its output's length
    turn_correlation: float  # of the output lengths (their ranks) of two turns in a row
    # Chance that a turn follows the first, second, ... turn; the last one repeats.
    continues: tuple[float, ...]
    continues_scale: Steps  # that chance is scaled by this, by the length of the prompt
    gap_s: QuantileTable  # between the arrivals of two turns
    growth: tuple[tuple[int, QuantileTable], ...]  # (from this prompt on, tokens added to it and its answer)
    repeats: float  # chance that a turn asks the same prompt again
    rewriters: Steps  # share of sessions that rewrite, by the length of the first prompt
    rewrites: float  # chance that a turn of such a session replaces its context
    rewrite_ratio: QuantileTable  # a rewritten prompt's length over the one before it
    rewrite_kept: QuantileTable  # share of the blocks before that a rewritten prompt keeps


def draw_conversations(name: str, model: SessionModel, arrival_s: Floats, seed: int) -> Workload:
    """Give every arrival to the session whose next turn has waited longest, or else to a new session."""
    writer = _Writer(model, len(arrival_s), seed)
    waiting: list[tuple[float, int, _Turn]] = []  # due, request, its turn
    turns: list[_Turn] = []
    for request, now_s in enumerate(arrival_s.tolist()):
        if waiting and waiting[0][0] <= now_s:
            turn = writer.follow(request, heapq.heappop(waiting)[2])
        else:
            turn = writer.open(request)
        turns.append(turn)
        gap_s = writer.gap_before_next(request, turn)
        if gap_s is not None:
            heapq.heappush(waiting, (now_s + gap_s, request, turn))
    prompt_len = np.array([turn.prompt_len for turn in turns], dtype=np.int32)
    output_len = np.array([turn.output_len for turn in turns], dtype=np.int32)
    return replace(
        Workload.of_one_tenant(name, arrival_s, prompt_len, output_len),
        prefix_ids=tuple(turn.block_ids for turn in turns),
        prefix_block=model.block,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    number: int  # 0 for the first of a session
    prompt_len: int
    output_len: int
    output_normal: float  # the normal behind output_len, which the next turn's leans on
    block_ids: tuple[int, ...]
    rewriter: bool  # whether its session replaces a retrieved context


class _Writer:
    """Makes turns. Request i reads row i of numbers drawn beforehand, so that a prefix stays a prefix."""

    def __init__(self, model: SessionModel, num_requests: int, seed: int) -> None:
        self._model = model
        self._next_id = SYSTEM_BLOCK + 1
        prompt_normals = stream(seed, RandomStream.PROMPT).standard_normal(num_requests)
        self._prompt_normals = prompt_normals.tolist()
        self._first_prompts = model.first_prompt.at(normal_levels(prompt_normals)).tolist()
        self._own_normals = stream(seed, RandomStream.OUTPUT).standard_normal(num_requests).tolist()
        self._chances = stream(seed, RandomStream.SESSION).random((num_requests, 5)).tolist()

    def open(self, request: int) -> _Turn:
        prompt_len = round(self._first_prompts[request])
        rewriter = self._chances[request][0] < _step(self._model.rewriters, prompt_len)
        tie = normal_correlation(self._model.rank_correlation)
        return self._turn(
            number=0,
            prompt_len=prompt_len,
            output_normal=self._lean(request, self._prompt_normals[request], tie),
            kept=(SYSTEM_BLOCK,),
            rewriter=rewriter,
        )

    def follow(self, request: int, before: _Turn) -> _Turn:
        prompt_len, kept = self._next_prompt(request, before)
        tie = normal_correlation(self._model.turn_correlation)
        return self._turn(
            number=before.number + 1,
            prompt_len=prompt_len,
            output_normal=self._lean(request, before.output_normal, tie),
            kept=kept,
            rewriter=before.rewriter,
        )

    def gap_before_next(self, request: int, turn: _Turn) -> float | None:
        """Seconds until the session's next turn; None when this is its last."""
        model = self._model
        # A turn that follows a prompt this short shares only the system block, so no trace can tell it from
        # a new session; the table of first prompts counts it as one.
        if turn.prompt_len < 2 * model.block:
            return None
        chance = model.continues[min(turn.number, len(model.continues) - 1)]
        chance *= _step(model.continues_scale, turn.prompt_len)
        _, _, _, continues, gap = self._chances[request]
        return model.gap_s.at_one(gap) if continues < chance else None

    def _next_prompt(self, request: int, before: _Turn) -> tuple[int, tuple[int, ...]]:
        """Length of the next prompt and the block ids it keeps."""
        model = self._model
        kind, amount, kept_level, _, _ = self._chances[request]
        if kind < model.repeats:
            return before.prompt_len, before.block_ids
        longest = int(model.first_prompt.values[-1])
        if before.rewriter and kind < model.repeats + model.rewrites:
            scaled = round(before.prompt_len * model.rewrite_ratio.at_one(amount))
            prompt_len = min(max(scaled, 2 * model.block + 1), longest)
            share = model.rewrite_kept.at_one(kept_level)
            most = min(before.prompt_len, prompt_len) // model.block  # a partial block is never shared
            num_kept = max(1, min(round(share * len(before.block_ids)), most))
            return prompt_len, before.block_ids[:num_kept]
        growth = next(table for start, table in reversed(model.growth) if before.prompt_len >= start)
        longer = before.prompt_len + before.output_len + round(growth.at_one(amount))
        # The partial last block of the earlier prompt is filled up by what follows and gets another id.
        full = before.block_ids[: before.prompt_len // model.block]
        return min(max(longer, before.prompt_len + 1), longest), full

    def _turn(
        self, *, number: int, prompt_len: int, output_normal: float, kept: tuple[int, ...], rewriter: bool
    ) -> _Turn:
        num_new = math.ceil(prompt_len / self._model.block) - len(kept)
        fresh = tuple(range(self._next_id, self._next_id + num_new))
        self._next_id += max(num_new, 0)
        output_len = max(1, round(self._model.output.at_one(NORMAL.cdf(output_normal))))
        return _Turn(
            number=number,
            prompt_len=prompt_len,
            output_len=output_len,
            output_normal=output_normal,
            block_ids=kept + fresh,
            rewriter=rewriter,
        )

    def _lean(self, request: int, other: float, tie: float) -> float:
        """A normal of this request that has correlation `tie` with `other`."""
        own: float = self._own_normals[request]
        return tie * other + math.sqrt(1.0 - tie * tie) * own


def _step(steps: Steps, length: int) -> float:
    """The value of the last step that starts at or below `length`; 0 before the first."""
    return next((value for start, value in reversed(steps) if length >= start), 0.0)
