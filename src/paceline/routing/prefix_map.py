"""Which engine holds which block of a prefix, exactly, from what engines say they stored and evicted.

A key is the first 8 bytes of a block's chained hash, so that it names all that is before it too. Engines are bits of an
integer: a prompt that 64 of them begin alike costs one look per block. A choice is entered at once, so that the next
request with this beginning follows it, and forgotten after a while when no news has confirmed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

KEY_BYTES = 8
EXPECTED_S = 2.0  # an expectation lives so long without news
LOOK_AHEAD = 64  # keys that are looked up at a time: most prompts differ soon
CONFIRMED = 0.0  # in place of the time when an expectation ends


class PrefixMap:
    """Key of a block -> engines that hold it."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}  # a bit for each engine
        self._held: dict[int, dict[bytes, float]] = {}  # by engine: until when a key is only expected there
        # When it ends, where, and which keys; in order of time.
        self._expected: deque[tuple[float, int, list[bytes]]] = deque()

    def __len__(self) -> int:
        return len(self._holders)

    def num_held(self, engine: int) -> int:
        """Blocks that an engine holds or is expected to."""
        return len(self._held.get(engine, ()))

    # -- news ------------------------------------------------------------------------------------------------

    def stored(self, engine: int, keys: Iterable[bytes]) -> None:
        """Blocks that can be hit at this engine from now on."""
        self._enter(engine, keys, CONFIRMED)

    def evicted(self, engine: int, keys: Iterable[bytes]) -> None:
        """Blocks that cannot be hit there any more. Of one that is only expected this is old news."""
        held = self._held.get(engine, {})
        self._leave(engine, [key for key in keys if held.get(key) == CONFIRMED])

    def forget(self, engine: int) -> None:
        """The engine is gone, or starts with an empty cache."""
        self._leave(engine, list(self._held.get(engine, ())))

    # -- choices ---------------------------------------------------------------------------------------------

    def expect(self, engine: int, keys: Sequence[bytes], now_s: float, start: int = 0) -> None:
        """A prompt with these blocks goes there; the first `start` of them it holds already."""
        held = self._held.get(engine, {})
        new = [key for key in keys[start:] if key not in held]
        if new:
            until_s = now_s + EXPECTED_S
            self._enter(engine, new, until_s)
            self._expected.append((until_s, engine, new))

    def pass_time(self, now_s: float) -> None:
        """Forget what was expected for too long."""
        expected = self._expected
        while expected and expected[0][0] <= now_s:
            until_s, engine, keys = expected.popleft()
            held = self._held.get(engine, {})
            self._leave(engine, [key for key in keys if held.get(key) == until_s])

    # -- questions -------------------------------------------------------------------------------------------

    def blocks_held(self, keys: Sequence[bytes], num_engines: int) -> NDArray[np.int64]:
        """By engine: how many blocks it holds of the longest beginning it has."""
        found = np.zeros(num_engines, np.int64)
        if not keys:
            return found
        holds_all = (1 << num_engines) - 1
        for start in range(0, len(keys), LOOK_AHEAD):
            part = keys[start : start + LOOK_AHEAD]
            for at, holders in enumerate(map(self._holders.get, part), start):
                still = holds_all & holders if holders else 0
                if still != holds_all:
                    if at:
                        found[_bits(holds_all, num_engines)] = at
                    if not still:
                        return found
                    holds_all = still
        found[_bits(holds_all, num_engines)] = len(keys)
        return found

    def _enter(self, engine: int, keys: Iterable[bytes], until_s: float) -> None:
        held = self._held.setdefault(engine, {})
        holders, bit = self._holders, 1 << engine
        for key in keys:
            held[key] = until_s
            holders[key] = holders.get(key, 0) | bit

    def _leave(self, engine: int, keys: Iterable[bytes]) -> None:
        held, holders, bit = self._held.get(engine, {}), self._holders, 1 << engine
        for key in keys:
            del held[key]
            left = holders[key] & ~bit
            if left:
                holders[key] = left
            else:
                del holders[key]


def _bits(engines: int, num_engines: int) -> NDArray[np.bool_]:
    raw = np.frombuffer(engines.to_bytes(-(-num_engines // 8), "little"), np.uint8)
    return np.unpackbits(raw, count=num_engines, bitorder="little").view(np.bool_)
