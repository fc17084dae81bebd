"""Counts of values by bucket, and as the Prometheus format wants them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts of values by bucket."""

    __slots__ = ("bounds", "counts", "largest", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = self.largest = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if value > self.largest:
            self.largest = value


def buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """How many values are at most each bound, and their sum."""
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        found.append((bound, total))
    return found, histogram.total
