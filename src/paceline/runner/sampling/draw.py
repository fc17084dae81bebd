"""The draw: the token with the largest (logit - top) / temperature + noise, in float64, lowest id among equals.

That is one draw from the softmax of the kept logits (the Gumbel-max trick). Only few tokens can win, and it is
cheap to know which: the likeliest token's own score is a bar, the noise of others is bounded, first by its
largest value, then by its word. What passes both bounds is computed by the definition; the bounds never
change who wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.runner.noise import LANES, MAX_NOISE, gumbel, lane_words, token_words

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]

BATCH = 4096  # groups: smaller rows share a call of the generator, larger ones get their own
SLACK = np.float32(1e-3)  # far more than what float32 rounds away in the bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """The draws of one step, a row each; every row's top is finite."""

    logits: F32  # [rows, vocabulary]
    best: I64  # the token with the largest logit
    floor: F32  # tokens with a lower logit are out
    temperature: F64  # above 0
    key: U64
    position: I64


def draw(draws: Draws) -> I64:
    """The token of each row."""
    race = _Race(draws)
    tokens = draws.best.copy()
    for owners, groups in race.batches():
        winners, drawn = race.run(owners, groups)
        tokens[winners] = drawn
    return tokens


class _Race:
    """The tokens that can win, by groups of four that share one call of the generator."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._logits = _whole_groups(draws.logits)
        self._top = draws.logits[np.arange(len(draws.best)), draws.best].astype(np.float64)
        self._bar = gumbel(token_words(draws.key, draws.position, draws.best))
        reach = _largest_below(self._top + draws.temperature * (self._bar - MAX_NOISE))
        self._lowest = np.maximum(draws.floor, reach)

    def batches(self) -> Iterator[tuple[I64, I64]]:
        """Rows and groups to compute together: one owner for each group, or one for all of them."""
        small: list[tuple[int, I64]] = []
        size = 0
        for i, lowest in enumerate(self._lowest):
            in_reach = (self._logits[i] >= lowest).view(np.uint32) != 0  # four flags at once
            groups = np.flatnonzero(in_reach)
            if len(groups) >= BATCH:
                yield np.array([i]), groups
                continue
            small.append((i, groups))
            size += len(groups)
            if size >= BATCH:
                yield _joined(small)
                small, size = [], 0
        if small:
            yield _joined(small)

    def run(self, owners: I64, groups: I64) -> tuple[I64, I64]:
        """The rows of a batch and their winning tokens."""
        draws = self._draws
        values = self._values(owners, groups)
        words = lane_words(draws.key[owners], draws.position[owners], groups)
        at, lane = np.divmod(np.flatnonzero(self._may_win(values, words, owners)), LANES)
        owner = np.broadcast_to(owners, groups.shape)[at]
        offset = (values[at, lane] - self._top[owner]) / draws.temperature[owner]
        scores = offset + gumbel(words[at, lane])
        tokens = groups[at] * LANES + lane
        # Entries are in order of row, then token, so the first of equal scores has the lowest id.
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        best = np.maximum.reduceat(scores, starts)
        lengths = np.diff(starts, append=len(owner))
        places = np.flatnonzero(scores == np.repeat(best, lengths))
        winners, first = np.unique(owner[places], return_index=True)
        return winners, tokens[places[first]]

    def _values(self, owners: I64, groups: I64) -> F32:
        """The logits of each group."""
        by_group = self._logits.reshape(len(self._logits), -1, LANES)
        if len(owners) > 1:
            return by_group[owners, groups]
        row: F32 = by_group[owners[0]]
        return row if len(groups) == len(row) else row.take(groups, axis=0)

    def _may_win(self, values: F32, words: U32, owners: I64) -> NDArray[np.bool_]:
        """Whether a token is kept and its noise can lift it over the bar."""
        top, bar = self._top[owners].astype(np.float32), self._bar[owners].astype(np.float32)
        temperature = self._draws.temperature[owners].astype(np.float32)
        offset = (values - top[:, None]) / temperature[:, None]
        can_reach = offset + noise_bound(words) >= (bar - SLACK)[:, None]
        return can_reach & (values >= self._lowest[owners][:, None])


def noise_bound(words: U32) -> F32:
    """Nearly the noise of each word, and never below it, without a logarithm.

    With v = 1 - u the noise -log(-log(1 - v)) is at most -log(v), and the bits of a float32, read as an
    integer, are a piecewise linear function of its logarithm that is never above it.
    """
    distance = (~words).astype(np.float32)  # v in units of 2^-32, at most half a unit short
    log2 = distance.view(np.int32).astype(np.float32) * np.float32(2.0**-23) - np.float32(127 + 32)
    return log2 * np.float32(-math.log(2))


def _joined(parts: list[tuple[int, I64]]) -> tuple[I64, I64]:
    owners = np.repeat([i for i, _ in parts], [len(groups) for _, groups in parts])
    return owners, np.concatenate([groups for _, groups in parts])


def _whole_groups(logits: F32) -> F32:
    """The logits, with tokens that cannot be drawn added where the last group is not whole."""
    missing = -logits.shape[1] % LANES
    if missing == 0:
        return np.ascontiguousarray(logits)
    return np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)


def _largest_below(bound: F64) -> F32:
    """The largest float32 that is not above each bound."""
    near = bound.astype(np.float32)
    return np.where(near > bound, np.nextafter(near, np.float32(-np.inf)), near)
