"""Blocks of one layer group on one level: device, host memory or disk.

The same three parts on every level: a pool, the prefixes that can be hit in it, and the order in which they are evicted
(inside the pool). Knows nothing of rows, tickets or other levels. Decision: docs/decisions/0045-levels.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.config.engine import KVConfig
from paceline.core.request import BlockKey
from paceline.kv.block_pool import BlockPool, Blocks, EvictionOrder, LeastRecentlyFreed
from paceline.kv.block_time import BlockTime
from paceline.kv.prefix import PrefixCache
from paceline.kv.reuse import ReuseOrder

PoolMaker = Callable[..., BlockPool]


class Level:
    """A pool and its prefix cache. Below the device blocks are called places."""

    def __init__(
        self, num_blocks: int, *, order: EvictionOrder | None = None, make_pool: PoolMaker | None = None
    ) -> None:
        """`make_pool`: of the device, whose first block is the null block."""
        self.cache = PrefixCache(num_blocks)
        self._evicted_keys: list[BlockKey] = []  # of the last eviction
        self.is_fetched = np.zeros(num_blocks, np.bool_)  # what a block holds came from the level below
        if make_pool is not None:
            self.pool = make_pool(num_blocks, on_evict=self._evict, order=order)
        else:
            self.pool = BlockPool(num_blocks, on_evict=self._evict, order=order, has_null=False)

    @property
    def num_places(self) -> int:
        return self.pool.usable

    @property
    def num_free(self) -> int:
        """Places that can be taken: those that hold nothing, and those of prefixes that no copy uses."""
        return self.pool.num_free

    def take(self, count: int) -> Blocks:
        return self.pool.allocate(count)

    def give_back(self, places: Blocks) -> None:
        self.pool.release(places)

    def free_places(self) -> list[int]:
        return self.pool.free_blocks().tolist()  # type: ignore[no-any-return]

    def find(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks of the longest beginning of `keys`."""
        found: list[int] = []
        for key in keys:
            block = self.cache.find(key)
            if block is None:
                break
            found.append(block)
        return found

    def enter(
        self, blocks: Blocks, keys: Sequence[BlockKey], uses: Sequence[int], *, from_below: bool
    ) -> None:
        """Blocks hold these prefixes from now on. `uses`: what is left of earlier ones, as `uses` said above."""
        self.is_fetched[blocks] = from_below
        given = blocks.tolist()
        entered = self.cache.add(given, keys)
        if len(entered) < len(given):
            known = dict(zip(given, zip(keys, uses, strict=True), strict=True))
            keys, uses = [known[block][0] for block in entered], [known[block][1] for block in entered]
        if entered:
            self.pool.cached[entered] = True
            self.pool.evictable.entered(entered, [key.key for key in keys], uses)

    def restore(self, places: Blocks, keys: Sequence[BlockKey], uses: Sequence[int]) -> None:
        """Places hold what an earlier run has left in them. Without places: what is not known yet takes those that are
        free, and of what is known the least useful is evicted."""
        if len(places):
            self.pool.claim(places)
        else:
            new = [at for at, key in enumerate(keys) if self.cache.named(key.key) is None][: self.num_free]
            keys, uses = [keys[at] for at in new], [uses[at] for at in new]
            places = self.take(len(new))
        self.enter(places, keys, uses, from_below=False)
        self.give_back(places)

    def hit(self, blocks: Blocks) -> None:
        """Blocks are about to be copied for a request: they are used, and held until `give_back`."""
        self.pool.evictable.used(blocks.tolist())
        self.pool.share(blocks)

    def forget(self, blocks: Blocks) -> None:
        """What these blocks hold can no longer be hit."""
        gone = blocks[self.pool.cached[blocks]]
        if len(gone):
            self.cache.drop(gone.tolist())
            self.pool.forget(gone)

    def give_up(self, count: int) -> tuple[Blocks, list[BlockKey], list[int]]:
        """The `count` blocks that go next, held by the caller, with what was in them and what is left of its uses."""
        blocks = self.pool.take_cached(count)
        return blocks, self._evicted_keys, self.pool.evictable.uses(blocks)

    def _evict(self, blocks: list[int]) -> None:
        self._evicted_keys = self.cache.drop(blocks)
        self.pool.evictable.evicted(blocks, [key.key for key in self._evicted_keys])


def make_order(
    config: KVConfig, num_blocks: int, time: BlockTime, *, is_staging: bool = False
) -> EvictionOrder:
    """The order that the config names, for a level of `num_blocks`. Blocks pass through a staging area."""
    if num_blocks and not is_staging and config.eviction == "reuse" and config.enable_prefix_caching:
        return ReuseOrder(num_blocks, time)
    return LeastRecentlyFreed()
