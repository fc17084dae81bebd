"""Invariants of shares between tenants, where the policy keeps accounts of them."""

from __future__ import annotations

import numpy as np

from paceline.core.events import DecisionKind
from paceline.scheduler.admission import PASSABLE
from paceline.scheduler.invariants.progress import could_wait_for_prefix
from paceline.scheduler.invariants.registry import CONTINUOUS_ONLY, PLANNED, Look, invariant
from paceline.scheduler.policy.fair import FairShare
from paceline.scheduler.scheduler import Scheduler

ROUNDING = 1e-6  # tokens


class Backlog:
    """The counters of the tenants that waited at the last look, as long as the same policy is in use."""

    def __init__(self) -> None:
        self._policy: object = None
        self._counters: dict[int, float] = {}

    def before(self, scheduler: Scheduler) -> dict[int, float]:
        return self._counters if self._policy is scheduler.state.policy else {}

    def note(self, scheduler: Scheduler) -> None:
        self._policy = policy = scheduler.state.policy
        if isinstance(policy, FairShare):
            self._counters = {tenant: policy.counter(tenant) for tenant in scheduler.state.queue.tenants}


@invariant("F5", moment=PLANNED, modes=CONTINUOUS_ONLY)
def who_was_served_least_is_admitted_first(look: Look) -> str | None:
    """Nobody who waits for room had a lower counter than the tenant of a request that was admitted."""
    state, policy = look.scheduler.state, look.scheduler.state.policy
    if not isinstance(policy, FairShare) or not look.decisions or not len(state.queue):
        return None
    highest, last = -np.inf, None
    charged: dict[int, float] = {}  # by admissions after the one looked at
    for decision in reversed(look.decisions):
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
    view = state.queue.view(state.now_s)
    for index in np.flatnonzero(policy.order(view) < highest - ROUNDING).tolist():
        waiting = state.queue.get(index)
        assert last is not None
        if waiting.id in look.scheduler.composer.passed or could_wait_for_prefix(look, waiting):
            continue
        if look.scheduler.composer.admission.refusal(waiting) not in (*PASSABLE, None):
            return f"request {last.id} was admitted past {waiting.id}, whose tenant was served less"
    return None


@invariant("F6", moment=PLANNED)
def nobody_saves_up_service(look: Look) -> str | None:
    """Who comes to wait is not behind all who waited before it."""
    state, policy = look.scheduler.state, look.scheduler.state.policy
    if not isinstance(policy, FairShare) or not look.backlog:
        return None
    least = min(look.backlog.values())
    for tenant in state.queue.tenants:
        is_new = tenant not in look.backlog and not state.service.is_unsettled(tenant)
        if is_new and policy.counter(tenant) < least - ROUNDING:
            return f"tenant {tenant} came with {policy.counter(tenant)} tokens, those who waited had {least}"
    return None
