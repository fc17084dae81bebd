"""After a failed step, and for a runner that starts anew: plans that stand on nothing before them.

What a failed step left on the device is not to be trusted: every row is preempted and computes again, cached
prefixes are forgotten, and so are copies to the host that may not have happened.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import DecisionKind, Rule
from paceline.core.plan import RowSet, StepPlan
from paceline.core.request import NO_ROW, FinishReason, Request, RequestId, RequestState
from paceline.core.standing import DEVICE_LOST
from paceline.kv.delta import KVDelta
from paceline.scheduler.state import Join, SchedulerState
from paceline.scheduler.step.admission import largest_unreserved, reserved_full
from paceline.scheduler.step.columns import build_joins

MAX_STEP_FAILURES = 2  # a request whose step failed is tried once more before it ends


def full_plan(state: SchedulerState, decoding: NDArray[np.int64]) -> StepPlan:
    """Every live row as a join with all its tokens and blocks; `decoding` are the rows in plain decode."""
    assert not state.flights, "a snapshot needs every step completed"
    rows = state.rows
    live = np.flatnonzero(rows.live).tolist()
    delta = KVDelta()
    joins = []
    for row in live:
        request = rows.requests[row]
        assert request is not None
        rows.collect(request)
        joins.append(Join(row, request, NO_ROW))
        for group in state.kv.groups:
            delta.appends.append((row, group.index, int(group.first[row]), group.blocks_of(row)))
        if state.kv.dropped[row]:
            delta.drops[row] = int(state.kv.dropped[row]) * state.kv.block_size
    return StepPlan(
        seq=state.kv.submitted,
        full=True,
        joins=build_joins(state, joins)[0],
        new_blocks=delta.take()[0],
        drops=delta.take_drops(),
        decode_rows=RowSet(added=decoding[rows.live[decoding]].astype(np.int32)),
    )


def start_over(state: SchedulerState) -> None:
    """No result will come for the steps under way: bring every request back to where it can compute again."""
    state.counters.failed_steps += 1
    kv = state.kv
    swaps = [ticket for ticket in kv.tickets.open.values() if ticket.keys is None]
    copying_out = [ticket.owner for ticket in swaps if not ticket.incoming]
    took_part = {row for flight in state.flights for row, _, _ in flight.spans}
    for flight in state.flights:
        took_part.update(np.flatnonzero(flight.mask).tolist())
    state.flights.clear()
    kv.abandon()
    state.rows.complete(kv.submitted)
    if state.ignores_next_failure:  # the cause was the size of the batch, not a request in it
        took_part.clear()
        state.ignores_next_failure = False
    for row in np.flatnonzero(state.rows.live).tolist():
        _restart(state, row, row in took_part)
    for owner in copying_out:
        request = state.requests.get(RequestId(owner))
        if request is not None and request.host_places:
            forget_places(state, request)
    kv.reset_cache(DEVICE_LOST)  # what has arrived there was computed by steps that did not fail
    kv.delta = KVDelta()
    state.leaves, state.joins = [], []
    state.encodings.reset()


def let_go(state: SchedulerState, levels_lost: int) -> None:
    """The runner's memory goes: no request keeps a row, a block or a place. Levels below those that are lost keep their
    prefixes."""
    assert not state.flights, "no step is under way"
    kv = state.kv
    kv.abandon()
    state.rows.complete(kv.submitted)
    for row in np.flatnonzero(state.rows.live).tolist():
        _restart(state, row, False, Rule.SLEEP)
    for request in [each for each in state.requests.values() if each.host_places]:
        forget_places(state, request)
    kv.reset_cache(levels_lost)
    kv.delta = KVDelta()
    state.leaves, state.joins = [], []
    state.encodings.reset()
    state.adapters.let_go_of_all()
    state.num_sleeps += 1
    state.levels_lost = levels_lost


def note_wake(state: SchedulerState) -> None:
    """The first plan since a sleep: requests that came meanwhile have waited for their model."""
    for request in state.waiting_in_order(len(state.queue)) if len(state.queue) else ():
        if not request.preemptions:
            waited_s = state.now_s - request.arrival_s
            state.decide(DecisionKind.DEFER, request, Rule.ASLEEP, seconds=waited_s)


def is_slab_in_use(state: SchedulerState, slab: int) -> bool:
    """Whether a step or a copy under way needs blocks of a slab."""
    rows, is_other = state.kv.slabs.holders(slab)
    return is_other or bool(rows and state.flights)


def move_slab(state: SchedulerState, slab: int, *, gained: bool) -> bool:
    """Memory comes from another model, or goes to it: rows that hold any of it are computed again. No step under way
    needs it."""
    slabs = state.kv.slabs
    if gained:
        slabs.gain(slab)
        return True
    state.kv.pins.leave(slab * slabs.size, (slab + 1) * slabs.size)
    rows, _ = slabs.holders(slab)
    for row in rows:
        _restart(state, row, False, Rule.SLAB)
    state.kv.settle()
    if not slabs.can_lose(slab) or not _is_room_beside_reserved(state, slabs.size):
        for row in np.flatnonzero(state.rows.reserved).tolist():
            _restart(state, row, False, Rule.SLAB)
        state.kv.settle()
    slabs.lose(slab)
    return True


def _is_room_beside_reserved(state: SchedulerState, lost: int) -> bool:
    """Whether every other row can still come to its end, one after the other, with `lost` blocks less."""
    if not state.rows.num_reserved:
        return True
    taken = reserved_full(state)
    return all(
        group.unpinned - lost >= taken[group.index] + largest_unreserved(state, group.index)
        for group in state.kv.groups
    )


def _restart(state: SchedulerState, row: int, took_part: bool, rule: Rule = Rule.STEP_FAILED) -> None:
    rows = state.rows
    request = rows.requests[row]
    assert request is not None
    if rows.done[row]:  # it has its last token and only waited for its batch
        state.end(request, FinishReason(request.fail_detail))
        return
    num_tokens = int(rows.num_tokens[row])
    if num_tokens > request.failed_at:  # it has got on since its last failure
        request.step_failures = 0
    if took_part:
        request.step_failures += 1
        request.failed_at = num_tokens
    state.kv.quarantine(row)
    if request.step_failures >= MAX_STEP_FAILURES:
        state.end(request, FinishReason.ERROR, "internal_error")
        return
    if request.state is RequestState.BLOCKED:  # was being swapped in
        request.blocked = None
        request.move(RequestState.RUNNING)
    state.decide(DecisionKind.PREEMPT, request, rule, int(rows.computed[row]))
    state.kv.release(row)
    request.reserved = False
    request.num_computed = 0
    state.leave_row(request)
    state.enqueue(request)


def forget_places(state: SchedulerState, request: Request) -> None:
    """A copy to the host may not have happened: what it held is computed again."""
    state.kv.drop_places(request.host_places, request.id)
    request.host_places = ()
    request.num_computed = 0
    if request.state is RequestState.SWAPPED:
        state.queue.remove(request)
        state.enqueue(request)
