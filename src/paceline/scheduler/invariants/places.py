"""Invariants of requests that take the place of others, and of those that are paused."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.events import Decision, DecisionKind
from paceline.core.request import NO_ROW, RequestId, RequestState
from paceline.scheduler.invariants.progress import goes_first
from paceline.scheduler.invariants.registry import CHANGES, CONTINUOUS_ONLY, PLANNED, Look, invariant
from paceline.scheduler.policy.fair import FairShare
from paceline.scheduler.policy.priority import PriorityWithAgeing
from paceline.scheduler.scheduler import Scheduler


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
def who_takes_a_place_goes_before(look: Look) -> str | None:
    """Nobody gives its place to a request that comes after it, or under priority to one of no higher class."""
    state, policy = look.scheduler.state, look.scheduler.state.policy
    for decision in place_takings(look.decisions):
        victim, other = state.requests.get(decision.request), state.requests.get(decision.against)
        if victim is None or other is None:
            continue  # it failed on its way off or onto a row
        if isinstance(policy, PriorityWithAgeing) and other.priority >= victim.priority:
            return f"request {victim.id} gave its place to {other.id}, whose class is no higher"
        if isinstance(policy, FairShare):  # scores say what tenants were served, not who came first
            if victim.tenant == other.tenant:
                return f"request {victim.id} gave its place to {other.id} of the same tenant"
        elif not goes_first(look, other, victim, as_waited=True):
            return f"request {victim.id} gave its place to {other.id}, which comes after it"
    return None


@invariant("P2", moment=PLANNED, modes=CONTINUOUS_ONLY)
def progress_is_not_lost_twice(look: Look) -> str | None:
    """Who gave its place does so again only beyond where it was, and not once it is protected."""
    most = look.scheduler.state.config.max_preemptions
    seen: set[RequestId] = set()
    for decision in place_takings(look.decisions):
        if decision.request in seen:
            return f"request {decision.request} gave its place twice in one plan"
        seen.add(decision.request)
        mark = look.displaced.get(decision.request, -1)
        if decision.value <= mark:
            return (
                f"request {decision.request} gave its place at {decision.value} tokens, and at {mark} before"
            )
        victim = look.scheduler.state.requests.get(decision.request)
        if victim is not None and victim.preemptions > most > 0:
            return f"request {victim.id} gave way {victim.preemptions} times, {most} are allowed"
    return None


@invariant("P3", moment=CHANGES)
def who_is_paused_holds_nothing(look: Look) -> str | None:
    """A paused request has no row and does not wait for one."""
    state = look.scheduler.state
    for request in state.requests.values():
        if request.state is not RequestState.PAUSED:
            continue
        if request.row != NO_ROW or request.id in state.queue:
            return f"request {request.id} is paused and {'runs' if request.row != NO_ROW else 'waits'}"
    return None
