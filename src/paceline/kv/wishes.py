"""The cached beginnings of requests that wait, and those that clients want kept: they are evicted last.

Requests are known in the order they came. What the first of them will hit is wanted until they stop waiting; where that
fills half the pool, later ones come after them. A request that is admitted at once costs nothing, and a step looks up
only a few.

What a client wants kept for a while after its request is wanted in the same way until then: at most a tenth of the pool
for a tenant, first come first kept. A tenant may have a share of the pool: what it has left in the cache beyond that,
the oldest first, goes before everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.request import BlockKey
from paceline.kv.block_time import MICROSECONDS
from paceline.kv.manager import KVManager

PATIENCE_US = MICROSECONDS // 10  # of waiting before a request is looked up
MOST_AT_ONCE = 16  # that are looked up in one step
KEPT_SHARE = 10  # one part in this many of a pool is kept for a tenant
LOOK_US = 4 * MICROSECONDS  # between looks for what need not be kept any longer


class Wishes:
    """What waiting requests will hit, by their numbers."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._is_on = kv.caching and kv.eviction != "lru"
        # Not looked up yet: when it came, the keys of its blocks and the number of its tokens.
        self._new: dict[int, tuple[int, Sequence[BlockKey], int]] = {}
        self._wanted: dict[int, list[bytes]] = {}  # names of wanted blocks
        self._left: list[list[bytes]] = []
        self._kept: dict[str, dict[bytes, int]] = {}  # by tenant: names of blocks, and until when
        self._looked_us = 0
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

    def keep(self, tenant: str, keys: Sequence[BlockKey], seconds: int) -> None:
        """Blocks of these keys are to stay for a while, as far as the tenant's part of the pool goes."""
        if not self._is_on or not keys:
            return
        until_us = self._kv.block_time.now_us + seconds * MICROSECONDS
        kept = self._kept.setdefault(tenant, {})
        room = min(group.pool.usable for group in self._kv.groups) // KEPT_SHARE - len(kept)
        new = [key.key for key in keys if key.key not in kept][: max(room, 0)]
        kept.update(dict.fromkeys(new, until_us))
        for key in keys:
            if kept.get(key.key, until_us) < until_us:
                kept[key.key] = until_us
        self._kv.want_names(new)

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
            self._kv.hurry(list(left)[: len(left) - most])

    @property
    def num_kept(self) -> int:
        """Blocks that clients want kept."""
        return sum(map(len, self._kept.values()))

    def _let_go(self) -> None:
        """What was to be kept until now is evicted in its turn again."""
        now_us = self._kv.block_time.now_us
        if now_us - self._looked_us < LOOK_US:
            return
        self._looked_us = now_us
        for tenant, kept in list(self._kept.items()):
            over = [name for name, until_us in kept.items() if until_us <= now_us]
            for name in over:
                del kept[name]
            if over:
                self._kv.unwant(over)
            if not kept:
                del self._kept[tenant]

    def settle(self) -> None:
        """At the end of a step: forget what those that left wanted, and look up those that still wait."""
        if self._left:
            for wanted in self._left:
                self._kv.unwant(wanted)
            self._left.clear()
        if self._kept:
            self._let_go()
        if self._new:
            self._look_up(self._kv.block_time.now_us - PATIENCE_US)

    def _look_up(self, until_us: int) -> None:
        for _ in range(MOST_AT_ONCE):
            number = next(iter(self._new), None)
            if number is None or self._new[number][0] > until_us or not self._kv.may_want_more():
                return
            _, keys, num_tokens = self._new.pop(number)
            self._wanted[number] = self._kv.want(keys, num_tokens)
