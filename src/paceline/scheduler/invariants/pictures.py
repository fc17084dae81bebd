"""Pictures of the state after a half-step: what the array invariants read, copied in a moment and looked at later.

Taking one copies bytes and computes nothing. Blocks that have not changed since the last picture are not kept twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    held: bytes
    first: bytes
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


@dataclass(slots=True, eq=False)
class Frame:
    """One half-step. Frames whose blocks are alike share them."""

    counts: bytes
    flags: bytes
    blocks: Blocks
    after_schedule: bool
    planned: Planned | None


def take_frame(
    state: SchedulerState, last: Frame | None, *, after_schedule: bool, planned: Planned | None
) -> Frame:
    counts, flags = state.rows.columns()
    return Frame(
        counts, flags, _blocks(state, last.blocks if last is not None else None), after_schedule, planned
    )


def _blocks(state: SchedulerState, last: Blocks | None) -> Blocks:
    kv, high = state.kv, state.rows.high
    picture = BlocksPicture(
        state.rows.live.tobytes(),
        kv.fences.copy(),
        list(kv.tickets.open),
        [_picture(group, high) for group in kv.groups],
    )
    if last is not None and last.picture == picture:
        return last
    lists = [_lists(group, last.lists[group.index] if last is not None else None) for group in kv.groups]
    return Blocks(picture, lists, [ticket.blocks for ticket in kv.tickets.open.values()])


def _picture(group: LayerGroup, high: int) -> GroupPicture:
    pool = group.pool
    return GroupPicture(
        group.table[:high].tobytes(),
        group.held[:high].tobytes(),
        group.first[:high].tobytes(),
        pool.refs.tobytes(),
        pool.cached.tobytes(),
        pool.num_free,
        len(pool.evictable),
        len(group.cache),
        group.reserved,
    )


def _lists(group: LayerGroup, last: GroupLists | None) -> GroupLists:
    """Lists that have not changed are the ones of the last picture, so that each is counted once."""
    evictable, entries = list(group.pool.evictable), list(group.cache.entries())
    if last is not None:
        evictable = last.evictable if evictable == last.evictable else evictable
        entries = last.entries if entries == last.entries else entries
    return GroupLists(group.pool.free_stack().tobytes(), evictable, entries)
