"""How much a chat template may compute: processor time, the size of every value, the length of its output.

A template comes with a model file, so it is code from somewhere else. Every value it can hold, written out in full,
stays below one limit; that is what keeps any single operation short, and work between two looks at the clock too.
The clock is that of the rendering thread, so a busy machine does not make a good template fail.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

MAX_DEPTH = 64
MAX_BITS = 4096  # of a whole number
_STRIDE = 256  # units of work between two looks at the clock
_REMEMBERED = 1024
# What a value that is not text counts for, in characters.
_ITEM = 16


class RenderLimitExceeded(Exception):
    """The template wanted more than it may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may take."""

    seconds: float = 0.25  # of processor time
    seconds_per_message: float = 0.0005  # on top, so that long conversations are not refused for their length
    max_chars: int = 4_000_000  # of the output, and of any value on the way


class RenderBudget:
    """The account of one rendering."""

    def __init__(self, limits: RenderLimits, *, num_messages: int = 0) -> None:
        self.limits = limits
        self._deadline = time.thread_time() + limits.seconds + num_messages * limits.seconds_per_message
        self._work = 0
        # Sizes of lists and dictionaries seen lately, with the values, so that their identities stay theirs.
        self._sizes: dict[int, tuple[object, int]] = {}

    def work(self, units: int = 1) -> None:
        """Account for work; a unit is a step of a loop or a thousand characters."""
        self._work += units
        if self._work >= _STRIDE:
            self._work = 0
            if time.thread_time() > self._deadline:
                raise RenderLimitExceeded("time")

    def check(self, value: object) -> None:
        """Refuse a value that, written out, would be too large; account for having made it."""
        size = self.size(value)
        self.grow(size)
        self.work(1 + size // 1024)

    def grow(self, size: int) -> None:
        """Refuse to make a value of this size."""
        if size > self.limits.max_chars:
            raise RenderLimitExceeded("size")

    def size(self, value: object, depth: int = 0) -> int:
        """How large a value is, written out in full: shared parts count as often as they appear."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise RenderLimitExceeded("number")
            return _ITEM
        if isinstance(value, range):
            return _ITEM * len(value)
        if not isinstance(value, list | tuple | Mapping | set):
            return _ITEM
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = self._contents(value, depth)
        self.remember(value, size)
        return size

    def remember(self, value: object, size: int) -> None:
        """Note the size of a list or dictionary, so that nobody has to look inside; templates cannot change it."""
        if len(self._sizes) >= _REMEMBERED:
            self._sizes.clear()
        self._sizes[id(value)] = (value, size)

    def _contents(
        self, value: list[object] | tuple[object, ...] | Mapping[object, object] | set[object], depth: int
    ) -> int:
        if depth > MAX_DEPTH:
            raise RenderLimitExceeded("depth")
        total = 0
        parts = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
        for part in parts:
            total += _ITEM + self.size(part, depth + 1)
            self.grow(total)
            self.work()
        return total
