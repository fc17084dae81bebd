"""Pictures of the state after a half-step: what the array invariants read, copied in a moment and looked at later.

Taking one copies bytes and computes nothing. Blocks that have not changed since the last picture are not kept twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import StepPlan
from paceline.kv.group import LayerGroup
from paceline.kv.manager import Fence
from paceline.scheduler.state import Flight, SchedulerState

Index = NDArray[np.int64]
NOBODY, SEVERAL = -1, -2  # instead of a row, in `Underway.touched`


@dataclass(slots=True, eq=False)
class Underway:
    """Something that uses blocks until its result is here: the row that uses each, the groups' one after another."""

    touched: Index


@dataclass(slots=True, eq=False)
class Planned:
    """A plan as it was made. It is itself under way for the plans after it, once `touched` is known."""

    plan: StepPlan
    flight: Flight
    in_flight: Sequence[Underway | Planned]  # earlier steps and copies whose results are still to come
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
    ticket_blocks: list[tuple[Index, ...]]


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
    "needs_host",
    "max_total",
    "displaced_at",
)
SAYS = (
    "row",
    "request_id",
    "known",
    "num_prompt",
    "priority",
    "preemptions",
    "reserved",
    "needs_host",
    "limit",
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


_new = (
    tuple.__new__
)  # makes a named tuple in half the time: two pictures or more are taken in every half-step


def _blocks(state: SchedulerState, last: Blocks | None) -> Blocks:
    kv, rows = state.kv, state.rows
    groups = [_picture(group, rows.high) for group in kv.groups]
    tickets = kv.tickets.open
    picture = _new(BlocksPicture, (rows.live.tobytes(), kv.fences.copy(), list(tickets), groups))
    if last is not None and last.picture == picture:
        return last
    lists = [_lists(group, last.lists[group.index] if last is not None else None) for group in kv.groups]
    return Blocks(picture, lists, [ticket.blocks for ticket in tickets.values()])


def _picture(group: LayerGroup, high: int) -> GroupPicture:
    pool = group.pool
    table, counts = group.table[:high].tobytes(), (pool.num_free, len(pool.evictable), len(group.cache))
    arrays = (table, group.bounds(), pool.refs.tobytes(), pool.cached.tobytes())
    return _new(GroupPicture, (*arrays, *counts, group.reserved))


def _lists(group: LayerGroup, last: GroupLists | None) -> GroupLists:
    """Lists that have not changed are the ones of the last picture, so that each is counted once."""
    evictable, entries = list(group.pool.evictable), list(group.cache.entries())
    if last is not None:
        evictable = last.evictable if evictable == last.evictable else evictable
        entries = last.entries if entries == last.entries else entries
    return GroupLists(group.pool.free_stack().tobytes(), evictable, entries)
