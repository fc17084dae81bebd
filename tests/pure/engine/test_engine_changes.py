"""Changing a live request: priority, deadline, pause; and that a replay has it all."""

from __future__ import annotations

import math

import pytest

from paceline.config.engine import PreemptionCosts
from paceline.core.events import DecisionKind, Rule
from paceline.core.request import BlockReason, Change, ChangeOutcome, RequestId, RequestState
from paceline.engine.engine import apply_change, resume_all
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

PAUSE, GO_ON = Change(paused=True), Change(paused=False)


def change(bench: Bench, number: RequestId, wanted: Change) -> ChangeOutcome:
    return apply_change(bench.scheduler, number, wanted)


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", ["auto", "recompute", "swap"])
def test_a_pause_at_any_step_changes_no_output(kind: str, depth: int, steps: int) -> None:
    costs = PreemptionCosts(token_s=1e-4, block_s=1e-5, step_s=1e-3)
    config = engine_config(
        depth, num_host_blocks=16, preemption=kind, preemption_costs=costs, max_num_batched_tokens=8
    )
    bench = Bench(config, overlapped=depth > 0)
    first, other = bench.add(prompt(21, 1), 12), bench.add(prompt(9, 2), 12)
    bench.step(steps)
    assert change(bench, first, PAUSE) is ChangeOutcome.CHANGED
    assert bench.states()[first] is RequestState.PAUSED and bench.request(first).row < 0
    while other in bench.states():
        bench.step()
    bench.step(depth + 2)
    assert bench.states() == {first: RequestState.PAUSED}
    held = [group.pool.usable - group.pool.num_free for group in bench.state.kv.groups]
    assert held == [0]
    assert change(bench, first, GO_ON) is ChangeOutcome.CHANGED
    bench.run()  # compares every output with the reference


def test_a_pause_takes_the_cheaper_way() -> None:
    for block_s, rule in ((1e-7, Rule.PAUSED_SWAP), (1.0, Rule.PAUSED_RECOMPUTE)):
        costs = PreemptionCosts(token_s=1e-4, block_s=block_s)
        bench = Bench(engine_config(num_host_blocks=16, preemption_costs=costs))
        number = bench.add(prompt(20), 8)
        bench.step(4)
        change(bench, number, PAUSE)
        reasons = [(d.kind, d.reason) for d in bench.state.decisions]
        assert reasons == [(DecisionKind.PREEMPT, rule), (DecisionKind.CHANGE, Rule.PAUSED)]
        decision = bench.state.decisions[0]
        assert "recompute" in decision.detail and "swap" in decision.detail and decision.seconds > 0
        resume_all(bench.scheduler)
        bench.run()


def test_a_request_can_be_paused_while_it_comes_back_from_the_host() -> None:
    bench = Bench(engine_config(1, num_host_blocks=16), overlapped=True)
    number = bench.add(prompt(20), 8)
    bench.step(4)
    bench.scheduler.preempt(number, swap=True)
    while bench.states()[number] is not RequestState.BLOCKED:
        bench.step()
    assert change(bench, number, PAUSE) is ChangeOutcome.CHANGED
    bench.step(3)
    assert bench.states()[number] is RequestState.PAUSED
    change(bench, number, GO_ON)
    bench.run()


def test_to_pause_twice_is_to_pause_once() -> None:
    bench = Bench()
    number = bench.add(prompt(5), 4)
    assert change(bench, number, GO_ON) is ChangeOutcome.CHANGED
    assert [change(bench, number, PAUSE) for _ in range(2)] == [ChangeOutcome.CHANGED] * 2
    assert bench.reasons(DecisionKind.CHANGE) == [Rule.PAUSED]
    assert [change(bench, number, GO_ON) for _ in range(2)] == [ChangeOutcome.CHANGED] * 2
    bench.run()


def test_who_waits_for_something_outside_cannot_be_paused() -> None:
    bench = Bench()
    number = bench.add(prompt(5), 4)
    bench.scheduler.block(number, BlockReason.GRAMMAR, None)
    assert change(bench, number, Change(priority=3, paused=True)) is ChangeOutcome.BUSY
    assert bench.request(number).priority == 0  # all of it or nothing
    bench.scheduler.unblock(number)
    bench.run()
    assert change(bench, number, PAUSE) is ChangeOutcome.ENDED


def test_a_paused_request_can_be_aborted_and_ends_at_its_deadline() -> None:
    bench = Bench(engine_config(num_host_blocks=16))
    ids = [bench.add(prompt(9, start), 20) for start in range(3)]
    bench.step(3)
    for number in ids:
        change(bench, number, PAUSE)
    bench.engine.abort(ids[0])
    change(bench, ids[1], Change(until_s=bench.clock.now() + 0.5))
    change(bench, ids[2], Change(until_s=bench.clock.now() + 0.1))
    change(bench, ids[2], Change(until_s=math.inf))
    bench.clock.advance(1.0)
    bench.step()
    assert bench.states() == {ids[2]: RequestState.PAUSED}
    assert bench.finished[ids[1]].detail == "deadline"
    change(bench, ids[2], GO_ON)
    bench.run()


def test_a_priority_changes_the_order_of_who_waits() -> None:
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy="priority"))
    running, first, second = (bench.add(prompt(5, start), 6) for start in range(3))
    bench.step()
    change(bench, second, Change(priority=-1))
    bench.run()
    ended = sorted(bench.finished.values(), key=lambda ending: ending.time_s)
    assert [ending.request for ending in ended].index(second) < [e.request for e in ended].index(first)
    assert running in bench.finished


def test_spot_work_gives_way_first_whatever_the_policy() -> None:
    bench = Bench(engine_config(num_blocks=9, max_preemptions=0))
    classes = ("standard", "spot", "standard")
    ids = [bench.add(prompt(6, start), 16, service_class=name) for start, name in enumerate(classes)]
    while not bench.reasons(DecisionKind.PREEMPT):
        bench.step()
    victims = [d.request for d in bench.watch.decisions if d.kind is DecisionKind.PREEMPT]
    assert victims[0] == ids[1]
    bench.run()
