"""The checker that runs the invariants: after both halves of a step, or sampled in production."""

import logging
from collections.abc import Callable
from functools import partial

import pytest

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.request import NO_ROW, RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.scheduler.invariants import InvariantChecker, InvariantViolation, SampledChecker
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.pure.scheduler.planned_states import Break, PlannedState, crowded, planned_state
from tests.pure.scheduler.test_scheduler_invariants import (
    a_family_lists_a_stranger,
    a_plan_goes_over_its_budget,
    a_reference_too_many,
    a_request_that_fits_is_left_out,
    a_request_vanishes,
)


def name_of(build: Callable[[], PlannedState], damage: Break, *, updated: bool) -> str:
    """The name under which a new checker reports a broken state."""
    planned = build()
    damage(planned)
    checker = InvariantChecker(planned.bench.scheduler)
    check = partial(checker.after_update, None) if updated else partial(checker.after_schedule, planned.plan)
    with pytest.raises(InvariantViolation) as caught:
        check()
    assert str(caught.value).startswith(caught.value.name + ": ")
    return caught.value.name


@pytest.mark.parametrize("updated", [False, True])
def test_the_checker_looks_at_blocks_requests_and_counters_after_both_halves(updated: bool) -> None:
    assert name_of(planned_state, a_reference_too_many, updated=updated) == "S4"
    assert name_of(planned_state, a_family_lists_a_stranger, updated=updated) == "S21"
    assert name_of(planned_state, a_request_vanishes, updated=updated) == "S12"


def test_the_checker_looks_at_plans_after_a_schedule() -> None:
    assert name_of(planned_state, a_plan_goes_over_its_budget, updated=False) == "S14"
    assert name_of(planned_state, a_request_that_fits_is_left_out, updated=False) == "L1w"


def test_what_is_skipped_because_nothing_changed_is_looked_at_when_something_does() -> None:
    broken = planned_state()
    checker = InvariantChecker(broken.bench.scheduler)
    checker.after_schedule(broken.plan)
    checker.after_update(None)
    a_reference_too_many(broken)
    with pytest.raises(InvariantViolation, match="S4"):
        checker.after_update(None)


def with_a_reference_too_many_for_a_moment(batch: int) -> tuple[PlannedState, InvariantChecker]:
    """One half-step out of two is broken, and the checker has not looked at it yet."""
    broken = planned_state()
    checker = InvariantChecker(broken.bench.scheduler, batch)
    checker.after_schedule(broken.plan)
    block = broken.group.blocks_of(0)[0]
    broken.pool.refs[block] += 1
    checker.after_update(None)
    broken.pool.refs[block] -= 1
    return broken, checker


def test_what_was_wrong_for_a_moment_is_raised_when_the_pictures_are_looked_at() -> None:
    _, checker = with_a_reference_too_many_for_a_moment(batch=5)
    for _ in range(2):
        checker.after_update(None)
    with pytest.raises(InvariantViolation, match="S4"):
        checker.after_update(None)


def test_the_first_violation_in_time_is_raised_before_one_that_is_seen_at_once() -> None:
    broken, checker = with_a_reference_too_many_for_a_moment(batch=64)
    a_request_vanishes(broken)
    with pytest.raises(InvariantViolation, match="S4"):
        checker.after_update(None)
    with pytest.raises(InvariantViolation, match="S4"):  # it stays the first
        checker.flush()


def test_a_violation_seen_elsewhere_comes_after_what_the_pictures_show() -> None:
    elsewhere = InvariantViolation("S18", "seen by a watch")
    _, checker = with_a_reference_too_many_for_a_moment(batch=64)
    checker.found(elsewhere)
    with pytest.raises(InvariantViolation, match="S4"):
        checker.flush()
    sound = planned_state()
    checker = InvariantChecker(sound.bench.scheduler, batch=64)
    checker.after_schedule(sound.plan)
    checker.flush()
    checker.found(elsewhere)
    a_reference_too_many(sound)
    with pytest.raises(InvariantViolation, match="S18"):
        checker.after_update(None)


def test_a_block_used_by_a_step_under_way_is_remembered() -> None:
    """S22 through the checker: a block is handed on before the step that writes it has completed."""
    bench = Bench(engine_config(depth=1))
    checker = InvariantChecker(bench.scheduler)
    gone = bench.add(prompt(9), 20)
    checker.after_schedule(bench.scheduler.schedule())
    bench.engine.abort(gone)
    fence = bench.state.kv.fences.pop()
    bench.state.kv.groups[0].pool.release(fence.blocks)
    bench.add(prompt(9, 1), 20)
    plan = bench.scheduler.schedule()
    with pytest.raises(InvariantViolation, match="S22: "):
        checker.after_schedule(plan)


def test_a_run_without_tokens_is_reported() -> None:
    """L2: plans go out and nothing ever comes back."""
    broken = planned_state()
    checker = InvariantChecker(broken.bench.scheduler)

    def plan_again_and_again() -> None:
        for _ in range(500):
            checker.after_schedule(broken.plan)

    with pytest.raises(InvariantViolation, match="L2: .* steps without a token"):
        plan_again_and_again()


def test_a_request_that_vanished_from_everywhere_is_missed() -> None:
    """S11 and S12 together: not even the counters may agree with a loss."""
    broken = crowded()
    lost = broken.bench.request(RequestId(2))
    broken.state.queue.remove(lost)
    del broken.state.requests[lost.id], broken.state.orders[lost.id]
    assert lost.row == NO_ROW
    assert "requests_are_conserved" in broken.objections("requests_are_conserved")


def test_a_request_that_waits_for_a_prefix_does_not_limit_the_prompt_that_computes_it() -> None:
    groups = (GroupSpec(), GroupSpec(window=9, num_blocks=28))
    config = engine_config(
        block_size=1,
        num_blocks=41,
        groups=groups,
        max_num_seqs=2,
        max_num_batched_tokens=4,
        max_model_len=40,
        long_prefill_share=0.25,
        max_preemptions=1,
    )
    bench = Bench(config)
    bench.add(prompt(7) + prompt(6, 41), 1)
    bench.add(prompt(3) + prompt(5, 50), 15)
    for _ in range(2):
        bench.add_all(prompt(12, 1) + prompt(1, 19), 12, n=2)
    bench.run()


# ----------------------------------------------------------------
# Invariants in production: sampled, counted and told, never raised.


def started(every: int) -> tuple[Bench, SampledChecker, list[InvariantViolation]]:
    bench = Bench(engine_config())
    bench.add(prompt(9), 20)
    bench.step(3)
    told: list[InvariantViolation] = []
    return bench, SampledChecker(bench.scheduler, every, told.append), told


def test_a_violation_is_counted_and_told_and_not_raised() -> None:
    bench, checker, told = started(1)
    checker.after_update(None)
    assert not checker.violations and not told
    bench.state.counters.added += 1
    for _ in range(3):
        checker.after_update(None)
    assert checker.violations == {"S12": 3}
    assert [violation.name for violation in told] == ["S12"] * 3
    bench.state.counters.added -= 1
    checker.after_update(None)
    assert checker.violations == {"S12": 3}


@pytest.mark.parametrize("every", [1, 2, 5])
def test_one_step_in_so_many_is_looked_at(every: int) -> None:
    bench, checker, told = started(every)
    bench.state.counters.added += 1
    for step in range(1, 11):
        checker.after_schedule(None)
        checker.after_update(None)
        assert len(told) == step // every


def test_different_violations_are_counted_apart() -> None:
    bench, checker, _ = started(1)
    bench.state.counters.added += 1
    checker.after_update(None)
    bench.state.counters.added -= 1
    bench.state.kv.groups[0].pool.refs[bench.state.kv.groups[0].table[0, 0]] += 1
    checker.after_update(None)
    assert checker.violations == {"S12": 1, "S4": 1}


def test_a_state_too_broken_to_be_looked_at_is_told_too() -> None:
    """A block number beyond the pool: counting its holders fails inside the check."""
    bench, checker, told = started(1)
    bench.state.kv.groups[0].table[0, 0] = 10_000
    checker.after_update(None)
    assert len(told) == 1 and sum(checker.violations.values()) == 1


def production(check_every: int) -> Engine:
    config = EngineConfig(
        kv=KVConfig(block_size=4, num_blocks=65),
        scheduler=SchedulerConfig(max_num_seqs=8, max_model_len=64),
        check_every=check_every,
    )
    engine = build_engine(config, FakeRunner(config))
    engine.add(prompt(9), SamplingParams(max_tokens=9))
    return engine


def test_an_engine_without_a_checker_of_its_own_logs_what_it_finds(caplog: pytest.LogCaptureFixture) -> None:
    engine = production(check_every=2)
    with caplog.at_level(logging.ERROR, logger="paceline"):
        engine.step()
        engine.step()
        assert caplog.messages == []
        engine.scheduler.state.counters.added += 1
        engine.step()
        engine.step()
    assert len(caplog.messages) == 1 and "S12" in caplog.messages[0]
    while engine.has_requests:
        engine.step()


def test_an_engine_that_is_not_to_check_does_not(caplog: pytest.LogCaptureFixture) -> None:
    engine = production(check_every=0)
    engine.scheduler.state.counters.added += 1
    with caplog.at_level(logging.ERROR, logger="paceline"):
        while engine.has_requests:
            engine.step()
    assert caplog.messages == []
