"""Taking a running request off its row: who gives way, and what happens to its KV.

Spot work goes first, then the last in order, the first in order never does, and a request that has given way
`max_preemptions` times is reserved its full length and left alone from then on. A victim's KV is recomputed
later, or swapped to host places when these are configured and free, whichever is cheaper unless the config says one.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.core.events import DecisionKind, Rule
from paceline.core.request import Request, RequestState
from paceline.scheduler.cost import note_kind
from paceline.scheduler.estimates import estimate, swaps
from paceline.scheduler.state import NO_FIGURES, Figures, SchedulerState


def preempt(
    state: SchedulerState,
    request: Request,
    *,
    reason: str,
    swap: bool | None = None,
    figures: Figures = NO_FIGURES,
) -> None:
    """A running request gives way; it comes back at its old place in the order. `swap` None: what is cheaper."""
    put_aside(state, request, swap=swap, reason=reason, figures=figures)
    state.kv.settle()
    if not request.is_terminal:
        request.preemptions += 1
        note_kind(request)
        state.counters.preempted += 1


def put_aside(
    state: SchedulerState,
    request: Request,
    *,
    reason: str,
    swap: bool | None = None,
    figures: Figures = NO_FIGURES,
) -> None:
    """Free a request's row and blocks: SWAPPED when its KV went to host places, else WAITING to recompute."""
    row = request.row
    computed = int(state.rows.computed[row])
    try:
        state.publish(request)
    except Exception as error:
        state.fail(request, error)
        return
    cost = estimate(state, [row])
    swap = swaps(state, cost) if swap is None else swap
    swap = swap and not state.mode.keeps_finished  # a padded batch starts over together
    swapped = swap and computed > 0 and state.kv.can_swap_out(row, computed)
    rule = Rule(f"{reason}:{'swap' if swapped else 'recompute'}")
    seconds = cost.swap_s if swapped else cost.recompute_s
    seconds = seconds if seconds < math.inf else 0.0
    state.decide(DecisionKind.PREEMPT, request, rule, computed, figures, seconds=seconds, detail=str(cost))
    request.reserved = False
    if swapped:
        request.host_places = state.kv.swap_out(row, computed, request.id)
        request.num_computed = computed
        state.counters.swapped += 1
    else:
        state.kv.release(row)
        request.num_computed = 0
    state.leave_row(request)
    state.enqueue(request)


def pick_victim(state: SchedulerState, need: int) -> tuple[Request, bool | None] | None:
    """The request the policy gives up for `need` blocks, and whether it wants it swapped; None when nobody may be."""
    rows = state.rows
    live = np.flatnonzero(rows.live[: rows.high])
    oldest = first_in_order(state)
    candidates = [
        row
        for row in live[~rows.reserved[live] & ~rows.done[live]].tolist()
        if row != oldest and _request(state, row).state is RequestState.RUNNING
    ]
    if not candidates:
        return None
    candidates = [row for row in candidates if _request(state, row).is_spot] or candidates
    view = state.row_view(np.array(candidates, np.int64))
    victim = state.policy.victim(view, need)
    return _request(state, candidates[victim.index]), victim.swap


def first_in_order(state: SchedulerState) -> int | None:
    """The running row that goes before all others: it always makes progress."""
    rows = state.rows
    live = (rows.live[: rows.high] & ~rows.done[: rows.high]).nonzero()[0]
    return int(state.in_order(live)[0]) if len(live) else None


def _request(state: SchedulerState, row: int) -> Request:
    request = state.rows.requests[row]
    assert request is not None
    return request
