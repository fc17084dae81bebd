"""Invariants of encodings: pages are counted right, no vector is read before it is computed, a line goes in order."""

from __future__ import annotations

import numpy as np

from paceline.core.plan import StepPlan
from paceline.scheduler.encodings import Encodings
from paceline.scheduler.invariants.registry import PLANNED, CheckContext, invariant
from paceline.scheduler.state import SchedulerState


@invariant("E1")
def pages_have_the_references_of_rows_and_groups(context: CheckContext) -> str | None:
    """Free and live pages are all pages; references are those of rows, of groups under way and of fences."""
    encodings = context.scheduler.state.encodings
    pool = encodings.pool
    if encodings.work is None or not (encodings.rows or encodings.items or pool.num_free < pool.usable):
        return None
    wanted = np.zeros(pool.num_blocks, np.int32)
    for _, pages in encodings.fences:
        wanted[pages] += 1
    for group in encodings.unfinished:
        for encoding in group.encodings:
            wanted[encoding.pages] += 1
    for media in encodings.rows.values():
        for encoding in media.held.values():
            wanted[encoding.pages] += 1
    if not np.array_equal(wanted, pool.refs):
        page = int((wanted != pool.refs).argmax())
        return f"page {page} has {pool.refs[page]} references, and {wanted[page]} are known"
    if np.count_nonzero(pool.refs == 0) != pool.num_free:
        return (
            f"{pool.num_free} pages are counted as free, {np.count_nonzero(pool.refs == 0)} have no reference"
        )
    return _wrong_items(encodings)


def _wrong_items(encodings: Encodings) -> str | None:
    cached = np.zeros(encodings.pool.num_blocks, np.bool_)
    for key, encoding in encodings.items.items():
        if encoding.item.key != key:
            return f"item {encoding.media} is found under the key of another"
        if encoding.is_done:
            cached[encoding.pages] = True
        elif not any(encoding in group.encodings for group in encodings.unfinished):
            return f"item {encoding.media} is neither encoded nor being encoded"
    if not np.array_equal(cached, encodings.pool.cached):
        return "a page that can be evicted holds no vectors, or one that does cannot be"
    return None


@invariant("E2", moment=PLANNED)
def no_vector_is_read_before_it_is_computed(context: CheckContext) -> str | None:
    """What a row is scheduled to compute of an item, the row holds, and the whole line of it stands in plans."""
    state = context.scheduler.state
    scheduled, computed = state.rows.scheduled, state.rows.computed
    for row, media in state.encodings.rows.items():
        for index in range(media.passed, len(media.stretches)):
            stretch = media.stretches[index]
            if max(stretch.start, computed[row]) >= scheduled[row]:
                break
            encoding = media.held.get(index)
            if encoding is None or not encoding.is_planned:
                return f"row {row} computes token {stretch.start} of an item that is not encoded"
            if encoding.item.key != media.request.media[stretch.item].key:
                return f"row {row} holds another item than that of its stretch"
    return None


@invariant("E3", moment=PLANNED)
def the_line_of_a_group_goes_in_order(context: CheckContext) -> str | None:
    """Each position of a line stands in exactly one plan, in order, and one group at most has positions left."""
    state = context.scheduler.state
    for group in state.encodings.unfinished:
        underway = sum(flight.work.encode_positions for flight in state.flights if flight.group is group)
        if group.done + underway != group.planned or group.planned > group.total:
            return f"{group.planned} of {group.total} positions are planned, {group.done} done, {underway} under way"
        if (group is state.encodings.group) != (group.planned < group.total):
            return "a group that is not planned to its end is not the one under way"
    return None if context.plan is None else _wrong_part(state, context.plan)


def _wrong_part(state: SchedulerState, plan: StepPlan) -> str | None:
    part, group = plan.encodes, state.flights[-1].group
    if group is None:
        return "a plan encodes, and no group is under way" if part.count else None
    if part.first + part.count != group.planned or part.count < 1 or bool(part.joins) != (not part.first):
        return f"a plan computes {part.count} positions from {part.first} on, of {group.planned} planned"
    return None
