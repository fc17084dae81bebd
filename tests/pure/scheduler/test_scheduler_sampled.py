"""Invariants in production: sampled, counted and told, never raised."""

import logging

import pytest

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.scheduler.invariants import InvariantViolation, SampledChecker
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


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
