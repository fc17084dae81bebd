"""Trees: forks at earlier tokens, tokens put into running requests, ends that are held, scores and limits."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.events import DecisionKind, Rule
from paceline.core.request import FinishReason, RequestId, RequestState, TreeLimits
from paceline.errors import InvalidRequest, InvalidTransition, NeverFits, TreeFull, UnknownRequest
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.reference_output import reference_output


def bench_of(depth: int = 0, **options: object) -> Bench:
    return Bench(engine_config(depth=depth, **options), overlapped=depth > 0)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("append", [[], [7], [7, 8, 9, 10, 11]])
def test_a_fork_at_every_token_is_a_request_with_those_tokens(
    depth: int, steps: int, append: list[int]
) -> None:
    """`Bench` compares each output with that of a fresh request with the same tokens."""
    bench = bench_of(depth)
    parent = bench.add(prompt(6), 24, seed=3)
    bench.step(steps)
    done = len(bench.scheduler.tokens_of(parent)) - 6
    for at in range(done + 1):
        (child,) = bench.fork(parent, at=at, append=append)
        request = bench.request(child)
        assert request.num_prompt == 6 + at + len(append) and request.shares == 6 + at
        assert request.sampling.max_tokens == 24 - at - len(append)
    bench.run()


def test_forks_of_a_long_answer_compute_a_block_each() -> None:
    bench = bench_of(num_blocks=600, max_model_len=1200, max_num_batched_tokens=2048, max_num_seqs=16)
    parent = bench.add(prompt(8), 1100, seed=1)
    bench.step(1001)
    before = len(bench.seen)
    ids = bench.fork(parent, 8)
    bench.step(3)
    computed = dict.fromkeys(ids, 0)
    for seen in bench.seen[before:]:
        for number, count in seen.spans.items():
            computed[RequestId(number)] += count
    assert max(computed.values()) <= bench.config.kv.block_size
    for number in (parent, *ids):
        bench.engine.abort(number)
    bench.flush()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("steps", range(9))
def test_an_extended_request_is_a_request_with_those_tokens(depth: int, steps: int) -> None:
    bench = bench_of(depth)
    other = bench.add(prompt(9, 1), 20, seed=2)
    request = bench.add(prompt(6), 12, seed=3)
    bench.step(steps)
    had = len(bench.scheduler.tokens_of(request)) - 6
    bench.extend(request, [70, 71, 72])
    assert bench.tokens[request][had:] == [70, 71, 72], "they are part of the output"
    assert bench.request(request).max_total == 6 + 12 + 3
    bench.run()
    ending = bench.finished[request]
    assert (ending.num_output, ending.cost.injected, ending.preemptions) == (15, 3, 0)
    assert len(bench.tokens[request]) == 15 and len(bench.tokens[other]) == 20
    assert bench.reasons(DecisionKind.EXTEND, request) == [Rule.INJECTED]


@pytest.mark.parametrize("state", ["waiting", "paused", "swapped", "preempted"])
def test_whatever_it_is_doing(state: str) -> None:
    bench = bench_of(num_host_blocks=16, max_num_seqs=1)
    request = bench.add(prompt(9), 12, seed=3)
    bench.step(3)
    other = bench.add(prompt(9, 1), 4)
    if state == "waiting":
        request = other
    elif state == "paused":
        bench.scheduler.pause(request)
    else:
        bench.scheduler.preempt(request, swap=state == "swapped")
    bench.extend(request, [70, 71, 72])
    if state == "paused":
        assert bench.states()[request] is RequestState.PAUSED
        bench.step(3)
        bench.scheduler.resume(request)
    bench.run()
    assert bench.finished[request].cost.injected == 3


def test_what_an_extension_may_generate() -> None:
    bench = bench_of()
    request = bench.add(prompt(6), 4, seed=3, on_stop="hold")
    with pytest.raises(InvalidRequest, match="nothing"):
        bench.engine.extend(request, [])
    bench.step(6)
    assert bench.held[request].reason is FinishReason.LENGTH
    with pytest.raises(InvalidTransition, match="max_tokens"):
        bench.engine.extend(request, [1])
    with pytest.raises(NeverFits, match="128"):
        bench.engine.extend(request, [1], max_tokens=200)
    with pytest.raises(UnknownRequest):
        bench.engine.extend(RequestId(99), [1])
    bench.extend(request, [1], max_tokens=2)
    bench.step(6)
    assert bench.held[request].num_output == 7
    bench.extend(request, [], max_tokens=3)  # it goes on as it is
    bench.step(6)
    assert bench.held[request].num_output == 10
    bench.engine.abort(request)
    bench.flush()
    bench.run()


def test_a_held_branch_owns_nothing_and_is_let_go_in_time() -> None:
    bench = bench_of()
    request = bench.add(prompt(10), 4, on_stop="hold", hold_s=0.5)
    bench.step(6)
    pool = bench.state.kv.groups[0].pool
    assert bench.states()[request] is RequestState.HELD and pool.num_free == pool.usable
    assert bench.state.rows.num_live == 0
    with pytest.raises(InvalidTransition):
        bench.scheduler.pause(request)
    with pytest.raises(InvalidTransition):
        bench.scheduler.resume(request)
    assert bench.scheduler.next_wakeup_s() == bench.held[request].until_s
    bench.clock.advance_to(bench.held[request].until_s)
    bench.run()
    ending = bench.finished[request]
    assert (ending.reason, ending.detail, ending.num_output) == (FinishReason.LENGTH, "hold_over", 4)
    assert bench.reasons(DecisionKind.HOLD, request) == [Rule.LENGTH]
    assert bench.reasons(DecisionKind.FINISH, request) == [Rule.HOLD_OVER]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_found_outside_holds_too_and_what_came_behind_it_is_gone(depth: int) -> None:
    bench = bench_of(depth)
    request = bench.add(prompt(6), 30, seed=3, on_stop="hold")
    bench.step(12)
    child = bench.fork(request)[0]
    shared = bench.request(child).shares
    assert shared > 10
    bench.finish_at(request, 4)
    assert bench.held[request].num_output == 4 and len(bench.scheduler.tokens_of(request)) == 10
    assert bench.request(child).shares == 10, "what lies behind is no longer its parent's"
    bench.extend(request, [70, 71])
    bench.cut.discard(request)
    (again,) = bench.fork(request, at=2, changes={"seed": 9})
    assert bench.request(again).sampling.seed == 9
    bench.run()


def test_a_held_branch_can_be_forked() -> None:
    bench = bench_of()
    parent = bench.add(prompt(8), 8, seed=4, on_stop="hold")
    bench.step(10)
    assert parent in bench.held
    with pytest.raises(InvalidTransition, match="max_tokens"):
        bench.engine.fork(parent, 1)
    children = bench.fork(parent, 2, append=[5], changes={"max_tokens": 3, "on_stop": "end"})
    bench.step(8)
    assert all(bench.finished[child].num_cached >= 12 for child in children), "its blocks are in the cache"
    assert bench.engine.prune(parent)
    bench.run()


def test_seeds_of_branches() -> None:
    bench = bench_of()
    parent = bench.add(prompt(6), 10, seed=5)
    bench.step(3)
    seeds = [bench.request(child).sampling.seed for child in bench.fork(parent, 2)]
    seeds += [bench.request(child).sampling.seed for child in bench.fork(parent, 2, changes={"seed": 11})]
    assert len(set(seeds)) == 4 and seeds[2] == 11, "one seed for several branches is the first one's"
    bench.run()


@pytest.mark.parametrize(
    ("options", "param"),
    [({"at": 9}, "at"), ({"at": -1}, "at"), ({"changes": {"temperature": 9.0}}, "temperature")],
)
def test_a_fork_that_cannot_be(options: dict[str, Any], param: str) -> None:
    bench = bench_of()
    parent = bench.add(prompt(6), 10)
    bench.step(3)
    with pytest.raises(InvalidRequest) as caught:
        bench.fork(parent, **options)
    assert caught.value.param == param
    assert bench.states().keys() == {parent} and bench.request(parent).branches == 0
    bench.run()


# -- trees ---------------------------------------------------------------------------------------------------


def test_the_best_branches_go_first() -> None:
    bench = bench_of(max_num_seqs=2)
    root = bench.add(prompt(6), 30, seed=1)
    bench.step(2)
    low, middle, high = (bench.fork(root, score=score)[0] for score in (-1.0, 0.5, 2.0))
    bench.engine.abort(root)
    bench.flush()
    bench.step()
    running = {number for number, state in bench.states().items() if state is RequestState.RUNNING}
    assert running == {middle, high}
    bench.engine.set_score(low, 5.0)
    bench.scheduler.preempt(high)
    bench.step()
    assert bench.states()[low] is RequestState.RUNNING and bench.states()[high] is RequestState.WAITING
    bench.run()


def test_scores_take_no_place_of_others() -> None:
    bench = bench_of(max_num_seqs=1)
    first = bench.add(prompt(6, 1), 20)
    bench.step(2)
    (branch,) = bench.fork(first)
    other = bench.add(prompt(6, 2), 20)
    (late,) = bench.fork(first, score=9.0)
    orders = bench.state.orders
    assert orders[late] < orders[first] < orders[branch], "three places, dealt out by score"
    assert sorted(orders[number] for number in (first, branch, late)) == [0, 1, 3] and orders[other] == 2
    bench.run()


def test_the_lowest_score_is_preempted_first() -> None:
    bench = bench_of(num_blocks=18, max_num_seqs=4, max_preemptions=0)
    root = bench.add(prompt(6), 40, seed=1)
    bench.step(2)
    children = [bench.fork(root, score=score)[0] for score in (1.0, -3.0, 2.0)]
    bench.run()
    victims = [d.request for d in bench.watch.decisions if d.reason.startswith("blocks:")]
    assert victims and victims[0] == children[1]


def test_a_tree_keeps_its_rows() -> None:
    bench = bench_of(max_num_seqs=8)
    root = bench.add(prompt(6), 12, tree=TreeLimits(max_rows=2))
    bench.step(2)
    bench.fork(root, 4)
    other = bench.add(prompt(6, 1), 4)
    bench.step()
    tree = bench.request(root).tree
    assert tree is not None and tree.num_rows == 2
    assert bench.states()[other] is RequestState.RUNNING, "others pass the branches that wait for their tree"
    assert Rule.TREE_ROWS in bench.reasons(DecisionKind.DEFER)
    bench.run()


def test_a_tree_keeps_its_branches_and_tokens() -> None:
    bench = bench_of()
    root = bench.add(prompt(6), 10, tree=TreeLimits(max_tokens=30, max_branches=3))
    bench.step(3)
    with pytest.raises(TreeFull, match="2 are left, 3 are asked for"):
        bench.engine.fork(root, 3)
    with pytest.raises(TreeFull, match="20 are left, 22 are asked for"):
        bench.engine.fork(root, 2, changes={"max_tokens": 11})
    assert bench.states().keys() == {root}
    one, two = bench.fork(root, 2, changes={"max_tokens": 10})
    with pytest.raises(TreeFull, match="0 are left"):
        bench.engine.extend(one, [1], max_tokens=11)
    bench.engine.prune(two)
    bench.flush()
    bench.extend(one, [1, 2, 3], max_tokens=11)
    bench.run()


def test_the_branches_of_a_tree() -> None:
    bench = bench_of()
    root = bench.add(prompt(6), 10)
    bench.step(3)
    assert [branch.request for branch in bench.engine.branches_of(root)] == [root]
    (child,) = bench.fork(root, at=1, append=[3, 4], score=0.5)
    found = {branch.request: branch for branch in bench.engine.branches_of(child)}
    assert found.keys() == {root, child}
    assert (found[child].parent, found[child].score, found[child].shares) == (root, 0.5, 7)
    assert (found[child].num_prompt, found[child].num_output, found[child].state) == (
        9,
        0,
        RequestState.WAITING,
    )
    bench.run()
    with pytest.raises(UnknownRequest):
        bench.engine.branches_of(root)


def test_the_same_tokens_as_a_request_of_its_own() -> None:
    """What `Bench` compares with is not made by the engine."""
    bench = bench_of()
    parent = bench.add(prompt(6), 20, seed=3)
    bench.step(8)
    (child,) = bench.fork(parent, at=3, append=[50, 51], changes={"seed": 12, "max_tokens": 6})
    tokens, sampling = bench.asked[child]
    bench.run()
    assert bench.tokens[child] == reference_output(tokens, sampling)[0] and len(bench.tokens[child]) == 6
    assert tokens[:9] == prompt(6) + bench.tokens[parent][:3] and tokens[9:] == [50, 51]
