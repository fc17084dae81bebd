"""The cached beginnings of requests that wait: they are evicted last.

Requests are known in the order they came. What the first of them will hit is wanted until they stop waiting; where that
fills half the pool, later ones come after them. A request that is admitted at once costs nothing, and a step looks up
only a few.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.request import BlockKey
from paceline.kv.block_time import MICROSECONDS
from paceline.kv.manager import KVManager

PATIENCE_US = MICROSECONDS // 10  # of waiting before a request is looked up
MOST_AT_ONCE = 16  # that are looked up in one step


class Wishes:
    """What waiting requests will hit, by their numbers."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._is_on = kv.caching and kv.eviction != "lru"
        # Not looked up yet: when it came, the keys of its blocks and the number of its tokens.
        self._new: dict[int, tuple[int, Sequence[BlockKey], int]] = {}
        self._wanted: dict[int, list[bytes]] = {}  # names of wanted blocks
        self._left: list[list[bytes]] = []

    def __len__(self) -> int:
        return len(self._wanted)

    def comes(self, number: int, keys: Sequence[BlockKey], num_tokens: int) -> None:
        if self._is_on and keys:
            self._new[number] = self._kv.block_time.now_us, keys, num_tokens

    def leaves(self, number: int) -> None:
        """A request is admitted, or waits no longer for another reason. It takes what it wanted before others may."""
        if self._new.pop(number, None) is None and (wanted := self._wanted.pop(number, None)) is not None:
            self._left.append(wanted)

    def settle(self) -> None:
        """At the end of a step: forget what those that left wanted, and look up those that still wait."""
        if self._left:
            for wanted in self._left:
                self._kv.unwant(wanted)
            self._left.clear()
        if self._new:
            self._look_up(self._kv.block_time.now_us - PATIENCE_US)

    def _look_up(self, until_us: int) -> None:
        for _ in range(MOST_AT_ONCE):
            number = next(iter(self._new), None)
            if number is None or self._new[number][0] > until_us or not self._kv.may_want_more():
                return
            _, keys, num_tokens = self._new.pop(number)
            self._wanted[number] = self._kv.want(keys, num_tokens)
