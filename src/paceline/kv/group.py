"""The block tables of one layer group: which blocks a row's tokens live in.

Row r's token at position p lies in block `table[r, p // block_size]`. Entries before `first[r]` are the null
block: a sliding window has passed them; so are `dropped[r]` entries of a row that keeps only its beginning and what is
recent. Combines a pool with the prefix cache of the group; knows rows as
numbers and nothing of requests, plans or time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import GroupSpec, KVConfig
from paceline.core.request import BlockKey
from paceline.kv.block_pool import NULL_BLOCK
from paceline.kv.block_time import BlockTime
from paceline.kv.level import Level, PoolMaker, make_order

Blocks = NDArray[np.int64]  # block numbers; 64 bit because they are used as indices


class LayerGroup:
    """Tables, pool and prefix cache of one group. `window` None is full attention."""

    def __init__(self, index: int, device: Level, shape: tuple[int, int]) -> None:
        self.index = index
        self.device = device
        self.pool = device.pool
        self.cache = device.cache
        self.window: int | None = None
        self.table: Blocks = np.zeros(shape, np.int64)
        # One array behind the columns of rows, so that a picture of them is one copy.
        self._columns: Blocks = np.zeros((6, shape[0]), np.int64)
        self.held: Blocks = self._columns[0]  # entries of the row's table, null ones included
        self.first: Blocks = self._columns[1]  # first entry that is not null
        self.published: Blocks = self._columns[2]  # entries offered to the cache so far
        self.computed_from: Blocks = self._columns[3]  # entries before it came from the cache
        self.reserved_for: Blocks = self._columns[4]  # blocks a protected row may still take
        self.dropped: Blocks = self._columns[5]  # null entries that the row has between two live ones
        self.pinned = 0  # blocks that pins hold
        self.reserved = 0  # sum of reserved_for: free blocks promised to protected rows
        # Names of blocks that waiting requests will hit, and how many will.
        self.wanted: dict[bytes, int] = {}

    @property
    def unpinned(self) -> int:
        """Blocks that rows can have at most."""
        return self.pool.usable - self.pinned

    def blocks_of(self, row: int) -> Blocks:
        """The row's live blocks, in order."""
        blocks = self.table[row, self.first.item(row) : self.held.item(row)]
        return blocks[blocks != NULL_BLOCK] if self.dropped.item(row) else blocks

    def drop(self, row: int, start: int, end: int) -> tuple[Blocks, Blocks]:
        """Entries from `start` to `end` leave the row; their references pass to the caller. What is behind them is the
        second."""
        gone = start + self.dropped.item(row)
        blocks = self.table[row, gone:end].copy()
        self.table[row, gone:end] = NULL_BLOCK
        self.dropped[row] = end - start
        return blocks, self.table[row, end : self.held.item(row)].copy()

    def spread(self, row: int, start: int, count: int) -> None:
        """Put `count` null entries before entry `start` of a row whose blocks lie one behind the other."""
        held = self.held.item(row)
        self.table[row, start + count : held + count] = self.table[row, start:held].copy()
        self.table[row, start : start + count] = NULL_BLOCK
        self.held[row], self.dropped[row] = held + count, count

    def bounds(self) -> bytes:
        """A copy of `held` and `first` of all rows. For checks."""
        return self._columns[:2].tobytes()

    def free_for(self, row: int | None) -> int:
        """Blocks a row (None: any row without a reservation) may take now."""
        if not self.reserved:
            return self.pool.available
        promised = self.reserved - (int(self.reserved_for[row]) if row is not None else 0)
        return self.pool.available - promised

    def append(self, row: int, count: int) -> tuple[int, Blocks]:
        """Give a row `count` more blocks; returns the table entry of the first and the blocks."""
        blocks = self.pool.allocate(count)
        start = self.held.item(row)
        self.table[row, start : start + count] = blocks
        self.held[row] = start + count
        if self.reserved:
            own = min(count, int(self.reserved_for[row]))
            self.reserved_for[row] -= own
            self.reserved -= own
        return start, blocks

    def append_each(self, rows: Blocks) -> tuple[Blocks, Blocks]:
        """Give each of `rows` one more block, in one sweep."""
        blocks = self.pool.allocate(len(rows))
        indices = self.held[rows]
        self.table[rows, indices] = blocks
        self.held[rows] = indices + 1
        if self.reserved:
            own = self.reserved_for[rows] > 0
            self.reserved_for[rows[own]] -= 1
            self.reserved -= int(own.sum())
        return indices, blocks

    def adopt(self, row: int, blocks: Blocks, start: int = 0) -> None:
        """An empty row begins with `blocks` of others, from table entry `start` on."""
        count = len(blocks)
        self.held[row] = start + count
        self.first[row] = start
        if count:
            self.table[row, :start] = NULL_BLOCK
            self.table[row, start : start + count] = blocks
            self.pool.share(blocks)

    def replace(self, row: int, index: int) -> tuple[int, int]:
        """Copy-on-write: a fresh block takes the place of a shared one. The old reference stays with the caller."""
        source = int(self.table[row, index])
        target = int(self.pool.allocate(1)[0])
        self.table[row, index] = target
        return source, target

    def clear(self, row: int) -> Blocks:
        """Empty a row; its references pass to the caller, last block first, so that beginnings stay longest."""
        blocks = self.blocks_of(row)[::-1].copy()
        self.held[row] = self.first[row] = self.published[row] = self.computed_from[row] = 0
        if self.reserved:
            self.reserved -= int(self.reserved_for[row])
            self.reserved_for[row] = 0
        self.dropped[row] = 0
        return blocks

    def slide_each(self, rows: Blocks, num_computed: Blocks, block_size: int) -> Blocks:
        """Blocks no later token can see any more leave the tables; their references pass to the caller."""
        assert self.window is not None
        keep = np.maximum(num_computed - self.window + 1, 0) // block_size
        keep = np.minimum(keep, self.held[rows])
        first = self.first[rows]
        passed = keep > first
        if not np.count_nonzero(passed):
            return rows[:0]
        rows, first, keep = rows[passed], first[passed], keep[passed]
        self.first[rows] = keep
        # Each row loses the entries from `first` to `keep`: its number so often, and its entries one by one.
        count = keep - first
        index = np.arange(int(count.sum())) + (first - count.cumsum() + count).repeat(count)
        rows = rows.repeat(count)
        blocks: Blocks = self.table[rows, index]
        self.table[rows, index] = NULL_BLOCK
        return blocks

    def find(self, keys: Sequence[BlockKey], limit: int) -> list[int]:
        """Cached blocks for the longest beginning of `keys`, at most `limit`."""
        return self.device.find(keys[:limit])

    def find_window(self, keys: Sequence[BlockKey], length: int, block_size: int) -> tuple[int, list[int]]:
        """Longest prefix of at most `length` blocks whose last window is cached: its length and those blocks."""
        assert self.window is not None
        while length > 0:
            start = max(0, length * block_size - self.window + 1) // block_size
            blocks: list[int] = []
            for position in range(length - 1, start - 1, -1):
                block = self.cache.find(keys[position])
                if block is None:
                    length = position
                    break
                blocks.append(block)
            else:
                return length, blocks[::-1]
        return 0, []

    def publish(self, row: int, keys: Sequence[BlockKey], until: int) -> list[int]:
        """Offer the row's blocks before entry `until` to the cache; returns those that can be hit from now on."""
        start = self.published.item(row)
        if until <= start:
            return []
        if self.window is not None:  # what has left the window is not there any more
            start = max(start, self.first.item(row))
        until = min(until, len(keys), self.held.item(row))
        if until <= start:
            return []
        entered = self.cache.add(self.table[row, start:until].tolist(), keys[start:until])
        if entered:
            self.pool.cached[entered] = True
            names = self.cache.names(entered)
            self.pool.evictable.entered(entered, names)
            if self.wanted:
                pairs = zip(entered, names, strict=True)
                self.pool.evictable.want([block for block, name in pairs if name in self.wanted])
        self.published[row] = until
        return entered

    def want(self, names: Sequence[bytes]) -> None:
        """One more waiting request will hit the blocks of these names, as far as they are there or will be.

        What lies behind a missing block is of no use to it, and is not kept for it.
        """
        found: list[int] = []
        missing: list[bytes] = []
        for name in names:
            self.wanted[name] = self.wanted.get(name, 0) + 1
            block = self.cache.named(name)
            if block is None:
                missing.append(name)
            elif not missing or self.window is not None:
                found.append(block)
        self.pool.evictable.want(found)
        self.pool.evictable.miss(missing)

    def unwant(self, names: Sequence[bytes]) -> None:
        """It waits no longer. The last block first: that is how a prompt's blocks are set free."""
        left: list[int] = []
        for name in reversed(names):
            others = self.wanted[name] - 1
            if others:
                self.wanted[name] = others
                continue
            del self.wanted[name]
            block = self.cache.named(name)
            if block is not None:
                left.append(block)
        self.pool.evictable.unwant(left)

    def quarantine(self, row: int) -> None:
        """Take the blocks this row computed itself out of the cache: their content is not to be trusted."""
        start = max(int(self.computed_from[row]), int(self.first[row]))
        blocks = self.table[row, start : int(self.held[row])]
        self.device.forget(blocks[blocks != NULL_BLOCK])


def make_group(
    index: int,
    spec: GroupSpec,
    config: KVConfig,
    shape: tuple[int, int],
    make_pool: PoolMaker,
    time: BlockTime,
) -> LayerGroup:
    """As a config has it."""
    num_blocks = spec.num_blocks or config.num_blocks
    device = Level(num_blocks, order=make_order(config, num_blocks, time), make_pool=make_pool)
    if config.slab_blocks:  # all of them come later
        device.pool.lose(np.arange(1, num_blocks))
    group = LayerGroup(index, device, shape)
    group.window = spec.window
    return group
