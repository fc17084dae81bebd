"""The checking form of the kernels: every load and store is looked up among the memory that a step may touch.

`PACELINE_NATIVE_CHECK=1` compiles the kernels in this form, under a separate key; a step that touches anything else,
or writes what it may only read, raises `MemoryViolation` after it has ended, and so does one that changed the bytes
around a buffer. Several times slower: for tests, and to look for a fault.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.runner.native.layout import (
    C_COUNT,
    C_DRAWN,
    C_MISSED_AT,
    C_MISSED_SIZE,
    C_MISSED_WRITES,
    C_MISSES,
    C_RANGES,
    C_YIELDS,
    LINE,
)

VARIABLE = "PACELINE_NATIVE_CHECK"
GUARD = 0xFF  # as float32 not a number: what reads it shows


class MemoryViolation(RuntimeError):
    """A step touched memory that is none of its own."""


def is_checking() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


def aligned(size: int) -> NDArray[np.uint8]:
    """Zeroed bytes that begin on a line of the cache, with a line before and behind them that nothing may change."""
    memory = np.zeros(size + 3 * LINE, np.uint8)
    start = LINE + -memory.ctypes.data % LINE
    memory[:start] = memory[start + size :] = GUARD
    return memory[start : start + size]


def guards_hold(values: NDArray[np.generic]) -> bool:
    """Whether the bytes around an array from `aligned` are as they were."""
    memory = values.base
    if not isinstance(memory, np.ndarray) or memory.dtype != np.uint8:
        return True  # from elsewhere: it has none
    start = values.ctypes.data - memory.ctypes.data
    return bool((memory[:start] == GUARD).all() and (memory[start + values.nbytes :] == GUARD).all())


@dataclass(frozen=True, slots=True)
class Range:
    """Memory that a step may read, and perhaps write."""

    name: str
    start: int
    size: int
    writable: bool = False

    @classmethod
    def of(cls, name: str, values: NDArray[np.generic], *, writable: bool = False) -> Range:
        return cls(name, values.ctypes.data, values.nbytes, writable)


_running: weakref.WeakSet[Checks] = weakref.WeakSet()
# Threads that wait for a step may still look into an older one.
_tables: deque[NDArray[np.int64]] = deque(maxlen=64)


class Checks:
    """The table of one runner's steps. What its threads look at between steps is in the table of every other."""

    def __init__(self) -> None:
        self.yields = 0  # a seed: threads let others go first at random; 0: they do not
        self.waiting: list[Range] = []
        self._table = np.zeros(0, np.int64)
        self._ranges: list[Range] = []
        self._drawn = 0
        _running.add(self)

    def table(self, ranges: list[Range]) -> int:
        """The address of a table for the next step."""
        others = [entry for checks in list(_running) for entry in checks.waiting]
        self._ranges = _sorted([*ranges, *others])
        table = np.zeros(C_RANGES // 8 + 3 * len(self._ranges), np.int64)
        table[C_COUNT // 8], table[C_YIELDS // 8] = len(self._ranges), self.yields
        table[C_DRAWN // 8] = self._drawn
        entries = [(entry.start, entry.start + entry.size, entry.writable) for entry in self._ranges]
        table[C_RANGES // 8 :] = np.array(entries, np.int64).ravel()
        self._table = table
        _tables.append(table)
        return table.ctypes.data

    def verify(self) -> None:
        """After a step. Raises MemoryViolation."""
        table = self._table
        self._drawn = int(table[C_DRAWN // 8])
        if not table[C_MISSES // 8]:
            return
        address, size = int(table[C_MISSED_AT // 8]), int(table[C_MISSED_SIZE // 8])
        verb = "wrote" if table[C_MISSED_WRITES // 8] else "read"
        index = bisect([entry.start for entry in self._ranges], address) - 1
        before = self._ranges[max(index, 0)]
        raise MemoryViolation(
            f"a step {verb} {size} bytes it may not, {address - before.start} bytes from the start of "
            f"{before.name}, which has {before.size} ({table[C_MISSES // 8]} such places)"
        )


def _sorted(ranges: list[Range]) -> list[Range]:
    """By address; what is listed twice, or lies inside another, once."""
    found: list[Range] = []
    for entry in sorted(ranges, key=lambda entry: (entry.start, -entry.size)):
        last = found[-1] if found else None
        if last is None or entry.start >= last.start + last.size:
            found.append(entry)
        else:
            size = max(last.size, entry.start + entry.size - last.start)
            found[-1] = Range(last.name, last.start, size, last.writable or entry.writable)
    return found
