"""Branches: forks that share blocks, copies on write, pruning, and families that leave nothing behind."""

import pytest

from paceline.core.events import DecisionKind
from paceline.core.request import FinishReason, RequestState
from paceline.core.sampling import branch_seed
from paceline.errors import UnknownRequest
from paceline.scheduler.step.preemption import put_aside
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def live_blocks(bench: Bench) -> int:
    pool = bench.state.kv.groups[0].pool
    return pool.usable - pool.num_free


def copies(bench: Bench) -> list[int]:
    return [len(seen.plan.block_copies.row) for seen in bench.seen if len(seen.plan.block_copies.row)]


def test_a_fork_shares_its_parents_blocks() -> None:
    bench = Bench(engine_config(defer_shared_prefix=False))
    parent = bench.add(prompt(14), 20)
    bench.step(2)
    before = live_blocks(bench)
    (child,) = bench.fork(parent)
    bench.step()
    rows = [bench.request(name).row for name in (parent, child)]
    table = bench.state.kv.groups[0].table
    assert table[rows[0], :3].tolist() == table[rows[1], :3].tolist(), "full blocks are one and the same"
    assert live_blocks(bench) == before + 1, "the part-filled one was copied"
    assert bench.state.counters.forked == 1
    assert bench.reasons(DecisionKind.FORK, child) == ["branches off", "shares its parent's blocks"]
    bench.run()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_shared_block_is_copied_exactly_once(depth: int) -> None:
    bench = Bench(engine_config(depth=depth), overlapped=depth > 0)
    parent = bench.add(prompt(13), 20, seed=3)
    bench.step(2 + depth)
    bench.fork(parent)
    bench.run()
    assert copies(bench) == [1], "one of the two writes into the block it had, the other into a copy"


def test_three_readers_of_a_block_need_two_copies() -> None:
    bench = Bench()
    parent = bench.add(prompt(13), 20, seed=3)
    bench.step(2)
    bench.fork(parent, 2)
    bench.run()
    assert sum(copies(bench)) == 2


def test_a_fork_at_the_end_of_a_block_copies_nothing() -> None:
    bench = Bench()
    parent = bench.add(prompt(12), 20, seed=3)
    bench.step()  # twelve computed, the thirteenth token goes into a private block
    bench.fork(parent)
    bench.run()
    assert copies(bench) == []


def test_a_branch_that_joins_and_leaves_in_one_plan_copies_nothing() -> None:
    bench = Bench(engine_config(num_host_blocks=16))
    parent = bench.add(prompt(13), 20, seed=3)
    bench.step(2)
    (child,) = bench.fork(parent)
    bench.scheduler.composer.admission.admit(bench.request(child), 32)
    assert bench.state.kv.delta.copies
    put_aside(bench.state, bench.request(child), swap=True, reason="blocks")
    assert bench.states()[child] is RequestState.WAITING, "a swap would go before the copy"
    assert not bench.state.kv.delta.copies, "its block may be another row's by then"
    bench.run()


def test_a_pruned_branch_before_its_first_write_needs_no_copy() -> None:
    bench = Bench(engine_config(depth=1), overlapped=True)
    parent = bench.add(prompt(13), 20)
    bench.step(3)
    (child,) = bench.fork(parent)
    assert bench.engine.prune(child)
    bench.flush()
    bench.run()
    assert copies(bench) == []
    assert (bench.finished[child].reason, bench.finished[child].detail) == (FinishReason.ABORT, "pruned")


def test_branches_go_on_from_where_the_parent_stood() -> None:
    bench = Bench()
    parent = bench.add(prompt(6), 10, seed=5)
    bench.step(4)
    told = list(bench.tokens[parent])
    (child,) = bench.fork(parent)
    assert bench.request(child).num_prompt == 6 + len(told)
    bench.run()
    assert len(bench.tokens[child]) == 10 - len(told), "they may become as long as the parent"
    assert bench.tokens[child] != bench.tokens[parent][len(told) :], "with a separate seed"


def test_a_branch_outlives_its_parent_and_the_parent_its_branch() -> None:
    bench = Bench()
    parent = bench.add(prompt(6), 20)
    bench.step(3)
    one, other = bench.fork(parent, 2)
    bench.step()
    bench.engine.abort(parent)
    bench.engine.prune(one)
    bench.flush()
    bench.run()
    assert bench.finished[other].reason is FinishReason.LENGTH


def test_a_branch_waits_until_the_parent_has_computed_what_they_share() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8))
    parent, child = bench.add_all(prompt(21), n=2)
    bench.step()
    assert bench.states()[child] is RequestState.WAITING
    bench.run()
    spans = [seen.spans.get(child, 0) for seen in bench.seen]
    assert sum(spans) == 1, "20 tokens are the parent's, the last gives its own first token"
    assert bench.finished[parent].num_output == bench.finished[child].num_output == 4


def test_branches_of_one_prompt_have_seeds_of_their_own() -> None:
    bench = Bench()
    ids = bench.add_all(prompt(9), 6, n=4, seed=11)
    assert [bench.request(name).sampling.seed for name in ids] == [branch_seed(11, at) for at in range(4)]
    assert all(bench.request(name).sampling.n == 1 for name in ids)
    bench.run()
    assert len({tuple(bench.tokens[name]) for name in ids}) == 4


def test_families_are_listed_while_branches_live() -> None:
    """S21 and B10."""
    bench = Bench()
    parent, *branches = bench.add_all(prompt(9), 6, n=3)
    assert bench.state.children == {parent: set(branches)}
    bench.engine.abort(branches[0])
    assert bench.state.children == {parent: {branches[1]}}
    bench.engine.abort(parent)
    assert bench.state.children == {parent: {branches[1]}}
    bench.flush()
    bench.run()
    assert bench.state.children == {}


@pytest.mark.parametrize("when", ["waiting", "swapped", "paused"])
def test_a_parent_that_does_not_run_can_be_forked(when: str) -> None:
    bench = Bench(engine_config(num_host_blocks=16))
    parent = bench.add(prompt(9), 8, seed=1)
    if when != "waiting":
        bench.step(3)
        bench.scheduler.pause(parent, swap=when == "swapped")
    bench.fork(parent, 2)
    if when == "swapped":
        bench.scheduler.resume(parent)
    bench.step(4)
    if when == "paused":
        bench.scheduler.resume(parent)
    bench.run()


def test_forking_is_all_or_none() -> None:
    bench = Bench(engine_config(max_queue=3))
    parent = bench.add(prompt(9), 8)
    bench.step()
    with pytest.raises(Exception, match="queue"):
        bench.engine.fork(parent, 4)
    assert bench.state.children == {}
    assert len(bench.fork(parent, 3)) == 3
    bench.run()


def test_an_unknown_request_cannot_be_forked() -> None:
    with pytest.raises(UnknownRequest, match="17"):
        Bench().engine.fork(17, 1)  # type: ignore[arg-type]


def test_a_request_with_min_tokens_can_be_forked() -> None:
    bench = Bench()
    parent = bench.add(prompt(4), 10, min_tokens=8)
    bench.step(6)
    (child,) = bench.fork(parent)
    sampling = bench.request(child).sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 4)
    bench.run()


def test_two_forks_at_one_point_differ() -> None:
    """O5: a second call is no repetition of the first."""
    bench = Bench()
    parent = bench.add(prompt(4), 10, seed=5)
    bench.step(3)
    (one,), (other,) = bench.fork(parent), bench.fork(parent)
    bench.run()
    assert bench.tokens[one] != bench.tokens[other]


def test_a_fork_is_no_twin_of_a_sibling() -> None:
    bench = Bench()
    first, second = bench.add_all(prompt(4), 10, n=2, seed=5)
    bench.step(3)
    (fork,) = bench.fork(first)
    assert bench.request(fork).sampling.seed != bench.request(second).sampling.seed
    bench.run()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_trees_of_branches_under_pressure(depth: int, block_size: int) -> None:
    """Forks of forks with prunes in between; outputs are checked as they end."""
    config = engine_config(
        depth=depth, block_size=block_size, num_blocks=3 + 96 // block_size, max_num_seqs=6
    )
    bench = Bench(config, overlapped=depth > 0)
    root = bench.add(prompt(11), 30, seed=2)
    bench.step(4 + depth)
    for name in bench.fork(root, 2):
        bench.step(3)
        if name in bench.state.requests:
            grandchild, victim = bench.fork(name, 2)
            bench.step(2)
            bench.engine.prune(victim)
            bench.flush()
            assert grandchild in bench.state.requests or grandchild in bench.finished
    bench.run()
    assert copies(bench) or block_size == 1
