"""Invariants of progress and order, of shares between tenants, displacement and pauses, charges, and the dial."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.fast import count_set
from paceline.core.request import NO_ROW, OWN_REQUESTS, BlockReason, Request, RequestId, RequestState
from paceline.policy import RequestView
from paceline.scheduler.invariants.registry import CHANGES, CONTINUOUS_ONLY, PLANNED, CheckContext, invariant
from paceline.scheduler.modules import name_of
from paceline.scheduler.policy.fair import FairShare
from paceline.scheduler.policy.priority import PriorityWithAgeing
from paceline.scheduler.rows import Rows
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.step.admission import PASSABLE
from paceline.scheduler.step.preemption import first_in_order
from paceline.scheduler.view_columns import view_of_requests, waiting_values
from paceline.scheduler.waiting_queue import first

# Invariants of liveness and fairness: no request that could run is left out, and the order is kept.


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

    The order is that of arrival: a preempted request has not lost its place. Behind a request whose module was evicted
    only those that compute modules are looked at: they pass the others, and none of their kind.
    """
    state = context.scheduler.state
    if not context.decisions or not len(state.queue) or state.policy.relative:
        return None
    admitted = [d.request for d in context.decisions if d.kind in _ADMITTED]
    runners = [state.requests[a] for a in admitted if a in state.requests]
    waiting = list(state.queue)
    if not context.scheduler.composer.last_draft.only_modules:
        return _passed_over(context, runners, waiting)
    modules = [runner for runner in runners if runner.is_module]
    ahead = [request for request in waiting if request.is_module or _stands_before_evicted(context, request)]
    others = [runner for runner in runners if not runner.is_module]
    return _passed_over(context, others, waiting) or _passed_over(context, modules, ahead)


def _stands_before_evicted(context: CheckContext, request: Request) -> bool:
    """Whether a request goes before all that wait because their modules were evicted."""
    state, composer = context.scheduler.state, context.scheduler.composer
    passed = [state.requests[number] for number in composer.last_draft.passed if number in state.queue]
    evicted = [each for each in passed if composer.admission.judge(each).rule is Rule.MODULE_EVICTED]
    return bool(evicted) and all(goes_first(context, request, each) for each in evicted)


def _passed_over(
    context: CheckContext, runners: list[Request], waiting_requests: list[Request]
) -> str | None:
    """Whether some of those admitted went past one that waits for room."""
    if not runners or not waiting_requests:
        return None
    state = context.scheduler.state
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
    if row in context.scheduler.composer.last_draft.bounds and (
        context.plan.encodes.count or state.encodings.lacks_pages
    ):
        return None  # its next item is being encoded, or waits for pages that are being read
    return f"request {request.id} is first in order and not in the plan"


@invariant("F4", moment=PLANNED, modes=CONTINUOUS_ONLY)
def a_long_prompt_leaves_room_for_others(context: CheckContext) -> str | None:
    """A prompt takes more than its share only when no waiting request could have used the rest."""
    state = context.scheduler.state
    composer = context.scheduler.composer
    if context.plan is None or not len(state.queue) or composer.last_draft.left > 0:
        return None
    if any(d.kind in (DecisionKind.PIN, DecisionKind.UNPIN) for d in context.decisions):
        return (
            None  # pins are settled behind admission: the blocks that a request lacked may be free since then
        )
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
    on other waiting requests, they change when a request fails on the way in, and when a tenant is charged with a
    context that went past a request of its own, behind which nothing else is admitted."""
    state = context.scheduler.state
    if state.policy.relative and any(d.kind is DecisionKind.FAIL for d in context.decisions):
        return None
    if state.policy.relative and context.scheduler.composer.last_draft.only_modules:
        charged = [state.requests.get(d.request) for d in context.decisions if d.kind is DecisionKind.ADMIT]
        if any(each is not None and each.is_module and each.id < OWN_REQUESTS for each in charged):
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
    names = {name_of(module) for module in request.modules}
    if not names.isdisjoint(state.modules.computing) or not names.isdisjoint(state.modules.orders):
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


ROUNDING = 1e-6  # tokens


class Backlog:
    """The counters of the tenants that waited at the last context, as long as the same policy is in use."""

    def __init__(self) -> None:
        self._policy: object = None
        self._counters: dict[int, float] = {}

    def before(self, scheduler: Scheduler) -> dict[int, float]:
        return self._counters if self._policy is scheduler.state.policy else {}

    def note(self, scheduler: Scheduler) -> None:
        self._policy = policy = scheduler.state.policy
        if isinstance(policy, FairShare):
            state = scheduler.state
            # One that is back since this plan has its counter lifted with those that come before the next.
            settled = [tenant for tenant in state.queue.tenants if not state.accounting.is_unsettled(tenant)]
            self._counters = {tenant: policy.counter(tenant) for tenant in settled}


@invariant("F5", moment=PLANNED, modes=CONTINUOUS_ONLY)
def the_tenant_served_least_is_admitted_first(context: CheckContext) -> str | None:
    """No tenant that waits for room had a lower counter than the tenant of a request that was admitted."""
    state, policy = context.scheduler.state, context.scheduler.state.policy
    if not isinstance(policy, FairShare) or not context.decisions or not len(state.queue):
        return None
    highest, last = -np.inf, None
    charged: dict[int, float] = {}  # by admissions after the one looked at
    for decision in reversed(context.decisions):
        request = state.requests.get(decision.request)
        if request is None:
            if decision.kind is DecisionKind.ADMIT:
                return None  # it failed on its way in: whose counter had its prompt is not known any more
            continue
        tenant = state.tenant_index(request.tenant)
        if decision.kind is DecisionKind.ADMIT and request.id < OWN_REQUESTS:
            charged[tenant] = charged.get(tenant, 0.0) + request.num_prompt / policy.weight(tenant)
        elif decision.kind not in _ADMITTED:
            continue
        counter = policy.counter(tenant) - charged.get(tenant, 0.0)
        if counter > highest:
            highest, last = counter, request
    view, composer = state.queue.view(state.now_s), context.scheduler.composer
    for index in np.flatnonzero(policy.order(view) < highest - ROUNDING).tolist():
        waiting = state.queue.get(index)
        assert last is not None
        if waiting.id in composer.last_draft.passed or could_wait_for_prefix(context, waiting):
            continue
        if composer.admission.judge(waiting).rule not in (*PASSABLE, None):
            return f"request {last.id} was admitted past {waiting.id}, whose tenant was served less"
    return None


@invariant("F6", moment=PLANNED)
def no_tenant_saves_up_service(context: CheckContext) -> str | None:
    """A tenant that comes to wait has a counter not below all that waited before it."""
    state, policy = context.scheduler.state, context.scheduler.state.policy
    if not isinstance(policy, FairShare) or not context.backlog:
        return None
    least = min(context.backlog.values())
    for tenant in state.queue.tenants:
        is_new = tenant not in context.backlog and not state.accounting.is_unsettled(tenant)
        if is_new and policy.counter(tenant) < least - ROUNDING:
            return f"tenant {tenant} came with {policy.counter(tenant)} tokens, those that waited had {least}"
    return None


# Invariants of requests that take the place of others, and of those that are paused.


class Displaced:
    """How far those were that gave their places, by what the decisions say."""

    def __init__(self) -> None:
        self.marks: dict[RequestId, int] = {}

    def note(self, scheduler: Scheduler, decisions: Sequence[Decision]) -> None:
        for decision in place_takings(decisions):
            mark = self.marks.get(decision.request, -1)
            self.marks[decision.request] = max(mark, decision.value)
        live = scheduler.state.requests
        if len(self.marks) > 4 * len(live) + 64:
            self.marks = {key: mark for key, mark in self.marks.items() if key in live}


def place_takings(decisions: Sequence[Decision]) -> list[Decision]:
    return [d for d in decisions if d.kind is DecisionKind.PREEMPT and d.reason.startswith("place:")]


@invariant("P1", moment=PLANNED, modes=CONTINUOUS_ONLY)
def a_displacing_request_goes_before(context: CheckContext) -> str | None:
    """No request gives its place to a request that comes after it, or under priority to one of no higher class."""
    state, policy = context.scheduler.state, context.scheduler.state.policy
    for decision in place_takings(context.decisions):
        victim, other = state.requests.get(decision.request), state.requests.get(decision.against)
        if victim is None or other is None:
            continue  # it failed on its way off or onto a row
        if isinstance(policy, PriorityWithAgeing) and other.priority >= victim.priority:
            return f"request {victim.id} gave its place to {other.id}, whose class is no higher"
        if isinstance(policy, FairShare):  # scores say what tenants were served, not which request came first
            if victim.tenant == other.tenant:
                return f"request {victim.id} gave its place to {other.id} of the same tenant"
        elif not goes_first(context, other, victim, as_waited=True):
            return f"request {victim.id} gave its place to {other.id}, which comes after it"
    return None


@invariant("P2", moment=PLANNED, modes=CONTINUOUS_ONLY)
def progress_is_not_lost_twice(context: CheckContext) -> str | None:
    """A displaced request is displaced again only beyond where it was, and not once it is protected."""
    most = context.scheduler.state.config.max_preemptions
    seen: set[RequestId] = set()
    for decision in place_takings(context.decisions):
        if decision.request in seen:
            return f"request {decision.request} gave its place twice in one plan"
        seen.add(decision.request)
        mark = context.displaced.get(decision.request, -1)
        if decision.value <= mark:
            return (
                f"request {decision.request} gave its place at {decision.value} tokens, and at {mark} before"
            )
        victim = context.scheduler.state.requests.get(decision.request)
        if victim is not None and victim.preemptions > most > 0:
            return f"request {victim.id} was preempted {victim.preemptions} times, {most} are allowed"
    return None


@invariant("P3", moment=CHANGES)
def paused_requests_hold_nothing(context: CheckContext) -> str | None:
    """A paused or held request has no row and does not wait for one; a held one has nothing on the host either."""
    state = context.scheduler.state
    for request in state.requests.values():
        is_held = request.state is RequestState.HELD
        if (request.held is not None) != is_held:
            return f"request {request.id} is {request.state.value}, and its hold is {request.held}"
        if request.state is not RequestState.PAUSED and not is_held:
            continue
        if request.row != NO_ROW or request.id in state.queue or (is_held and request.host_places):
            return f"request {request.id} is {request.state.value} and {'runs' if request.row != NO_ROW else 'waits'}"
    return None


# Invariants of what requests are charged for.


@invariant("B1")
def time_is_counted_for_the_blocks_rows_hold(context: CheckContext) -> str | None:
    kv, live = context.scheduler.state.kv, context.live
    held = np.zeros(len(live), np.int64)
    for group in kv.groups:
        held += group.held[live] - group.first[live] - group.dropped[live]
    counted = kv.block_time.held[live]
    wrong = (held != counted).nonzero()[0]
    if not len(wrong):
        return None
    at = int(wrong[0])
    return f"row {live[at]} holds {held[at]} blocks, and time is counted for {counted[at]}"


# The invariant of the dial: plans keep to where it stands.


@invariant("D1", moment=PLANNED, modes=CONTINUOUS_ONLY)
def plans_keep_the_limits_of_the_dial(context: CheckContext) -> str | None:
    """No request joins beyond its rows, and no step with prompts has more tokens than it allows beside the rows."""
    state, plan = context.scheduler.state, context.plan
    limits = state.dial.limits
    if limits is None or plan is None:
        return None
    if len(plan.joins.row) and state.rows.num_live > limits.rows:
        return f"{state.rows.num_live} rows are taken and a request joins; the dial allows {limits.rows}"
    work = plan.work
    if limits.target_s is not None or not work.prefill_tokens:
        return None  # S14 judges budgets that follow from durations
    allowed = max(limits.tokens, work.decode_rows + state.dial.fewest)
    if work.decode_rows + work.prefill_tokens > allowed:
        return f"a step has {work.decode_rows + work.prefill_tokens} tokens; the dial allows {allowed}"
    return None
