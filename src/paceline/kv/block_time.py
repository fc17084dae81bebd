"""How long blocks are held: for each row the sum of its blocks' times, exact, at a cost per change and not per step.

A row that got block i at time a(i) and still has n of them at time t has held them for n * t - sum of a(i); what
it let go of at time r adds r. So one number for each row is enough, and a row that only decodes inside its last
block costs nothing. Times are whole microseconds, given from outside; whole numbers neither round nor drift. A
block that several rows hold counts in full for each of them. Single entries are read with `item`: numpy's own
numbers add up slowly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MICROSECONDS = 1_000_000
Index = NDArray[np.int64]


class BlockTime:
    """The block-microseconds of all rows."""

    def __init__(self, num_rows: int) -> None:
        self.now_us = 0
        self.held: Index = np.zeros(num_rows, np.int64)  # blocks, over all layer groups
        self._since: Index = np.zeros(num_rows, np.int64)  # sum of the times they came, less those that went

    def set_time(self, now_s: float) -> None:
        """What follows happens at this time. It never goes back."""
        self.now_us = int(now_s * MICROSECONDS)

    def gained(self, row: int, count: int) -> None:
        self.held[row] = self.held.item(row) + count
        self._since[row] = self._since.item(row) + count * self.now_us

    def gained_each(self, rows: Index, count: int) -> None:
        """Each of `rows` (all different) got `count` blocks."""
        self.held[rows] += count
        self._since[rows] += count * self.now_us

    def lost_each(self, rows: Index, counts: Index) -> None:
        self.held[rows] -= counts
        self._since[rows] -= counts * self.now_us

    def lost_all(self, row: int) -> None:
        """The row is empty; what it has held until now is kept until it is taken."""
        self._since[row] = self._since.item(row) - self.held.item(row) * self.now_us
        self.held[row] = 0

    def so_far(self, row: int) -> int:
        """Block-microseconds of a row since it began."""
        return self.held.item(row) * self.now_us - self._since.item(row)

    def take(self, row: int) -> int:
        """The same, when the row is released: it starts from nothing again."""
        total = self.so_far(row)
        self._since[row] = self.held.item(row) * self.now_us
        return total
