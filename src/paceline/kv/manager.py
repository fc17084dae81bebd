"""The KV cache of all rows: match, adopt, extend, publish, share, copy on write, swap, release.

One manager owns the layer groups and everything that changes their tables, and notes each change in `delta`
for the next plan. Integers only: it never sees a token or a request object, and reads no clock.

A block table, with blocks of 4 tokens. Row 1 was forked from row 0 after 6 tokens:

    row 0   tokens  a b c d | e f g .        table  [ 3, 7 ]
    row 1   tokens  a b c d | e f x .        table  [ 3, 9 ]

    block 3   a b c d   refs 2   full, shared for good
    block 7   e f g .   refs 1   part-filled; row 1 has a copy of it in block 9 since it joined
    block 9   e f x .   refs 1   (copy on write)
    block 0                      null block: takes writes that are never read

Fences. A row that is released while steps are in flight may still be read by them; its references go back only when
the last step submitted by then has completed. Three steps in flight, row 0 released after plan 7:

    submitted = 7, completed = 4     in flight: 5, 6, 7
    release(row 0)                   Fence(seq=7, blocks of row 0)
    complete(5), settle()            7 > 5: the blocks stay taken
    complete(7), settle()            7 <= 7: one reference less each; at 0 a block is free, or evictable if cached

`settle` is called once at the end of whatever lets go of blocks: an update, a preemption, a request that fails while a
step is composed, an input that ends requests. All blocks of one such move are freed in one sweep, because their order
on the free list is part of what a replay repeats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import KVConfig
from paceline.config.sized import Capacity
from paceline.core.parameters import KVKeep
from paceline.core.request import BlockKey
from paceline.core.standing import ALL_LOST, DEVICE_LOST
from paceline.kv.block_pool import NULL_BLOCK, BlockPool
from paceline.kv.block_time import BlockTime
from paceline.kv.delta import KVDelta
from paceline.kv.group import make_group
from paceline.kv.level import Level, PoolMaker, make_order
from paceline.kv.pins import Found, Pins, Sources
from paceline.kv.slabs import HeldSlabs
from paceline.kv.swap import Ticket, Tickets

Blocks = NDArray[np.int64]  # block numbers; 64 bit because they are used as indices
Needs = tuple[int, ...]  # blocks per group
NO_BLOCKS: Blocks = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class PrefixMatch:
    """A cached beginning: `num_blocks` blocks long; per group the table entry it starts at and its blocks.

    Not frozen, and neither is a fence: requests make several inside a step, and freezing at least doubles their cost.
    """

    num_blocks: int
    start: tuple[int, ...]
    blocks: tuple[Blocks, ...]


@dataclass(slots=True, eq=False)
class Fence:
    """References of a group that go back once step `seq` has completed."""

    seq: int
    group: int
    blocks: Blocks
    level: int = 0


class KVManager:
    """All block tables of one engine."""

    def __init__(
        self,
        config: KVConfig,
        capacity: Capacity,
        *,
        max_chunk: int,
        at_once: bool = False,
        make_pool: PoolMaker = BlockPool,
    ) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.eviction = config.eviction
        self._max_chunk = max_chunk
        self._at_once = at_once  # rows take all their blocks when they start, as padded batches do
        shape = (capacity.num_rows, capacity.max_blocks_per_row)
        self.block_time = BlockTime(capacity.num_rows)
        self.groups = [
            make_group(index, spec, config, shape, make_pool, self.block_time)
            for index, spec in enumerate(config.groups)
        ]
        self.pins = Pins(self.groups, self.block_time)
        self.sources = Sources(self.groups)
        self.slabs = HeldSlabs(self.groups, config.slab_blocks, config.least_blocks, self._under_way)
        # Entries of each row's table: all groups grow alike, so that the first speaks for them.
        self.table_len = self.groups[0].held
        self.dropped = self.groups[0].dropped
        # Rows that drop what lies between their beginning and the recent tokens, and the length of their prompts.
        self.keeping: dict[int, tuple[KVKeep, int]] = {}
        self.windowed = [group for group in self.groups if group.window is not None]
        # By level, the part of each group: the device, host memory, a disk.
        self.levels = [[group.device for group in self.groups]]
        self.num_staging = config.num_staging_blocks  # places of the host that are the way to the disk
        for count in (config.num_host_blocks, config.num_disk_blocks):
            kept = count if config.cache_on_host else 0  # for prefixes; swapped requests need no order
            is_staging = bool(self.num_staging) and len(self.levels) == 1
            orders = [make_order(config, kept, self.block_time, is_staging=is_staging) for _ in self.groups]
            self.levels.append([Level(count, order=order) for order in orders])
        self.places = self.levels[1]
        self.keeps_below = config.cache_on_host and self.caching  # prefixes that the device evicts
        # Names of blocks that come from the disk, and when they should be here.
        self.fetching: dict[bytes, float] = {}
        # Group and block of what can be hit since lately, and how many ever came there; None: they are not written.
        self.fresh: deque[tuple[int, int]] | None = None
        self.num_fresh = 0
        self.tickets = Tickets(self.block_time)
        self.delta = KVDelta()
        self.fences: list[Fence] = []
        none = tuple(np.zeros(0, np.int64) for _ in self.groups)
        self._no_match = PrefixMatch(0, (0,) * len(self.groups), none)
        self.submitted = 0  # seq of the last plan handed out
        self.completed = 0  # every step up to this one has completed

    # -- sizes ---------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def full_need(self, max_total: int) -> Needs:
        """Most blocks a sequence of `max_total` tokens holds at once, per group."""
        return self._at_most(self.blocks_for(max_total))

    def can_ever_hold(self, max_total: int) -> bool:
        """Whether a sequence of `max_total` tokens fits into an empty cache, at its smallest."""
        whole = (self.blocks_for(max_total),) * len(self.groups)
        needs = whole if self._at_once else self.full_need(max_total)
        return all(need <= most for need, most in zip(needs, self.slabs.least_usable, strict=True))

    def missing(self, row: int, num_slots: int) -> int:
        """Blocks each group's table lacks to hold `num_slots` tokens of a row (tables grow alike)."""
        lacking = -(-num_slots // self.block_size) - self.table_len.item(row)
        return lacking if lacking > 0 else 0

    def free_for(self, row: int | None = None) -> int:
        """Blocks every group can give a row now."""
        if len(self.groups) == 1:
            return self.groups[0].free_for(row)
        return min(group.free_for(row) for group in self.groups)

    def _at_most(self, blocks: int) -> Needs:
        """`blocks` of a sequence, per group; one with a window never holds more than the window at once."""
        if not self.windowed:
            return (blocks,) * len(self.groups)
        return tuple(
            blocks
            if group.window is None
            else min(blocks, self.blocks_for(group.window + self._max_chunk) + 2)
            for group in self.groups
        )

    @property
    def num_slots(self) -> int:
        """Tokens the first group holds when all its blocks are full: what reports count occupancy by."""
        return self.groups[0].pool.usable * self.block_size

    @property
    def num_evicted(self) -> int:
        """Blocks whose cached prefix was evicted, since the start."""
        return sum([group.pool.num_evicted for group in self.groups])

    def reserved_for(self, row: int) -> int:
        """Blocks that are set aside for a row and not taken yet."""
        return self.groups[0].reserved_for.item(row)

    def num_live_blocks(self, rows: Blocks) -> Blocks:
        """Blocks that each of `rows` holds, where no window has passed them."""
        return self.table_len[rows] - self.groups[0].first[rows] - self.dropped[rows]

    def coming(self) -> int:
        """Blocks on their way back: behind fences and swap-outs under way. The least over the groups."""
        leaving: list[list[Blocks]] = [[] for _ in self.groups]
        for fence in self.fences:
            if not fence.level:
                leaving[fence.group].append(fence.blocks)
        for ticket in self.tickets.open.values():
            if not ticket.incoming and not ticket.level:
                for index, blocks in enumerate(ticket.blocks):
                    leaving[index].append(blocks)
        least: int | None = None
        for group, parts in zip(self.groups, leaving, strict=True):
            # A block that is being copied out is behind a fence too: it comes back when all have let go of it.
            blocks, holders = np.unique(np.concatenate([*parts, NO_BLOCKS]), return_counts=True)
            count = int(np.count_nonzero(group.pool.refs[blocks] == holders))
            least = count if least is None else min(least, count)
        return least or 0

    def _under_way(self, group: int) -> list[Blocks]:
        """Blocks that steps and copies under way hold, and those that rows are about to copy from."""
        tickets = [self.sources.held(group)]
        tickets += [ticket.blocks[group] for ticket in self.tickets.open.values() if not ticket.level]
        return tickets + [fence.blocks for fence in self.fences if fence.group == group]

    # -- prefixes ------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey], num_tokens: int) -> PrefixMatch:
        """The longest cached beginning of a sequence. Its last token is always left to compute."""
        limit = min(len(keys), (num_tokens - 1) // self.block_size) if self.caching else 0
        if not limit or (len(self.groups) == 1 and self.groups[0].cache.find(keys[0]) is None):
            return self._no_match
        found: list[list[int]] = [[] for _ in self.groups]
        starts = [0] * len(self.groups)
        length = limit
        for index, group in enumerate(self.groups):
            if group.window is None:
                found[index] = group.find(keys, length)
                length = len(found[index])
        settled = False
        while not settled:  # a shorter window hit shortens every other group's
            settled = True
            for index, group in enumerate(self.groups):
                if group.window is not None:
                    shorter, found[index] = group.find_window(keys, length, self.block_size)
                    settled = settled and shorter == length
                    starts[index] = shorter - len(found[index])
                    length = shorter
        if not length:
            return self._no_match
        for index, group in enumerate(self.groups):
            if group.window is None:
                del found[index][length:]
        return PrefixMatch(length, tuple(starts), tuple(np.array(blocks, np.int64) for blocks in found))

    def cost(self, match: PrefixMatch, num_tokens: int) -> Needs:
        """Free blocks that admitting a sequence takes: new ones, and hits that no row holds now."""
        fresh = self.blocks_for(num_tokens) - match.num_blocks
        if not match.num_blocks:
            return self._at_most(fresh)
        costs = []
        for group, blocks in zip(self.groups, match.blocks, strict=True):
            unheld = len(blocks) - int(np.count_nonzero(group.pool.refs[blocks]))
            costs.append(self._at_most(fresh + unheld)[group.index])
        return tuple(costs)

    def adopt(self, row: int, match: PrefixMatch) -> None:
        """A row starts from a cached beginning."""
        if not match.num_blocks:
            return  # the row is as empty as it was left
        for group, start, blocks in zip(self.groups, match.start, match.blocks, strict=True):
            group.pool.evictable.used(blocks.tolist())
            group.adopt(row, blocks, start)
            self.block_time.gained(row, len(blocks))
            group.published[row] = group.computed_from[row] = match.num_blocks
            if self.fresh is not None:  # what is used again is written first, its beginning before the rest
                self.fresh.extendleft([(group.index, block) for block in blocks[::-1].tolist()])
                self.num_fresh += len(blocks)
            self.delta.appends.append((row, group.index, start, blocks))

    def publish(self, row: int, keys: Sequence[BlockKey], num_computed: int) -> None:
        """Offer the full blocks of the first `num_computed` tokens, all of them computed, to the cache.

        Not of a row that has dropped some: what it computes from then on is not what its tokens give elsewhere.
        """
        if self.caching and not self.dropped.item(row):
            for group in self.groups:
                entered = group.publish(row, keys, num_computed // self.block_size)
                if entered and self.fresh is not None:
                    self.fresh.extend([(group.index, block) for block in entered])
                    self.num_fresh += len(entered)

    def restore(self, places: Blocks, keys: Sequence[BlockKey], uses: Sequence[int]) -> None:
        """Earlier runs, or other servers, have left prefixes on the disk; without places, wherever there is room."""
        self.levels[2][0].restore(places, keys, uses)

    def learned(self) -> tuple[tuple[float, ...], ...]:
        """What eviction has learned, by level, of the first group."""
        return tuple(level[0].pool.evictable.learned() for level in self.levels)

    def learn(self, learned: Sequence[Sequence[float]]) -> None:
        """What an earlier run has learned, by level."""
        for level, values in zip(self.levels, learned, strict=False):
            level[0].pool.evictable.learn(values)

    def cached_names(self, names: Sequence[bytes]) -> list[bytes]:
        """Those of the names that are in the cache of the device."""
        return [name for name in names if self.groups[0].cache.named(name) is not None]

    def quarantine(self, row: int) -> None:
        for group in self.groups:
            group.quarantine(row)
        if self.pins:
            self.pins.drop_lost()

    def reset_cache(self, levels_lost: int = ALL_LOST) -> None:
        """Forget the cached prefixes of so many levels, and what is on the way between levels unless that is the device
        alone; blocks in use stay in use."""
        self.settle()
        for level in self.levels[:levels_lost]:
            for part in level:
                part.forget(np.array(part.cache.blocks(), np.int64))
        self.pins.drop_lost()
        if levels_lost > DEVICE_LOST:
            self._forget_copies()

    def _forget_copies(self) -> None:
        """What is under way between levels cannot be hit when it arrives, so that no request waits for it."""
        for ticket in self.tickets.open.values():
            if ticket.keys is not None:
                ticket.keys = tuple(() for _ in self.groups)
        self.fetching.clear()

    # -- growing -------------------------------------------------------------------------------------------

    def extend(self, row: int, num_slots: int) -> None:
        """Give a row the blocks to hold `num_slots` tokens. The caller has checked `free_for`."""
        count = self.missing(row, num_slots)
        if count:
            self.block_time.gained(row, count * len(self.groups))
            for group in self.groups:
                start, blocks = group.append(row, count)
                self.delta.appends.append((row, group.index, start - group.dropped.item(row), blocks))

    def extend_each(self, rows: NDArray[np.int64]) -> None:
        """Give each of `rows` one more block. The caller has checked `free_for`."""
        self.block_time.gained_each(rows, len(self.groups))
        for group in self.groups:
            indices, blocks = group.append_each(rows)
            if self.keeping:
                indices = indices - group.dropped[rows]
            self.delta.growths.append((rows, group.index, indices, blocks))

    def keep(self, row: int, kept: KVKeep, num_prompt: int) -> None:
        """A row that joins drops tokens from its first output token on."""
        self.keeping[row] = kept, num_prompt

    def drop(self, row: int, position: int) -> int:
        """Let go of what the token at `position` of a row, which is computed next, does not see; returns how many
        tokens the row has dropped so far."""
        kept, num_prompt = self.keeping[row]
        start, end = kept.start(self.block_size), kept.end(position, num_prompt, self.block_size)
        before = self.dropped.item(row)
        if end - start > before:
            for group in self.groups:
                blocks, behind = group.drop(row, start, end)
                self.block_time.lost_each(np.array([row]), np.array([len(blocks)]))
                self._give_back(group.index, blocks, self.submitted)
                self.delta.appends.append((row, group.index, start, behind))
            self.delta.drops[row] = (end - start) * self.block_size
            self.settle()
        return self.dropped.item(row) * self.block_size

    def slide(self, row: int, num_computed: int) -> None:
        """Let go of what the sliding windows of a row have passed."""
        self.slide_each(np.array([row]), np.array([num_computed]))

    def slide_each(self, rows: Blocks, num_computed: Blocks) -> None:
        """The same for each of `rows`, in one sweep."""
        for group in self.windowed:
            before = group.first[rows]
            blocks = group.slide_each(rows, num_computed, self.block_size)
            if len(blocks):
                self.block_time.lost_each(rows, group.first[rows] - before)
            self._give_back(group.index, blocks, self.submitted)
        self.settle()

    def reserve(self, row: int, needs: Needs) -> None:
        """Promise a row the rest of `needs` blocks; free blocks are set aside for it."""
        for group, need in zip(self.groups, needs, strict=True):
            rest = max(0, need - int(group.held[row] - group.first[row]))
            group.reserved_for[row] = rest
            group.reserved += rest

    def short_of(self, rows: Blocks, more: int) -> int:
        """Blocks missing, in the group that misses most, to give each of `rows` one and `more` to others."""
        return max(
            len(rows) - int(np.count_nonzero(group.reserved_for[rows])) + more - group.free_for(None)
            for group in self.groups
        )

    # -- sharing -------------------------------------------------------------------------------------------

    def can_share(self, parent: int, num_tokens: int) -> bool:
        """Whether a parent still holds what a child of `num_tokens` computed tokens must see."""
        if self.dropped.item(parent):
            return False
        for group in self.groups:
            seen_from = 0
            if group.window is not None:
                seen_from = max(0, num_tokens - group.window + 1) // self.block_size
            if seen_from < group.first[parent]:
                return False
        return True

    def share(self, parent: int, child: int, num_tokens: int) -> None:
        """A child row starts with the blocks of its parent's first `num_tokens` tokens, perhaps a part-filled one."""
        until = self.blocks_for(num_tokens)
        for group in self.groups:
            start = int(group.first[parent])
            blocks = group.table[parent, start:until].copy()
            group.adopt(child, blocks, start)
            self.block_time.gained(child, len(blocks))
            group.published[child] = min(int(group.published[parent]), until)
            group.computed_from[child] = min(int(group.computed_from[parent]), until)
            self.delta.appends.append((child, group.index, start, blocks))

    def shared_writes(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows would write their next token into a block that others read too."""
        shared = np.zeros(len(rows), np.bool_)
        index = positions // self.block_size
        for group in self.groups:
            inside = index < group.held[rows]
            block = group.table[rows, np.where(inside, index, 0)]
            shared |= inside & (group.pool.refs[block] > 1)
        return shared

    def copy_on_write(self, row: int, position: int) -> None:
        """Replace the shared block at `position` by a private copy. One free block per group is needed."""
        index = position // self.block_size
        for group in self.groups:
            block = int(group.table[row, index])
            if index < group.held[row] and group.pool.refs[block] > 1:
                source, target = group.replace(row, index)
                self.delta.copies.append((row, group.index, index - group.dropped.item(row), source, target))
                # The copy reads the source in the plan being made: hold it until that step is done.
                self._give_back(group.index, np.array([source], np.int64), self.submitted + 1)

    def place(self, row: int, module: int, start: int, first: int, count: int) -> None:
        """A row takes `count` tokens of a module, from its token `first` on, for its own from `start` on. It has blocks
        for them."""
        at, end = first // self.block_size, self.blocks_for(first + count)
        for group, blocks in enumerate(self.sources.rows[row][module]):
            run = (row, group, start, count, start - first, first % self.block_size)
            self.delta.placements.append((run, blocks[at:end]))

    def placed(self, row: int, module: int, seq: int) -> None:
        """All of a module is in its place once step `seq` is done."""
        self._let_go(self.sources.take(row, module), seq)

    def _let_go(self, modules: Sequence[Found], seq: int) -> None:
        for found in modules:
            for group, blocks in zip(self.groups, found, strict=True):
                self._give_back(group.index, blocks, seq)

    # -- swapping ------------------------------------------------------------------------------------------

    def can_swap_out(self, row: int, num_tokens: int) -> bool:
        until = self.blocks_for(num_tokens)
        if row in self.keeping:  # steps under way may have dropped what the next token after these sees
            kept, num_prompt = self.keeping[row]
            end = kept.end(num_tokens, num_prompt, self.block_size)
            if end < kept.start(self.block_size) + self.dropped.item(row):
                return False
            until -= self.dropped.item(row)
        return num_tokens > 0 and all(
            places.num_free - self.num_staging >= until - int(group.first[row])
            for places, group in zip(self.places, self.groups, strict=True)
        )

    def swap_out(self, row: int, num_tokens: int, owner: int) -> tuple[Blocks, ...]:
        """Copy a row's first `num_tokens` tokens to host places and empty the row. Returns the places per group."""
        until = self.blocks_for(num_tokens)
        places, kept = [], []
        for group in self.groups:
            blocks = group.table[row, int(group.first[row]) : until].copy()
            if group.dropped.item(row):
                blocks = blocks[blocks != NULL_BLOCK]
            group.pool.share(blocks)  # the ticket's own references
            kept.append(blocks)
            places.append(self.places[group.index].take(len(blocks)))
        ticket = Ticket(tuple(kept), tuple(places), owner, incoming=False, free_places=False)
        number = self.tickets.issue(ticket)
        for index, (blocks, place) in enumerate(zip(kept, places, strict=True)):
            self.delta.swap_out.append((number, index, blocks, place))
        self.release(row)
        return tuple(places)

    def swap_in(self, row: int, places: tuple[Blocks, ...], num_tokens: int, owner: int) -> int:
        """Bring swapped blocks back into an empty row; returns the ticket. The caller has checked `free_for`."""
        until = self.blocks_for(num_tokens)
        kept = []
        for group, place in zip(self.groups, places, strict=True):
            start = until - len(place)
            first = 0 if row in self.keeping else start
            group.table[row, :start] = 0
            group.held[row] = group.first[row] = first
            _, blocks = group.append(row, len(place))
            if start > first:  # what it had dropped
                group.spread(row, self.keeping[row][0].start(self.block_size), start)
                self.delta.drops[row] = start * self.block_size
            self.block_time.gained(row, len(place))
            self.delta.appends.append((row, group.index, first, blocks))
            group.pool.share(blocks)
            group.published[row] = group.computed_from[row] = 0
            kept.append(blocks)
        ticket = Ticket(tuple(kept), places, owner, incoming=True, free_places=True)
        number = self.tickets.issue(ticket)
        for index, (blocks, place) in enumerate(zip(kept, places, strict=True)):
            self.delta.swap_in.append((number, index, blocks, place))
        return number

    def drop_places(self, places: tuple[Blocks, ...], owner: int) -> None:
        """A swapped request ends: its places go back now, or when the copy into them has completed."""
        for ticket in self.tickets.open.values():
            if ticket.owner == owner and ticket.keys is None:
                ticket.free_places = True
                return
        for host, place in zip(self.places, places, strict=True):
            host.give_back(place)

    def is_moving(self, owner: int) -> bool:
        """Whether a swap of this request is under way."""
        tickets = self.tickets.open.values()
        return any(ticket.owner == owner and ticket.keys is None for ticket in tickets)

    def complete_ticket(self, number: int, *, failed: bool = False) -> Ticket | None:
        """A copy has completed, or will not; late word of an unknown ticket is ignored. `settle` follows."""
        ticket = self.tickets.open.pop(number, None)
        if ticket is None:
            return None
        if ticket.keys is not None:
            self._arrive(ticket, failed)
        for group in range(len(self.groups)):
            self._give_back(group, ticket.blocks[group], 0, ticket.level)
            if ticket.free_places:
                self._give_back(group, ticket.places[group], 0, ticket.level + 1)
        return ticket

    def _arrive(self, ticket: Ticket, failed: bool) -> None:
        """Prefixes were copied to another level: they can be hit there now. What a row loads, the row publishes."""
        assert ticket.keys is not None
        target = ticket.level + (not ticket.incoming)
        for index, part in enumerate(self.levels[target]):
            keys, below = ticket.keys[index], self.levels[ticket.level + 1][index]
            if ticket.level and ticket.incoming:
                for key in keys:
                    self.fetching.pop(key.key, None)
            if failed and ticket.incoming:
                below.forget(ticket.places[index])  # it does not hold what it should
            elif not failed and target and keys:
                taken = ticket.blocks if ticket.incoming else ticket.places
                part.enter(taken[index], keys, ticket.uses[index], from_below=ticket.incoming)

    # -- letting go ----------------------------------------------------------------------------------------

    def release(self, row: int) -> None:
        """Empty a row; its blocks are free once the steps under way have completed, and `settle` was called."""
        self.block_time.lost_all(row)
        if self.keeping.pop(row, None) is not None:
            self.delta.forget_drop(row)  # it may have dropped in this very plan
        if row in self.sources.rows:
            self._let_go(self.sources.take(row), self.submitted)
        for group in self.groups:
            self._give_back(group.index, group.clear(row), self.submitted)

    def complete(self, seq: int) -> None:
        """Step `seq` and all before it have completed."""
        self.completed = seq

    def settle(self) -> None:
        """Set free, in one sweep, every block whose fence has been passed."""
        if not self.fences:
            return
        due: dict[Level, list[Blocks]] = {}
        waiting = []
        for fence in self.fences:
            if fence.seq <= self.completed:
                due.setdefault(self.levels[fence.level][fence.group], []).append(fence.blocks)
            else:
                waiting.append(fence)
        self.fences = waiting
        for part, blocks in due.items():
            part.give_back(np.concatenate(blocks))

    def abandon(self) -> None:
        """No step is under way any more and no copy will complete: settle every fence and ticket."""
        self.completed = self.submitted + 1  # copies planned for the next step will not happen either
        self.settle()
        self.completed = self.submitted
        self._forget_copies()
        for number in list(self.tickets.open):
            self.complete_ticket(number)
        self.settle()

    def _give_back(self, group: int, blocks: Blocks, seq: int, level: int = 0) -> None:
        if len(blocks):
            self.fences.append(Fence(seq, group, blocks, level))
