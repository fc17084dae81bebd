"""A live request is changed or aborted: the free count comes back, no neighbour notices, a replay has it all."""

from __future__ import annotations

import math

import pytest

from paceline.config.engine import PreemptionCosts
from paceline.core.events import DecisionKind, Rule
from paceline.core.request import BlockReason, Change, ChangeOutcome, FinishReason, RequestId, RequestState
from paceline.engine.changes import apply_change, resume_all
from tests.guides import VOCAB
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

PAUSE, GO_ON = Change(paused=True), Change(paused=False)


def change(bench: Bench, number: RequestId, wanted: Change) -> ChangeOutcome:
    return apply_change(bench.engine, number, wanted)


@pytest.mark.slow
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


def test_a_request_that_waits_for_something_outside_cannot_be_paused() -> None:
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


def test_a_priority_changes_the_order_of_waiting_requests() -> None:
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy="priority"))
    running, first, second = (bench.add(prompt(5, start), 6) for start in range(3))
    bench.step()
    change(bench, second, Change(priority=-1))
    bench.run()
    ended = sorted(bench.finished.values(), key=lambda ending: ending.time_s)
    assert [ending.request for ending in ended].index(second) < [e.request for e in ended].index(first)
    assert running in bench.finished


def test_spot_work_is_preempted_first_whatever_the_policy() -> None:
    bench = Bench(engine_config(num_blocks=9, max_preemptions=0))
    classes = ("standard", "spot", "standard")
    ids = [bench.add(prompt(6, start), 16, service_class=name) for start, name in enumerate(classes)]
    while not bench.reasons(DecisionKind.PREEMPT):
        bench.step()
    victims = [d.request for d in bench.watch.decisions if d.kind is DecisionKind.PREEMPT]
    assert victims[0] == ids[1]
    bench.run()


# ----------------------------------------------------------------
# Aborts at every point of a life: the free count comes back, twice is once, and no neighbour notices (S19,
# S20).


POINTS = (
    "queued",
    "admitted on a prefix hit",
    "mid-chunk",
    "decode",
    "final step",
    "preempted",
    "swapped",
    "swapping in",
    "paused",
    "blocked",
    "deferred",
    "parent",
    "branch",
)


def bring_to(bench: Bench, point: str) -> RequestId:
    """A request at the given point of its life; everything it shares was computed before the baseline."""
    if point == "queued":
        return bench.add(prompt(20, 1), 8)
    if point == "admitted on a prefix hit":
        request = bench.add(prompt(24) + prompt(3, 1), 8)
        bench.step()
        assert bench.request(request).num_cached == 24
        return request
    if point == "deferred":
        bench.add(prompt(30, 1), 8)
        bench.step()
        request = bench.add(prompt(30, 1), 8)
        bench.step()
        assert bench.states()[request] is RequestState.WAITING
        return request
    request = bench.add(prompt(30, 1), 8)
    if point == "blocked":
        bench.scheduler.block(request, BlockReason.GRAMMAR, None)
        return request
    bench.step({"mid-chunk": 2, "final step": 9 + bench.config.depth}.get(point, 6))
    if point == "preempted":
        bench.scheduler.preempt(request)
    elif point in ("swapped", "swapping in"):
        bench.scheduler.preempt(request, swap=True)
        bench.step(2 if point == "swapping in" else 0)
    elif point == "paused":
        bench.scheduler.pause(request)
    elif point in ("parent", "branch"):
        (branch,) = bench.fork(request)
        bench.step(2)
        return branch if point == "branch" else request
    return request


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_an_abort_at_any_point_gives_everything_back(point: str, depth: int) -> None:
    config = engine_config(depth=depth, max_num_batched_tokens=12, num_host_blocks=24, max_num_seqs=6)
    bench = Bench(config, overlapped=depth > 0)
    bench.add(prompt(24), 1)
    neighbour = bench.add(prompt(5, 7), 60, seed=1)
    bench.step(6)
    request = bring_to(bench, point)
    assert request in bench.state.requests
    assert bench.engine.abort(request)
    assert not bench.engine.abort(request), "twice is once"
    assert not bench.engine.abort(RequestId(10_000)), "no request has this id"
    bench.flush()
    ending = bench.finished[request]
    assert (ending.reason, ending.detail) == (FinishReason.ABORT, "abort")
    assert ending.num_output == len(bench.tokens[request])
    bench.run()
    assert len(bench.tokens[neighbour]) == 60


@pytest.mark.parametrize("step", range(14))
def test_an_abort_between_plan_and_result_beats_the_result(step: int) -> None:
    """S20: nothing is delivered after the terminal event, whatever is still under way."""
    bench = Bench(engine_config(depth=2, max_num_batched_tokens=12), overlapped=True)
    request = bench.add(prompt(30), 6, stop_token_ids=(VOCAB // 8,))
    bench.step(step)
    if request in bench.state.requests:
        bench.engine.abort(request)
        bench.flush()
        told = len(bench.tokens[request])
        bench.run()
        assert len(bench.tokens[request]) == told
    bench.run()


def test_an_abort_of_all_requests_frees_everything_without_a_step() -> None:
    """S24: the counts are right at once, with no step to put them right."""
    bench = Bench(engine_config(num_host_blocks=16))
    ids = [bench.add(prompt(6, start), 20) for start in range(12)]
    bench.step(3)
    for request in ids:
        bench.engine.abort(request)
    bench.flush()
    bench.check_empty()


def test_branches_are_aborted_one_by_one() -> None:
    """B10: an abort of one of n takes the others with it only if it is told so."""
    bench = Bench()
    ids = bench.add_all(prompt(9), 12, n=4, seed=3)
    bench.step(4)
    for request in ids[:3]:
        bench.engine.abort(request)
        bench.flush()
        bench.step()
    bench.run()
    reasons = [bench.finished[request].reason for request in ids]
    assert reasons == [FinishReason.ABORT] * 3 + [FinishReason.LENGTH]


@pytest.mark.parametrize("depth", [0, 2])
def test_an_abort_never_changes_a_neighbours_output(depth: int) -> None:
    """B2: the reference is compared at the end; here the neighbours share prefix and rows with the aborted."""
    bench = Bench(engine_config(depth=depth, num_blocks=24), overlapped=depth > 0)
    alive = []
    for start in range(15):
        ids = bench.add_all(prompt(9) + prompt(start % 4, start), 9, n=2, seed=start)
        bench.step()
        doomed = ids[start % 2]
        bench.engine.abort(doomed)
        bench.flush()
        alive.append(ids[1 - start % 2])
    bench.run()
    assert all(bench.finished[request].reason is FinishReason.LENGTH for request in alive)
