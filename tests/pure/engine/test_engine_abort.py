"""Aborts at every point of a life: the free count comes back, twice is once, and no neighbour notices (S19, S20)."""

import pytest

from paceline.core.request import BlockReason, FinishReason, RequestId, RequestState
from tests.fakes import VOCAB
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

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
    assert not bench.engine.abort(RequestId(10_000)), "nobody has this id"
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


def test_an_abort_of_everybody_frees_everything_without_a_step() -> None:
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
