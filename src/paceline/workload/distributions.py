"""Numbers drawn from fitted shapes: quantile tables, a Gaussian copula, seeded streams.

Owns how a table of quantiles becomes samples and how two lengths of one request are tied together. Knows
nothing of requests or traces. Every quantity has a stream of its own, so that the first n requests of a
workload do not depend on how many were asked for.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from enum import IntEnum
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_NORMAL = NormalDist()


class Stream(IntEnum):
    """One independent stream of random numbers per quantity; the numbers are part of the result."""

    PROMPT = 0
    OUTPUT = 1
    ARRIVAL = 2
    INTENSITY = 3
    PAUSE = 4
    TENANT = 5
    SESSION = 6
    REDRAW = 7


def stream(seed: int, which: Stream) -> np.random.Generator:
    return np.random.default_rng([seed, int(which)])


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileTable:
    """A distribution as its quantiles; between them straight, on a log scale if `geometric`."""

    levels: tuple[float, ...]  # ascending from 0 to 1
    values: tuple[float, ...]  # never descending; positive if geometric
    geometric: bool = True

    def __post_init__(self) -> None:
        assert len(self.levels) == len(self.values) and self.levels[0] == 0 and self.levels[-1] == 1
        assert all(a < b for a, b in zip(self.levels, self.levels[1:], strict=False))
        assert all(a <= b for a, b in zip(self.values, self.values[1:], strict=False))
        assert not self.geometric or self.values[0] > 0

    def at(self, level: Floats) -> Floats:
        if not self.geometric:
            return np.interp(level, self.levels, self.values)
        return np.exp(np.interp(level, self.levels, np.log(self.values)))

    def at_one(self, level: float) -> float:
        """`at` for one level, without the cost of an array."""
        right = min(bisect_right(self.levels, level), len(self.levels) - 1)
        low, high = self.levels[right - 1], self.levels[right]
        share = (level - low) / (high - low)
        first, last = self.values[right - 1], self.values[right]
        if self.geometric:
            return first * math.exp(share * math.log(last / first))
        return first + share * (last - first)


def normal_levels(values: Floats) -> Floats:
    """The cumulative normal probability of each value."""
    return np.array([_NORMAL.cdf(value) for value in values.tolist()], dtype=np.float64)


def normal_level(value: float) -> float:
    return _NORMAL.cdf(value)


def normal_correlation(rank_correlation: float) -> float:
    """The correlation of two normals whose ranks have this (Spearman) correlation."""
    return 2.0 * math.sin(math.pi / 6.0 * rank_correlation)


def draw_lengths(
    num_requests: int, seed: int, prompt: QuantileTable, output: QuantileTable, rank_correlation: float
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Prompt and output lengths with the tables' marginals, tied by a Gaussian copula."""
    first = stream(seed, Stream.PROMPT).standard_normal(num_requests)
    own = stream(seed, Stream.OUTPUT).standard_normal(num_requests)
    tie = normal_correlation(rank_correlation)
    second = tie * first + math.sqrt(1.0 - tie * tie) * own
    return whole(prompt.at(normal_levels(first))), whole(output.at(normal_levels(second)))


def whole(values: Floats) -> NDArray[np.int32]:
    """Lengths as whole numbers of at least one token."""
    return np.maximum(np.rint(values), 1.0).astype(np.int32)
