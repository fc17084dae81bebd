"""Quantiles of what was seen lately, in fixed memory: counts by size, in slices of which the oldest go.

Sizes grow by two percent from a tenth of a millisecond on, so that a quantile is right within one percent. Adding
costs the same for any number of values in the window; nothing here knows a clock, whoever adds says when to turn.
Bounds come from products alone, so that every machine sorts a value into the same place.
"""

from __future__ import annotations

from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

GROWTH = 1.02
LEAST_S, NUM_SIZES = 1e-4, 815  # up to a thousand seconds
NUM_SLICES = 8
_BOUNDS = np.array(
    list(accumulate(repeat(GROWTH, NUM_SIZES - 1), lambda bound, by: bound * by, initial=LEAST_S))
)

Seconds = NDArray[np.float64]


class Window:
    """Times of one kind."""

    def __init__(self) -> None:
        self._slices: NDArray[np.int64] = np.zeros((NUM_SLICES, NUM_SIZES + 1), np.int64)
        self._counts: NDArray[np.int64] = np.zeros(NUM_SIZES + 1, np.int64)  # of all slices
        self._marked = [0] * NUM_SLICES
        self._times = [0] * NUM_SLICES
        self._now = 0
        self.total = 0

    def add(self, seconds: Seconds, *, marked: bool = False) -> None:
        """Add values, one at least; `marked` ones are counted by themselves too."""
        first = seconds[0]
        if (seconds == first).all():  # rows that decode side by side all have the same gap
            place = int(np.searchsorted(_BOUNDS, first))
            self._slices[self._now, place] += len(seconds)
            self._counts[place] += len(seconds)
        else:
            found = np.bincount(np.searchsorted(_BOUNDS, seconds), minlength=NUM_SIZES + 1)
            self._slices[self._now] += found
            self._counts += found
        self.total += len(seconds)
        self._times[self._now] += 1
        if marked:
            self._marked[self._now] += len(seconds)

    def turn(self) -> None:
        """A slice is over: the oldest one is forgotten."""
        self._now = (self._now + 1) % NUM_SLICES
        oldest = self._slices[self._now]
        self._counts -= oldest
        self.total -= int(oldest.sum())
        oldest[:] = 0
        self._marked[self._now] = self._times[self._now] = 0

    def clear(self) -> None:
        self._slices[:] = 0
        self._counts[:] = 0
        self._marked = [0] * NUM_SLICES
        self._times = [0] * NUM_SLICES
        self.total = 0

    @property
    def times(self) -> int:
        """How often values were added: values that came together are not independent of each other."""
        return sum(self._times)

    @property
    def marked_share(self) -> float:
        return sum(self._marked) / self.total if self.total else 0.0

    def quantile(self, share: float, beside: Seconds | None = None) -> float | None:
        """What all but `1 - share` of the values stay below, those of `beside` counted too; None without values."""
        counts, total = self._counts, self.total
        if beside is not None and len(beside):
            counts = counts + np.bincount(np.searchsorted(_BOUNDS, beside), minlength=NUM_SIZES + 1)
            total += len(beside)
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(counts), share * total))
        place = min(max(place, 1), NUM_SIZES - 1)
        return float(0.5 * (_BOUNDS[place - 1] + _BOUNDS[place]))
