"""The cached beginnings of requests that wait: they are evicted last.

Requests are known in the order they came. What the first of them will hit is wanted until they stop waiting; where that
fills half the pool, later ones come after them. A request that is admitted at once costs nothing, and a step looks up
only a few.

A tenant may have a share of the pool: what it has left in the cache beyond that, the oldest first, goes before
everything else. What clients want kept for a while is pinned: see `pins`.
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
        # Of tenants with a share: what they left, oldest first.
        self._left_by: dict[str, dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def comes(self, number: int, keys: Sequence[BlockKey], num_tokens: int) -> None:
        if self._is_on and keys:
            self._new[number] = self._kv.block_time.now_us, keys, num_tokens

    def leaves(self, number: int) -> None:
        """A request is admitted, or waits no longer for another reason. It takes what it wanted before others may."""
        if self._new.pop(number, None) is None and (wanted := self._wanted.pop(number, None)) is not None:
            self._left.append(wanted)

    def hold_to_share(self, tenant: str, keys: Sequence[BlockKey], share: float) -> None:
        """A request of a tenant ends and leaves these blocks: what is beyond the tenant's share goes first."""
        if not self._is_on:
            return
        left = self._left_by.setdefault(tenant, {})
        for key in reversed(keys):  # without its beginning the rest is of no use
            left.pop(key.key, None)
            left[key.key] = None
        most = int(share * min(group.pool.usable for group in self._kv.groups))
        if len(left) <= most:
            return
        self._left_by[tenant] = left = dict.fromkeys(self._kv.cached_names(list(left)))
        if len(left) > most:
            self._hurry(list(left)[: len(left) - most])

    def settle(self) -> None:
        """At the end of a step: forget what those that left wanted, and look up those that still wait."""
        if self._left:
            for wanted in self._left:
                for group in self._kv.groups:
                    group.unwant(wanted)
            self._left.clear()
        if self._new:
            self._look_up(self._kv.block_time.now_us - PATIENCE_US)

    def _look_up(self, until_us: int) -> None:
        for _ in range(MOST_AT_ONCE):
            number = next(iter(self._new), None)
            if number is None or self._new[number][0] > until_us or not self._may_want_more():
                return
            _, keys, num_tokens = self._new.pop(number)
            names = [key.key for key in keys[: (num_tokens - 1) // self._kv.block_size]]
            self._wanted[number] = names
            for group in self._kv.groups:
                group.want(names)

    def _may_want_more(self) -> bool:
        """Whether cached blocks that are wanted fill less than half of every pool."""
        groups = self._kv.groups
        return all(2 * group.pool.evictable.num_wanted() < group.pool.usable for group in groups)

    def _hurry(self, names: Sequence[bytes]) -> None:
        """What is cached under these names goes before all others."""
        for group in self._kv.groups:
            found = [group.cache.named(name) for name in names if name not in group.wanted]
            group.pool.evictable.hurry([block for block in found if block is not None])
