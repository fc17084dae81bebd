"""The cached beginnings of requests that wait: they are evicted last.

Requests are known in the order they came. What the first of them will hit is wanted until they stop waiting; where that
fills half the pool, later ones come after them. A request that is admitted in the step it comes in costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.request import BlockKey
from paceline.kv.manager import KVManager


class Wishes:
    """What waiting requests will hit, by their numbers."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._is_on = kv.caching and kv.eviction != "lru"
        self._new: dict[int, tuple[Sequence[BlockKey], int]] = {}  # not looked up yet
        self._wanted: dict[int, list[bytes]] = {}  # names of wanted blocks
        self._left: list[list[bytes]] = []

    def __len__(self) -> int:
        return len(self._wanted)

    def comes(self, number: int, keys: Sequence[BlockKey], num_tokens: int) -> None:
        if self._is_on and keys:
            self._new[number] = keys, num_tokens

    def leaves(self, number: int) -> None:
        """A request is admitted, or waits no longer for another reason. It takes what it wanted before others may."""
        if self._new.pop(number, None) is None and (wanted := self._wanted.pop(number, None)) is not None:
            self._left.append(wanted)

    def settle(self) -> None:
        """At the end of a step: forget what those that left wanted, and look up those that still wait."""
        for wanted in self._left:
            self._kv.unwant(wanted)
        self._left.clear()
        while self._new and self._kv.may_want_more():
            number = next(iter(self._new))
            self._wanted[number] = self._kv.want(*self._new.pop(number))
