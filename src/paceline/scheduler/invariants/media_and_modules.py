"""Invariants of pictures and placed texts. Encodings: pages are counted right, no vector is read before it is computed,
a line goes in order. Placed texts: each slot is written once, out of the right blocks, for the place it has."""

from __future__ import annotations

import numpy as np

from paceline.core.plan import Placements, StepPlan
from paceline.core.request import ModuleRef
from paceline.scheduler.encodings import Encodings
from paceline.scheduler.invariants.registry import PLANNED, CheckContext, invariant
from paceline.scheduler.modules import Body
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


@invariant("K5", moment=PLANNED)
def a_placed_slot_is_written_once_from_its_module(context: CheckContext) -> str | None:
    """Rows hold the modules that they are still to place. What a plan computes and places of a row follows on one
    another; what it places is a body of the row, with the shift of its place, out of blocks that stay as they are."""
    state = context.scheduler.state
    for row, bodies in state.modules.rows.items():
        for body in bodies:
            if body.end > state.rows.scheduled[row] and (wrong := _wrong_sources(state, row, body)):
                return wrong
    for flight in state.flights:
        for group, blocks in zip(state.kv.groups, flight.sources, strict=False):
            if (group.pool.refs[blocks] < 1).any():
                return f"step {flight.seq} copies out of a block that no row and no fence holds"
    plan = context.plan
    return None if plan is None or not plan.work.placed_tokens else _wrong_plan(state, plan)


def _wrong_sources(state: SchedulerState, row: int, body: Body) -> str | None:
    module, held = _module(state, row, body), state.kv.sources.rows.get(row, {}).get(body.stretch.item)
    if held is None or any(len(blocks) != len(module.keys) for blocks in held):
        return f"row {row} does not hold the module that it is to place at token {body.start}"
    for group, blocks in zip(state.kv.groups, held, strict=True):
        for key, block in zip(module.keys, blocks.tolist(), strict=True):
            is_other = group.pool.cached[block] and group.cache.key_of(block).key != key.key
            if is_other or not group.pool.refs[block]:
                return f"row {row} holds block {block}, which is not of the module that it is to place"
    return None


def _wrong_plan(state: SchedulerState, plan: StepPlan) -> str | None:
    placements, size = plan.placements, state.kv.block_size
    for at, row in enumerate(placements.row.tolist()):
        start, count = placements.start.item(at), placements.count.item(at)
        body = next((b for b in state.modules.rows[row] if b.start <= start and start + count <= b.end), None)
        if body is None or count < 1:
            return f"tokens {start} to {start + count} of row {row} are placed, and are no part of a body"
        if placements.shift.item(at) != body.stretch.start:
            return f"token {start} of row {row} is shifted by {placements.shift.item(at)}, not {body.stretch.start}"
        first = start - body.stretch.start
        if placements.first.item(at) != first % size or _blocks(placements, at, size) < 1:
            return f"token {start} of row {row} is copied from place {placements.first.item(at)} of a block"
    for row in [row for row, _, _ in state.flights[-1].spans if row in state.modules.rows]:
        if (wrong := _wrong_runs(state, plan, row)) is not None:
            return wrong
    return None


def _wrong_runs(state: SchedulerState, plan: StepPlan, row: int) -> str | None:
    """What is computed and placed of a row follows on one another, and ends where the row is."""
    spans, placements = plan.spans, plan.placements
    mine = (placements.row == row) & (placements.group == 0)
    runs = list(zip(placements.start[mine].tolist(), placements.count[mine].tolist(), strict=True))
    mine = spans.row == row
    runs += list(zip(spans.start[mine].tolist(), spans.num_scheduled[mine].tolist(), strict=True))
    runs.sort()
    advance = next(count for each, _, count in state.flights[-1].spans if each == row)
    at = int(state.rows.scheduled[row]) - advance
    for start, count in runs:
        if start != at:
            return f"row {row} stands at token {at}, and the next run of its tokens begins at {start}"
        at += count
    return (
        None
        if at == state.rows.scheduled[row]
        else f"row {row} is at {state.rows.scheduled[row]}, its runs end at {at}"
    )


def _module(state: SchedulerState, row: int, body: Body) -> ModuleRef:
    request = state.rows.requests[row]
    assert request is not None
    return request.modules[body.stretch.item]


def _blocks(placements: Placements, at: int, size: int) -> int:
    """How many blocks a run has, beyond those that it needs: 1, or fewer where some are lacking."""
    ends = np.append(placements.offset[1:], len(placements.blocks))
    needed = -(-(placements.first.item(at) + placements.count.item(at)) // size)
    return int(ends[at] - placements.offset[at]) - needed + 1
