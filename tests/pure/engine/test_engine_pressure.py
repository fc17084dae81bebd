"""Too little of everything: pools, places, refusing allocators, forced preemptions at every step (K1 to K5)."""

import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.engine import GroupSpec
from paceline.core.request import FinishReason
from paceline.engine.prefix_keys import PrefixKeyHooks
from paceline.scheduler.invariants import InvariantChecker
from tests.dst.injected import CollidingKeyMaker, Shortage
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_eight_blocks_serve_thirty_two_requests(kind: str, depth: int) -> None:
    """K1: all finish, no request is preempted more than four times."""
    config = engine_config(depth=depth, num_blocks=9, num_host_blocks=9, preemption=kind, max_model_len=32)
    bench = Bench(config, overlapped=depth > 0)
    for start in range(32):
        bench.add(prompt(1 + start % 7, start), 4 + start % 17)
    bench.run(4000)
    assert {ending.reason for ending in bench.finished.values()} == {FinishReason.LENGTH}
    assert 0 < max(ending.preemptions for ending in bench.finished.values()) <= 4


# -- K2: a request that fits alone is served alone --------------------------------------------------------------------


@settings(max_examples=settings().max_examples // 2)
@given(
    total=st.integers(2, 40),
    output=st.integers(1, 39),
    block_size=st.sampled_from((1, 2, 4)),
    budget=st.integers(1, 9),
    depth=st.integers(0, 4),
)
def test_a_request_of_exactly_the_pool_is_served(
    total: int, output: int, block_size: int, budget: int, depth: int
) -> None:
    output = min(output, total - 1)
    config = engine_config(
        depth=depth,
        block_size=block_size,
        num_blocks=1 + max(1, -(-total // block_size)),
        max_num_batched_tokens=budget,
        max_model_len=total,
    )
    bench = Bench(config, overlapped=depth > 0)
    bench.add(prompt(total - output), output)
    bench.run()


def windowed(depth: int, block_size: int, window: int, budget: int) -> Bench:
    """A sliding group with exactly the blocks that `full_need` asks for."""
    total = 40
    need = min(-(-total // block_size), -(-(window + budget) // block_size) + 2)
    config = engine_config(
        depth=depth,
        block_size=block_size,
        num_blocks=1 + total,
        groups=(GroupSpec(), GroupSpec(window=window, num_blocks=1 + need)),
        max_num_batched_tokens=budget,
        max_model_len=total,
    )
    bench = Bench(config, overlapped=depth > 0)
    assert bench.state.kv.full_need(total)[1] == need
    bench.add(prompt(total // 2), total // 2)
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3, 8])
@pytest.mark.parametrize("budget", [1, 4, 8])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_sliding_window_with_exactly_its_blocks_is_served(
    block_size: int, budget: int, window: int
) -> None:
    windowed(0, block_size, window, budget).run()


@pytest.mark.slow
def test_a_sliding_window_with_exactly_its_blocks_is_served_ahead_of_the_device() -> None:
    stuck = []
    for case in product((1, 3), (1, 2, 4), (1, 2, 8), (1, 3, 8)):
        try:
            windowed(*case).run(300)
        except AssertionError as violation:
            stuck.append((case, str(violation)))
    assert stuck == []


def test_a_reserved_row_finds_its_block_in_every_group() -> None:
    """An allocation that was not counted raises in the middle of a plan: every request would be lost."""
    config = engine_config(
        depth=4,
        block_size=1,
        num_blocks=41,
        groups=(GroupSpec(), GroupSpec(window=3, num_blocks=22)),
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=40,
        long_prefill_share=0.25,
        max_preemptions=1,
        defer_shared_prefix=False,
    )
    bench = Bench(config)
    bench.add_all(prompt(13), 12, n=2, seed=0)
    bench.step(2)
    bench.scheduler.reset_prefix_cache()
    bench.overlapped = True
    bench.run()


def test_a_cached_beginning_does_not_keep_a_request_out() -> None:
    # 3 + 16 tokens and two blocks, and the null block.
    groups = (
        GroupSpec(),
        GroupSpec(window=3, num_blocks=22),
    )
    config = engine_config(
        block_size=1, num_blocks=41, groups=groups, max_num_batched_tokens=16, max_model_len=40
    )
    bench = Bench(config)
    bench.add(prompt(10), 1)
    bench.run()
    bench.add(prompt(10) + prompt(24, 1), 4)
    bench.run()


# -- K3: an allocator that refuses -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [0, 2])
def test_allocations_that_fail_at_random_only_take_time(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    shortage = Shortage(rng, 0.1)
    config = engine_config(
        depth=depth, num_blocks=16, num_host_blocks=8, preemption=rng.choice(("swap", "recompute"))
    )
    bench = Bench(config, make_pool=shortage.make_pool, overlapped=depth > 0)
    for start in range(14):
        bench.add(prompt(1 + 5 * start % 13, start % 5), 1 + 7 * start % 19)
    for _ in range(3000):
        if not bench.engine.has_requests and bench.engine.is_idle:
            break
        shortage.draw()
        bench.step()
    shortage.now = False
    bench.run()
    assert {ending.reason for ending in bench.finished.values()} == {FinishReason.LENGTH}


# -- K4: forced preemption of one request at every step ----------------------------------------------------


def forced(step: int, *, swap: bool, depth: int, late: int = 0) -> Bench:
    config = engine_config(depth=depth, num_blocks=40, num_host_blocks=20, max_num_batched_tokens=12)
    runner = FakeRunner(config, Faults(rng=random.Random(step), late_copies=late))
    bench = Bench(config, runner=runner, overlapped=depth > 0)
    victim = bench.add(prompt(21), 12, seed=9)
    bench.add(prompt(9, 1), 14, seed=8)
    bench.fork(victim)
    bench.step(step)
    if victim in bench.state.requests:
        bench.scheduler.preempt(victim, swap=swap)
        bench.flush()
    bench.run()
    assert len(bench.tokens[victim]) == 12
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("step", range(18))
@pytest.mark.parametrize("swap", [False, True])
def test_a_preemption_at_any_step_changes_no_output(step: int, swap: bool) -> None:
    """K4, O1, O5: outputs are compared with the reference as they end."""
    for depth in (0, 1, 2):
        forced(step, swap=swap, depth=depth, late=depth)


def test_a_preemption_at_every_step_changes_no_output() -> None:
    bench = Bench(engine_config(num_host_blocks=64, max_preemptions=0))
    request = bench.add(prompt(10), 30, seed=4)
    other = bench.add(prompt(5, 1), 30)
    for step in range(400):
        bench.step()
        if request in bench.state.requests and step % 2:
            bench.scheduler.preempt(request, swap=bool(step % 4 == 1))
    bench.run()
    assert bench.finished[request].preemptions > 10
    assert len(bench.tokens[request]) == len(bench.tokens[other]) == 30


# -- K5: keys and cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("colliding", [False, True])
def test_resets_and_collisions_during_traffic_change_no_output(colliding: bool, depth: int) -> None:
    config = engine_config(depth=depth, num_blocks=24, num_host_blocks=12, preemption="swap")
    hooks = PrefixKeyHooks(CollidingKeyMaker(4, bytes(32))) if colliding else None
    bench = Bench(config, hooks=hooks, overlapped=depth > 0)
    for start in range(20):
        bench.add(prompt(9, start % 2) + prompt(3, start % 3), 8, seed=start)
        bench.step()
        if start % 4 == 0:
            bench.scheduler.reset_prefix_cache()
    bench.run()
    assert {ending.reason for ending in bench.finished.values()} == {FinishReason.LENGTH}


def test_the_checker_counts_what_it_has_checked() -> None:
    bench = Bench()
    bench.add(prompt(4), 3)
    bench.run()
    assert isinstance(bench.watch.checker, InvariantChecker)
    assert bench.watch.checker.num_checks >= 2 * len(bench.seen)
