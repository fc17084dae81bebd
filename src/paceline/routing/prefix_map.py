"""Which engine holds which block of a prefix, exactly, from what engines say they stored and evicted.

A key is the first 8 bytes of a block's chained hash, so that it names all that is before it too. Engines are bits of an
integer: a prompt that 64 of them begin alike costs one look per block. A choice is entered at once, so that the next
request with this beginning follows it, and forgotten after a while when no news has confirmed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence, Set
from itertools import groupby, repeat
from operator import or_

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 8
EXPECTED_S = 2.0  # an expectation lives so long without news


class PrefixMap:
    """Key of a block -> engines that hold it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # a bit for each engine
        self._held: dict[int, set[bytes]] = {}  # the same by engine
        # A small map beside the large one, so that a choice is quick to enter.
        self._expected: dict[bytes, int] = {}
        # When an expectation ends, where, and of which keys; in order of time.
        self._ends: deque[tuple[float, int, list[bytes]]] = deque()

    def __len__(self) -> int:
        """Blocks that some engine holds."""
        return len(self._holders)

    def held(self, engine: int) -> Set[bytes]:
        """The blocks that an engine holds, by its own word."""
        return self._held.get(engine, set())

    # -- news ------------------------------------------------------------------------------------------------

    def stored(self, engine: int, keys: Iterable[bytes]) -> None:
        """Blocks that can be hit at this engine from now on."""
        holders, bit = self._holders, 1 << engine
        held = self._held.setdefault(engine, set())
        for key in keys:
            held.add(key)
            others = holders.get(key)
            holders[key] = bit if others is None else others | bit  # one number for all that it alone holds

    def evicted(self, engine: int, keys: Iterable[bytes]) -> None:
        """Blocks that cannot be hit there any more. Of one that is only expected this is old news."""
        held = self._held.get(engine, set())
        gone = [key for key in keys if key in held]
        held.difference_update(gone)
        _take(self._holders, gone, 1 << engine)

    def forget(self, engine: int) -> None:
        """The engine is gone, or starts with an empty cache."""
        self.evicted(engine, list(self.held(engine)))
        for _, number, keys in self._ends:
            if number == engine:
                _take(self._expected, keys, 1 << engine)
        self._ends = deque(each for each in self._ends if each[1] != engine)

    # -- choices ---------------------------------------------------------------------------------------------

    def expect(self, engine: int, keys: Sequence[bytes], now_s: float, start: int = 0) -> None:
        """A prompt with these blocks goes there; the first `start` of them it holds already."""
        new, expected, bit = list(keys[start:]), self._expected, 1 << engine
        entered = dict.fromkeys(new, bit)
        if not expected.keys().isdisjoint(new):
            new = [key for key in new if not expected.get(key, 0) & bit]
            entered = {key: expected.get(key, 0) | bit for key in new}
        if new:
            expected.update(entered)
            self._ends.append((now_s + EXPECTED_S, engine, new))

    def pass_time(self, now_s: float) -> None:
        """Forget what was expected for too long. What news has confirmed stays."""
        while self._ends and self._ends[0][0] <= now_s:
            _, engine, keys = self._ends.popleft()
            _take(self._expected, keys, 1 << engine)

    # -- questions -------------------------------------------------------------------------------------------

    def blocks_held(self, keys: Sequence[bytes], num_engines: int) -> NDArray[np.int64]:
        """By engine: how many blocks it holds, or will, of the longest beginning it has."""
        found = np.zeros(num_engines, np.int64)
        at, hold_all = 0, -1
        none = repeat(0)
        holders: Iterable[int] = map(self._holders.get, keys, none)
        if not self._expected.keys().isdisjoint(keys):
            holders = map(or_, holders, map(self._expected.get, keys, none))
        # Runs of blocks with the same holders: there are few, and looking keys up takes no step of Python.
        for engines, run in groupby(holders):
            still = hold_all & engines
            if still != hold_all and at:
                _note(found, hold_all, at)
            if not still:
                return found
            hold_all = still
            at += len(list(run))
        if at:
            _note(found, hold_all, at)
        return found


def _take(engines_of: dict[bytes, int], keys: Iterable[bytes], bit: int) -> None:
    for key in keys:
        left = engines_of[key] & ~bit
        if left:
            engines_of[key] = left
        else:
            del engines_of[key]


def _note(found: NDArray[np.int64], engines: int, blocks: int) -> None:
    """All these engines hold so many blocks."""
    if not engines & (engines - 1):
        found[engines.bit_length() - 1] = blocks
        return
    raw = np.frombuffer(engines.to_bytes(-(-len(found) // 8), "little"), np.uint8)
    found[np.unpackbits(raw, count=len(found), bitorder="little").view(np.bool_)] = blocks
