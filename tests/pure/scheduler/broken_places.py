"""Ways to break what holds of requests that take the places of others, and of paused ones."""

from __future__ import annotations

from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import RequestId, RequestState
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.pure.scheduler.scenes import Scene, breaks, shared_out


@breaks("who_takes_a_place_goes_before")
def somebody_gives_its_place_to_who_comes_after_it(scene: Scene) -> None:
    scene.decisions.append(place_taken(1, by=3))


def classes() -> Scene:
    """Request 1 has priority 1, request 2 priority 0."""
    bench = Bench(engine_config(scheduling_policy="priority", ageing_s=1e6))
    for priority in (1, 0):
        bench.add(prompt(9, priority), 20, priority=priority)
    bench.step(2)
    return Scene(bench, bench.scheduler.schedule())


@breaks("who_takes_a_place_goes_before", classes)
def somebody_gives_its_place_to_a_lower_class(scene: Scene) -> None:
    scene.decisions.append(place_taken(2, by=1))


@breaks("who_takes_a_place_goes_before", shared_out)
def somebody_gives_its_place_to_its_own_tenant(scene: Scene) -> None:
    scene.bench.request(RequestId(1)).tenant = "other"
    scene.decisions.append(place_taken(1, by=2))


@breaks("progress_is_not_lost_twice")
def somebody_gives_its_place_before_it_is_where_it_was(scene: Scene) -> None:
    scene.displaced = {RequestId(3): 12}
    scene.decisions.append(place_taken(3, by=1, value=12))


@breaks("progress_is_not_lost_twice")
def somebody_gives_its_place_twice_at_once(scene: Scene) -> None:
    scene.decisions += [place_taken(3, by=1, value=12), place_taken(3, by=2, value=13)]


@breaks("progress_is_not_lost_twice")
def somebody_protected_gives_its_place(scene: Scene) -> None:
    scene.bench.request(RequestId(3)).preemptions = 5
    scene.decisions.append(place_taken(3, by=1, value=12))


def place_taken(number: int, *, by: int, value: int = 9) -> Decision:
    kind, rule = DecisionKind.PREEMPT, Rule.PLACE_RECOMPUTE
    return Decision(kind, RequestId(number), rule, value, against=RequestId(by))


@breaks("who_is_paused_holds_nothing")
def somebody_is_paused_on_its_row(scene: Scene) -> None:
    scene.bench.request(RequestId(1)).state = RequestState.PAUSED
