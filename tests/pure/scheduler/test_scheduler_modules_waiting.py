"""Requests that wait for texts others compute: whose client may leave, and who cost a steady step nothing."""

from __future__ import annotations

import pytest

from paceline.core.events import DecisionKind, Rule
from paceline.core.request import OWN_REQUESTS, RequestId, RequestState
from paceline.kv.pins import Sources
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step.admission import Admission
from tests.pure.engine.engine_helpers import Bench, prompt
from tests.pure.scheduler.test_scheduler_modules import OTHER, TEXT, admitted, around, bench


def gone(one: Bench, request: RequestId) -> None:
    """Its client leaves."""
    one.cut.add(request)
    one.engine.abort(request)


def steps_until(one: Bench, request: RequestId) -> int:
    """Steps until a request has a row."""
    for count in range(1, 200):
        one.step()
        if one.request(request).state is not RequestState.WAITING:
            return count
    raise AssertionError("it is never admitted")


def test_a_module_whose_client_leaves_is_no_evicted_one() -> None:
    """What a client computes ends with its client: the next that waits for it has it computed at once, and those
    behind that one are admitted meanwhile."""
    one = bench(max_num_batched_tokens=8)
    client = one.add(TEXT, 1, is_module=True)
    one.step()
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=parts)
    one.step()
    gone(one, client)
    behind = one.add(prompt(3, start=200), 1)
    seen = one.step()
    assert seen is not None
    assert OWN_REQUESTS in seen.spans, "not a step later"
    one.run()
    assert one.reasons(DecisionKind.DEFER, request) == [Rule.MODULE]
    assert admitted(one).index(behind) < admitted(one).index(request)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_what_a_client_has_asked_for_is_asked_for_by_the_next(num_steps: int) -> None:
    """A step after it came its module is ordered, two steps after it is being computed."""
    one = bench(max_num_batched_tokens=8)
    one.add(prompt(30, start=300), 1)
    tokens, parts = around(TEXT)
    first = one.add(tokens, modules=parts)
    turned, places = around(TEXT, OTHER)
    second = one.add(turned, modules=places)
    one.step(num_steps)
    gone(one, first)
    one.add(prompt(3, start=200), 1)
    one.run()
    assert Rule.MODULE_EVICTED not in one.reasons(DecisionKind.DEFER, second)


def test_a_module_that_nobody_waits_for_takes_no_more_of_the_machine() -> None:
    one = bench(max_num_batched_tokens=8, max_num_seqs=1)
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=parts)
    one.step(2)
    assert one.state.requests.keys() == {request, OWN_REQUESTS}
    gone(one, request)
    other = one.add(prompt(6, start=200), 4)
    assert steps_until(one, other) == 1
    one.run()


def test_the_module_of_an_urgent_request_is_as_urgent_as_it_is() -> None:
    one = bench(scheduling_policy="deadline", max_num_seqs=1)
    one.add(prompt(8, start=100), 4)
    one.step()
    tokens, parts = around(TEXT)
    urgent = one.add(tokens, modules=parts, deadline_s=5.0)
    others = [one.add(prompt(9, start=200 + 20 * number), 4, deadline_s=9.0) for number in range(3)]
    one.run()
    order = admitted(one)
    assert order.index(OWN_REQUESTS) < order.index(urgent) < min(map(order.index, others))


def test_the_module_of_an_urgent_request_survives_it() -> None:
    """It ends with the deadline of the one it is computed for; the next that waits for it has it computed again."""
    one = bench(scheduling_policy="deadline", max_num_batched_tokens=8)
    tokens, parts = around(TEXT)
    urgent = one.add(tokens, modules=parts, deadline_s=0.003)
    patient = one.add(tokens, modules=parts)
    one.cut.add(urgent)
    one.run()
    assert one.reasons(DecisionKind.DEFER, patient) == [Rule.MODULE]


def test_those_that_wait_for_a_module_cost_a_steady_step_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are and however long their texts: none is looked at until the module is there."""
    one = bench(num_blocks=300, max_num_batched_tokens=8, max_model_len=256)
    tokens, parts = around(prompt(120, start=500))
    for _ in range(50):
        one.add(tokens, 1, modules=parts)
    one.step(3)
    calls: list[str] = []
    for owner, name in ((Sources, "find"), (Admission, "judge"), (SchedulerState, "waiting_in_order")):
        original = getattr(owner, name)

        def counted(*given: object, _original=original, _name=name, **named: object) -> object:  # type: ignore[no-untyped-def]
            calls.append(_name)
            return _original(*given, **named)

        monkeypatch.setattr(owner, name, counted)
    one.watch.check = False
    one.engine.step()
    one.watch.check = True
    assert one.state.modules.computing and len(one.state.queue) == 50
    assert len(calls) <= 4, calls
    one.run()
