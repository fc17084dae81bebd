"""The pictures of many half-steps behind one another, as arrays.

A check over them is a few operations for all half-steps together, and so costs little even at the few rows of a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.fast import make_tuple
from paceline.core.plan import StepPlan
from paceline.kv.block_pool import NULL_BLOCK
from paceline.kv.group import LayerGroup
from paceline.kv.manager import Fence
from paceline.scheduler.rows import COUNTS, FLAGS
from paceline.scheduler.state import Flight, SchedulerState

# Pictures of the state after a half-step: what the array invariants read, copied in a moment and looked at later.
#
# Taking one copies bytes and computes nothing. Blocks that have not changed since the last picture are not kept
# twice.


Index = NDArray[np.int64]
NO_REQUEST, SEVERAL = -1, -2  # instead of a row, in `BlocksInUse.touched`


@dataclass(slots=True, eq=False)
class BlocksInUse:
    """Something that uses blocks until its result is here: the row that uses each, the groups' one after another."""

    touched: Index


@dataclass(slots=True, eq=False)
class Planned:
    """A plan as it was made. It is itself under way for the plans after it, once `touched` is known."""

    plan: StepPlan
    flight: Flight
    in_flight: Sequence[BlocksInUse | Planned]  # earlier steps and copies whose results are still to come
    touched: Index = field(default_factory=lambda: np.zeros(0, np.int64))


class GroupPicture(NamedTuple):
    """The block tables, the pool and the cache of one group. Equal when nothing in them has changed."""

    table: bytes
    bounds: bytes  # held and first
    refs: bytes
    cached: bytes
    num_free: int
    num_evictable: int
    num_keys: int
    reserved: int


class GroupLists(NamedTuple):
    """Which blocks are free, wait for eviction, have a key: changes only when the picture does."""

    stack: bytes
    evictable: list[int]
    entries: list[int]


class BlocksPicture(NamedTuple):
    """All groups, and what holds blocks beside their tables. Equal when nothing has changed."""

    live: bytes
    fences: list[Fence]
    tickets: list[int]
    groups: list[GroupPicture]


@dataclass(slots=True, eq=False)
class Blocks:
    """Everything the invariants of blocks read."""

    picture: BlocksPicture
    lists: list[GroupLists]
    other_blocks: list[tuple[Index, ...]]  # by group: of each copy under way, and of pins


class Owners(NamedTuple):
    """What the owners of rows say about themselves, as `SAYS` names it, and how many other rows there are."""

    says: list[tuple[int, ...]]  # in the order of rows
    num_free: int
    num_different: int  # of the free ones: fewer when one is free twice


# What a request says about itself, and the columns of its row that say the same.
_SAYS = attrgetter(
    "row",
    "id",
    "tokens.size",
    "num_prompt",
    "priority",
    "preemptions",
    "reserved",
    "max_total",
    "displaced_at",
)
SAYS = (
    "row",
    "request_id",
    "num_known",
    "num_prompt",
    "priority",
    "preemptions",
    "reserved",
    "max_len",
    "displaced_at",
    "order",
    "tenant",
)


@dataclass(slots=True, eq=False)
class Frame:
    """One half-step. Frames whose blocks are alike share them."""

    counts: bytes
    flags: bytes
    blocks: Blocks
    after_schedule: bool
    planned: Planned | None
    owners: Owners | None = None  # only when they may have changed


def take_owners(state: SchedulerState) -> Owners:
    """What the owner of each row in use says about itself now."""
    rows, orders, tenant = state.rows, state.orders, state.tenant_index
    owners = [owner for owner in rows.requests if owner is not None]
    says = [(*_SAYS(owner), orders[owner.id], tenant(owner.tenant)) for owner in owners]
    free = rows.free_rows() + rows.fenced_rows()
    return Owners(says, len(free), len(set(free)))


def take_frame(
    state: SchedulerState, last: Frame | None, *, after_schedule: bool, planned: Planned | None
) -> Frame:
    counts, flags = state.rows.columns()
    return Frame(
        counts, flags, _blocks(state, last.blocks if last is not None else None), after_schedule, planned
    )


def _blocks(state: SchedulerState, last: Blocks | None) -> Blocks:
    kv, rows = state.kv, state.rows
    groups = [_picture(group, rows.high) for group in kv.groups]
    tickets = kv.tickets.open
    picture = make_tuple(BlocksPicture, (rows.live.tobytes(), kv.fences.copy(), list(tickets), groups))
    if last is not None and last.picture == picture:
        return last
    lists = [_lists(group, last.lists[group.index] if last is not None else None) for group in kv.groups]
    others = [ticket.blocks for ticket in tickets.values() if not ticket.level]
    if kv.pins:
        others.append(tuple([kv.pins.held(group.index) for group in kv.groups]))
    if kv.sources.rows:
        others.append(tuple([kv.sources.held(group.index) for group in kv.groups]))
    return Blocks(picture, lists, others)


def _picture(group: LayerGroup, high: int) -> GroupPicture:
    pool = group.pool
    table, counts = group.table[:high].tobytes(), (pool.num_free, len(pool.evictable), len(group.cache))
    arrays = (table, group.bounds(), pool.refs.tobytes(), pool.cached.tobytes())
    picture: GroupPicture = make_tuple(GroupPicture, (*arrays, *counts, group.reserved))
    return picture


def _lists(group: LayerGroup, last: GroupLists | None) -> GroupLists:
    """Lists that have not changed are the ones of the last picture, so that each is counted once."""
    evictable, entries = list(group.pool.evictable), group.cache.blocks()
    if last is not None:
        evictable = last.evictable if evictable == last.evictable else evictable
        entries = last.entries if entries == last.entries else entries
    return GroupLists(group.pool.free_stack().tobytes(), evictable, entries)


Mask = NDArray[np.bool_]


class Frames:
    """Half-steps behind one another. `step` is always a place among them, `picture` one among `blocks`."""

    def __init__(self, state: SchedulerState, frames: Sequence[Frame]) -> None:
        self.state = state
        self.frames = frames
        self.num_rows = len(state.rows.live)
        self.blocks: list[Blocks] = []
        first_seen = []
        picture_of = []
        for step, frame in enumerate(frames):
            if not self.blocks or frame.blocks is not self.blocks[-1]:
                self.blocks.append(frame.blocks)
                first_seen.append(step)
            picture_of.append(len(self.blocks) - 1)
        self.step_of = np.array(first_seen, np.int64)  # per picture
        self.picture_of = np.array(picture_of, np.int64)  # per step
        self.scheduled = np.array([at for at, frame in enumerate(frames) if frame.after_schedule], np.int64)
        self.groups = [GroupFrames(group, self.blocks, self.num_rows) for group in state.kv.groups]
        # Where the blocks of each group begin when all are numbered one after another, and the end.
        self.block_starts: Index = np.cumsum([0, *(group.num_blocks for group in self.groups)])

    @cached_property
    def counts(self) -> dict[str, Index]:
        """Each count of the rows by name: [step, row]."""
        stack = np.frombuffer(b"".join([frame.counts for frame in self.frames]), np.int64)
        columns = stack.reshape(len(self.frames), len(COUNTS), self.num_rows)
        return {name: columns[:, at] for at, name in enumerate(COUNTS)}

    @cached_property
    def flags(self) -> dict[str, Mask]:
        stack = np.frombuffer(b"".join([frame.flags for frame in self.frames]), np.bool_)
        columns = stack.reshape(len(self.frames), len(FLAGS), self.num_rows)
        return {name: columns[:, at] for at, name in enumerate(FLAGS)}

    def column(self, name: str) -> Index | Mask:
        """A count or a flag of the rows by name: [step, row]."""
        return self.flags[name] if name in FLAGS else self.counts[name]

    @cached_property
    def live(self) -> tuple[Index, Index]:
        """Step and row of every row in use."""
        steps, rows = self.flags["live"].nonzero()
        return steps, rows

    @cached_property
    def writes(self) -> Writes:
        return Writes(self)


class GroupFrames:
    """The pictures of one layer group behind one another."""

    def __init__(self, group: LayerGroup, blocks: Sequence[Blocks], num_rows: int) -> None:
        self.group = group
        self.num_blocks = group.pool.num_blocks
        self.pictures = [one.picture.groups[group.index] for one in blocks]
        self.lists = [one.lists[group.index] for one in blocks]
        self._live = [one.picture.live for one in blocks]
        self._row_shape = (len(self.pictures), num_rows)

    @cached_property
    def table(self) -> Index:
        """[picture, row, entry]; rows that were never used are not in a picture, their entries are 0."""
        width = self.group.table.shape[1]
        size = self._row_shape[1] * width * 8
        stack = np.frombuffer(b"".join([p.table.ljust(size, b"\0") for p in self.pictures]), np.int64)
        return stack.reshape(*self._row_shape, width)

    @cached_property
    def held(self) -> Index:
        return self._bounds[:, 0]

    @cached_property
    def first(self) -> Index:
        return self._bounds[:, 1]

    @cached_property
    def _bounds(self) -> Index:
        stack = np.frombuffer(b"".join([p.bounds for p in self.pictures]), np.int64)
        return stack.reshape(len(self.pictures), 2, self._row_shape[1])

    @cached_property
    def refs(self) -> NDArray[np.int32]:
        stack = np.frombuffer(b"".join([p.refs for p in self.pictures]), np.int32)
        return stack.reshape(len(self.pictures), self.num_blocks)

    @cached_property
    def cached(self) -> Mask:
        stack = np.frombuffer(b"".join([p.cached for p in self.pictures]), np.bool_)
        return stack.reshape(len(self.pictures), self.num_blocks)

    @cached_property
    def live(self) -> tuple[Index, Index]:
        """Picture and row of every row in use."""
        live = np.frombuffer(b"".join(self._live), np.bool_)
        pictures, rows = live.reshape(self._row_shape).nonzero()
        return pictures, rows

    @cached_property
    def entries(self) -> Entries:
        """The blocks in the tables of live rows."""
        return Entries(self, *self.live)

    @cached_property
    def holders(self) -> Index:
        """Rows that hold each block: [picture, block]."""
        counts: Index = np.bincount(self.entries.cell, minlength=len(self.pictures) * self.num_blocks)
        return counts.reshape(len(self.pictures), self.num_blocks)

    @cached_property
    def shared(self) -> Index:
        """The entries whose block is in more than one table, or twice in one."""
        shared: Mask = self.holders.reshape(-1)[self.entries.cell] > 1
        shared &= self.entries.block != NULL_BLOCK  # entries that a row has dropped
        return shared.nonzero()[0]

    def rows_with(self, picture: int, block: int) -> list[int]:
        """Rows that hold a block."""
        entries = self.entries
        low, high = np.searchsorted(entries.picture, (picture, picture + 1))
        rows: list[int] = entries.row[low:high][entries.block[low:high] == block].tolist()
        return rows

    @cached_property
    def free(self) -> Index:
        """The free blocks of every picture, as places in a flat [picture, block]."""
        lengths = [len(lists.stack) // 8 for lists in self.lists]
        stacks = np.frombuffer(b"".join([lists.stack for lists in self.lists]), np.int64)
        return np.concatenate([self.cells(stacks, lengths), self.evictable])

    @cached_property
    def evictable(self) -> Index:
        """The blocks that wait for eviction, as places in a flat [picture, block]."""
        which, each = _different([lists.evictable for lists in self.lists])
        flat = [np.array(blocks, np.int64) for blocks in each]
        blocks = np.concatenate([flat[number] for number in which])
        return self.cells(blocks, [len(flat[number]) for number in which])

    @cached_property
    def keyed(self) -> Mask:
        """Which blocks have a key: [picture, block]."""
        which, each = _different([lists.entries for lists in self.lists])
        keyed = np.zeros((len(each), self.num_blocks), np.bool_)
        keyed[np.repeat(np.arange(len(each)), [len(blocks) for blocks in each]), _flat(each)] = True
        return keyed[which]

    def cells(self, blocks: Index, lengths: list[int]) -> Index:
        """Lists of blocks, one per picture and one after another, as places in a flat [picture, block]."""
        if len(lengths) == 1:
            return blocks
        return blocks + np.repeat(np.arange(len(lengths)) * self.num_blocks, lengths)

    def at(self, cell: int) -> tuple[int, int]:
        """The picture and the block of a place in a flat [picture, block]."""
        return divmod(cell, self.num_blocks)


class Entries:
    """The table entries of some rows in some pictures, flat: row, block, and place in a flat [picture, block]."""

    def __init__(self, group: GroupFrames, pictures: Index, rows: Index) -> None:
        self._pictures = pictures
        self._start = group.first[pictures, rows] if group.group.window is not None else np.zeros_like(rows)
        self._count = np.maximum(group.held[pictures, rows] - self._start, 0)
        self._offset = np.cumsum(self._count) - self._count
        _, num_rows, width = group.table.shape
        begin = (pictures * num_rows + rows) * width + self._start
        self.row = self.spread(rows)
        place = np.arange(len(self.row)) + self.spread(begin - self._offset)
        self.block = group.table.reshape(-1)[place]
        if len(self.block) and not 0 <= int(self.block.min()) <= int(self.block.max()) < group.num_blocks:
            raise IndexError(f"a table of group {group.group.index} holds a block that does not exist")
        self.cell = self.block
        if len(group.pictures) > 1:
            self.cell = self.block + self.spread(pictures * group.num_blocks)

    def spread(self, values: Index) -> Index:
        """A value per row, for each of its entries."""
        spread: Index = np.repeat(values, self._count)
        return spread

    @cached_property
    def picture(self) -> Index:
        return self.spread(self._pictures)

    @cached_property
    def index(self) -> Index:
        """The place in the row's table."""
        return np.arange(len(self.row)) + self.spread(self._start - self._offset)


class Writes:
    """Every write of the plans, flat: step, row, first position and end."""

    def __init__(self, frames: Frames) -> None:
        at = [step for step, frame in enumerate(frames.frames) if frame.planned is not None]
        self.plans = [frame.planned for frame in frames.frames if frame.planned is not None]
        masks = b"".join([plan.flight.mask.tobytes().ljust(frames.num_rows, b"\0") for plan in self.plans])
        self.decoding = np.frombuffer(masks, np.bool_).reshape(len(at), frames.num_rows)  # [plan, row]
        number, rows = self.decoding.nonzero()
        spans = [(n, row, num) for n, plan in enumerate(self.plans) for row, _, num in plan.flight.spans]
        count = np.ones(len(rows) + len(spans), np.int64)
        if spans:
            more = np.array(spans, np.int64)
            count[len(rows) :] = more[:, 2]
            number, rows = np.concatenate([number, more[:, 0]]), np.concatenate([rows, more[:, 1]])
        self.number, self.row = number, rows  # which of `plans`, which row
        self.steps = at  # per plan
        self.step = np.array(at, np.int64)[number]
        self.picture = frames.picture_of[self.step]
        self.end = frames.counts["scheduled"][self.step, rows]
        self.start = self.end - count
        for place, plan in enumerate(self.plans):
            if plan.flight.first is not None:  # with drafts, where a row stands follows from steps under way
                mine = (number == place) & self.decoding[place, rows]
                # A row that may have all its tokens by then writes nothing.
                self.start[mine] = np.minimum(plan.flight.first[rows[mine]], self.end[mine] - 1)

    def blocks_of(self, group: GroupFrames, block_size: int) -> tuple[Index, Index]:
        """The first and the last block of each write."""
        first = group.table[self.picture, self.row, self.start // block_size]
        return first, group.table[self.picture, self.row, (self.end - 1) // block_size]


def _different(lists: Sequence[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Each list once, and which of them each picture has."""
    place: dict[int, int] = {}
    which = [place.setdefault(id(blocks), len(place)) for blocks in lists]
    return which, [lists[which.index(number)] for number in range(len(place))]


def _flat(lists: Sequence[list[int]]) -> Index:
    return np.fromiter(chain.from_iterable(lists), np.int64, sum(map(len, lists)))


def first_true(mask: Mask | Index) -> int | None:
    """Place of the first entry that is not zero, read row by row; time is the first dimension."""
    return int(mask.astype(np.bool_).argmax()) if np.count_nonzero(mask) else None


def in_time(step: Index, mask: Mask) -> list[int]:
    """The places where `mask` is True, those of earlier steps first."""
    places = mask.nonzero()[0]
    ordered: list[int] = places[step[places].argsort(kind="stable")].tolist()
    return ordered
