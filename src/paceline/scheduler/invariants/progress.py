"""Invariants of liveness and fairness: no request that could run is left out, and the order is kept."""

from __future__ import annotations

import numpy as np

from paceline.core.events import DecisionKind
from paceline.core.fast import count_set
from paceline.core.request import NO_ROW, BlockReason, Request, RequestState
from paceline.policy import RequestView
from paceline.scheduler.invariants.registry import CONTINUOUS_ONLY, PLANNED, CheckContext, invariant
from paceline.scheduler.rows import Rows
from paceline.scheduler.step.admission import PASSABLE
from paceline.scheduler.step.preemption import first_in_order
from paceline.scheduler.view_columns import view_of_requests, waiting_values
from paceline.scheduler.waiting_queue import first

_ADMITTED = (DecisionKind.ADMIT, DecisionKind.RESUME)


@invariant("L1", moment=PLANNED)
def work_is_done_when_there_is_any(context: CheckContext) -> str | None:
    """No plan only while results are under way, or every request waits for something outside or for the clock."""
    state = context.scheduler.state
    if context.plan is not None or state.flights:
        return None
    for request in state.requests.values():
        if request.state in (RequestState.PAUSED, RequestState.HELD):
            continue
        blocked = request.blocked
        if blocked is not None and blocked.reason is not BlockReason.SWAP_IN:
            continue
        gate_closed = not state.mode.admit_limit(state.queue.view(state.now_s), state.rows.num_live)
        if request.state is RequestState.WAITING and gate_closed:
            continue
        if state.adapters.coming and request.adapter and not state.adapters.is_there(request.adapter):
            continue  # one is being read
        return f"nothing is planned although request {request.id} is {request.state.value}"
    return None


@invariant("L1w", moment=PLANNED, modes=CONTINUOUS_ONLY)
def a_request_that_fits_is_in_the_plan(context: CheckContext) -> str | None:
    """Bounded waiting: the first waiting request is admitted unless a row, tokens or blocks are missing."""
    state = context.scheduler.state
    composer = context.scheduler.composer
    if not len(state.queue) or composer.last_draft.left < 1 or composer.admission.rows_left() < 1:
        return None
    head = _head(context)
    if head is None:
        return None
    if head.id not in composer.last_draft.passed and composer.admission.judge(head).rule is None:
        return f"request {head.id} fits and is first, and was not admitted"
    return None


@invariant("F1", moment=PLANNED)
def the_last_in_order_is_preempted(context: CheckContext) -> str | None:
    if not context.decisions:
        return None
    state = context.scheduler.state
    for_blocks = [d for d in context.decisions if d.reason.startswith("blocks:")]
    victims = [
        d.request for d in for_blocks if d.kind is DecisionKind.PREEMPT and d.request in state.requests
    ]
    if not victims:
        return None
    joined = set(context.plan.joins.row.tolist()) if context.plan is not None else set()
    # A request that joined since may go first; the one that was spared was first among those that ran.
    ran = [row for row in context.live.tolist() if row not in joined and not state.rows.done[row]]
    rows, foremost = state.rows, int(state.in_order(np.array(ran, np.int64))[0]) if ran else None
    charged = _tenants_admitted(context) if state.policy.relative else set()
    for row in context.live.tolist():
        request = rows.requests[row]
        assert request is not None
        if row in joined or rows.reserved[row] or request.state is not RequestState.RUNNING:
            continue
        if row == foremost or request.tenant in charged:
            continue
        for victim in victims:
            if request.is_spot != state.requests[victim].is_spot:
                if request.is_spot:
                    return f"request {victim} was preempted although {request.id} is spot work"
                continue
            if goes_first(context, state.requests[victim], request):
                return f"request {victim} was preempted although {request.id} comes after it"
    return None


@invariant("F2", moment=PLANNED, modes=CONTINUOUS_ONLY)
def no_request_is_passed_over(context: CheckContext) -> str | None:
    """No request is admitted past an earlier request, unless that one waits for a prefix under way.

    The order is that of arrival: a preempted request has not lost its place.
    """
    state = context.scheduler.state
    if not context.decisions or not len(state.queue) or state.policy.relative:
        return None
    admitted = [d.request for d in context.decisions if d.kind in _ADMITTED]
    runners = [state.requests[a] for a in admitted if a in state.requests]
    if not runners:
        return None
    waiting_requests = list(state.queue)
    view = _view_of(context, waiting_requests)
    waiting = state.policy.order(view)
    admitted_view = _view_of(context, runners, as_waited=True)
    scores = state.policy.order(admitted_view)
    last = int(np.lexsort((admitted_view.order, scores))[-1])
    earlier = (waiting < scores[last]) | (
        (waiting == scores[last]) & (view.order < admitted_view.order[last])
    )
    for index in np.flatnonzero(earlier).tolist():
        request = waiting_requests[index]
        waits_for_room = context.scheduler.composer.admission.judge(request).rule not in (*PASSABLE, None)
        if waits_for_room and not could_wait_for_prefix(context, request):
            return f"request {runners[last].id} was admitted past {request.id}"
    return None


@invariant("F3", moment=PLANNED, modes=CONTINUOUS_ONLY)
def the_first_always_progresses(context: CheckContext) -> str | None:
    state = context.scheduler.state
    if context.plan is None or state.kv.fences or state.kv.tickets.open:
        return None  # blocks are on their way back: it goes in the next plan
    flight, rows = state.flights[-1], state.rows
    if count_set(flight.mask) + len(flight.spans) == rows.num_live:
        return None  # every request is in the plan (S14: none twice)
    row = first_in_order(state)
    if row is None:
        return None
    request = rows.requests[row]
    assert request is not None
    if row < len(flight.mask) and flight.mask[row]:
        return None
    if any(row == span[0] for span in flight.spans):
        return None
    ended = rows.scheduled[row] + 1 >= rows.max_len[row]
    unsure = state.unsure_rows()  # it must copy a block, and where it writes is not known yet
    waits_for_drafts = unsure is not None and unsure[row] and rows.sharing[row]
    if request.state is RequestState.BLOCKED or ended or waits_for_drafts:
        return None
    return f"request {request.id} is first in order and not in the plan"


@invariant("F4", moment=PLANNED, modes=CONTINUOUS_ONLY)
def a_long_prompt_leaves_room_for_others(context: CheckContext) -> str | None:
    """A prompt takes more than its share only when no waiting request could have used the rest."""
    state = context.scheduler.state
    composer = context.scheduler.composer
    if context.plan is None or not len(state.queue) or composer.last_draft.left > 0:
        return None
    view = state.queue.view(state.now_s)
    share = state.share(view, composer.last_draft.budget)
    if int(context.plan.spans.num_scheduled.max(initial=0)) <= share:
        return None
    head = _head(context)
    if (
        head is not None
        and head.id not in composer.last_draft.passed
        and composer.admission.judge(head).rule is None
    ):
        return f"a prompt took more than its share of {share} tokens while request {head.id} waited"
    return None


def _tenants_admitted(context: CheckContext) -> set[str]:
    """Tenants that were charged for a prompt since a request was preempted: their accounts were lower then."""
    requests = context.scheduler.state.requests
    admitted = [d.request for d in context.decisions if d.kind is DecisionKind.ADMIT]
    return {requests[number].tenant for number in admitted if number in requests}


def _head(context: CheckContext) -> Request | None:
    """The first waiting request. None if another was first when the plan was made: where scores depend
    on other waiting requests, they change when a request fails on the way in."""
    state = context.scheduler.state
    if state.policy.relative and any(d.kind is DecisionKind.FAIL for d in context.decisions):
        return None
    view = state.queue.view(state.now_s)
    return state.queue.get(int(first(view, state.policy.order(view), 1)[0]))


def could_wait_for_prefix(context: CheckContext, request: Request) -> bool:
    """Whether the request was rightly passed over earlier in this schedule: its prefix or parent is being computed."""
    state = context.scheduler.state
    recent = {d.request for d in context.decisions if d.kind is DecisionKind.DEFER and d.reason in PASSABLE}
    if request.id in recent or state.kv.is_moving(request.id):
        return True
    if request.id in context.scheduler.composer.admission.loading.waiting:
        return True
    parent = state.requests.get(request.parent) if request.parent is not None else None
    if parent is not None and parent.state is RequestState.RUNNING:
        return True
    return any(key.key in state.computing for key in request.keys)


def goes_first(context: CheckContext, one: Request, other: Request, *, as_waited: bool = False) -> bool:
    view = _view_of(context, [one, other], as_waited=as_waited)
    scores = context.scheduler.state.policy.order(view)
    return bool((scores[0], view.order[0]) < (scores[1], view.order[1]))


def _view_of(context: CheckContext, requests: list[Request], *, as_waited: bool = False) -> RequestView:
    """Requests as a policy sees them, with the place in the order of arrival they came with. `as_waited`: before they
    were admitted, with nothing found in the prefix cache."""
    state = context.scheduler.state
    seen = []
    for request in requests:
        arrival_s, order = context.arrived[request.id]
        values = waiting_values(request, order, state.tenant_index(request.tenant))
        computed = _computed(state.rows, request, as_waited)
        values |= {"arrival_s": arrival_s, "num_tokens": _num_tokens(state.rows, request)}
        values |= {"num_computed": computed, "peak_computed": max(request.peak_computed, computed)}
        seen.append(values)
    return view_of_requests(seen, state.now_s)


def _computed(rows: Rows, request: Request, as_waited: bool) -> int:
    at_rest = as_waited or request.row == NO_ROW
    return request.num_computed if at_rest else rows.computed.item(request.row)


def _num_tokens(rows: Rows, request: Request) -> int:
    return request.num_tokens if request.row == NO_ROW else rows.num_tokens.item(request.row)
