"""Ways to break what holds of requests that take the places of others, and of paused ones."""

from __future__ import annotations

from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import RequestId, RequestState
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.pure.scheduler.planned_states import PlannedState, breaks, shared_out


@breaks("a_displacing_request_goes_before")
def a_request_is_displaced_by_one_after_it(planned: PlannedState) -> None:
    planned.decisions.append(place_taken(1, by=3))


def classes() -> PlannedState:
    """Request 1 has priority 1, request 2 priority 0."""
    bench = Bench(engine_config(scheduling_policy="priority", ageing_s=1e6))
    for priority in (1, 0):
        bench.add(prompt(9, priority), 20, priority=priority)
    bench.step(2)
    return PlannedState(bench, bench.scheduler.schedule())


@breaks("a_displacing_request_goes_before", classes)
def a_request_is_displaced_by_a_lower_class(planned: PlannedState) -> None:
    planned.decisions.append(place_taken(2, by=1))


@breaks("a_displacing_request_goes_before", shared_out)
def a_request_is_displaced_by_its_own_tenant(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).tenant = "other"
    planned.decisions.append(place_taken(1, by=2))


@breaks("progress_is_not_lost_twice")
def a_request_is_displaced_before_it_is_where_it_was(planned: PlannedState) -> None:
    planned.displaced = {RequestId(3): 12}
    planned.decisions.append(place_taken(3, by=1, value=12))


@breaks("progress_is_not_lost_twice")
def a_request_is_displaced_twice_at_once(planned: PlannedState) -> None:
    planned.decisions += [place_taken(3, by=1, value=12), place_taken(3, by=2, value=13)]


@breaks("progress_is_not_lost_twice")
def a_protected_request_is_displaced(planned: PlannedState) -> None:
    planned.bench.request(RequestId(3)).preemptions = 5
    planned.decisions.append(place_taken(3, by=1, value=12))


def place_taken(number: int, *, by: int, value: int = 9) -> Decision:
    kind, rule = DecisionKind.PREEMPT, Rule.PLACE_RECOMPUTE
    return Decision(kind, RequestId(number), rule, value, against=RequestId(by))


@breaks("paused_requests_hold_nothing")
def a_request_is_paused_on_its_row(planned: PlannedState) -> None:
    planned.bench.request(RequestId(1)).state = RequestState.PAUSED
