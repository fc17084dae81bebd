"""Invariants of shares between tenants, displacement and pauses, charges, and the dial."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.events import Decision, DecisionKind
from paceline.core.request import NO_ROW, RequestId, RequestState
from paceline.scheduler.invariants.progress import could_wait_for_prefix, goes_first
from paceline.scheduler.invariants.registry import CHANGES, CONTINUOUS_ONLY, PLANNED, CheckContext, invariant
from paceline.scheduler.policy.fair import FairShare
from paceline.scheduler.policy.priority import PriorityWithAgeing
from paceline.scheduler.scheduler import Scheduler
from paceline.scheduler.step.admission import PASSABLE

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
        if decision.kind is DecisionKind.ADMIT:
            charged[tenant] = charged.get(tenant, 0.0) + request.num_prompt / policy.weight(tenant)
        elif decision.kind is not DecisionKind.RESUME:
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
