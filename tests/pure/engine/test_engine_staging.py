"""A disk behind a staging area: what can be hit is written at once, found again after a restart, and off when it fails.

The bench compares every output with the reference and checks all invariants after every half-step.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from paceline.config.engine import EngineConfig, PreemptionCosts
from paceline.core.events import DecisionKind, Rule
from paceline.core.plan import StepPlan, StepResult
from paceline.core.request import SALT, BlockKey
from paceline.errors import ConfigError
from paceline.kv.tiers import BURST_S, DISK, HOST
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

COSTS = {"token_s": 1e-2, "block_s": 1e-4, "step_s": 0.0, "disk_block_s": 1e-3}


def staged(**costs: float) -> EngineConfig:
    """A device of 64 blocks of 4 tokens, 32 places to pass through, and a disk."""
    return engine_config(
        num_blocks=65,
        num_host_blocks=32,
        num_staging_blocks=32,
        num_disk_blocks=200,
        cache_on_host=True,
        preemption_costs=PreemptionCosts(**{**COSTS, **costs}),
    )


def bench_of(config: EngineConfig, **faults: Any) -> Bench:
    return Bench(config, runner=FakeRunner(config, Faults(**{"late_copies": 0, "late_moves": 2, **faults})))


def on_disk(bench: Bench, tokens: list[int]) -> int:
    """Blocks of the beginning of a prompt that the disk has."""
    return len(bench.state.kv.levels[DISK][0].find(bench.hooks_keys(tokens)))


def restarted(bench: Bench, config: EngineConfig) -> Bench:
    """Another engine that has nothing but the disk of the first."""
    runner = FakeRunner(config, Faults(late_copies=0, late_moves=2))
    assert isinstance(bench.runner, FakeRunner)
    runner._disk = bench.runner._disk
    again = Bench(config, runner=runner)
    disk = bench.state.kv.levels[DISK][0]
    places, keys = zip(*sorted(disk.cache.entries().items()), strict=True)
    again.scheduler.restore(places, [BlockKey(key.key, b"", key.check) for key in keys], [1024] * len(keys))
    return again


def test_what_can_be_hit_is_written_before_anything_is_evicted() -> None:
    bench = bench_of(staged())
    bench.add(prompt(65), 2)
    bench.run()
    assert on_disk(bench, prompt(64)) == 16
    assert bench.state.kv.match(bench.hooks_keys(prompt(64)), 65).num_blocks == 16  # and stays on the device


def test_a_restart_finds_what_was_there() -> None:
    config = staged()
    bench = bench_of(config)
    first = bench.add(prompt(65), 8)
    bench.run()
    again = restarted(bench, config)
    second = again.add(prompt(65), 8)
    again.run()
    assert again.finished[second].num_cached == 64
    assert again.reasons(DecisionKind.LOAD, second) == [Rule.LOADING, Rule.LOADS]
    assert again.tokens[second] == bench.tokens[first]


def test_a_prompt_that_only_its_key_has_in_common_is_not_hit_after_a_restart() -> None:
    config = staged()
    bench = bench_of(config)
    bench.add(prompt(65), 2)
    bench.run()
    again = restarted(bench, config)
    key = again.hooks_keys(prompt(64))[0]
    disk = again.state.kv.levels[DISK][0]
    assert disk.cache.find(key) is not None
    assert disk.cache.find(BlockKey(key.key, b"another text", bytes(16))) is None


@pytest.mark.parametrize(
    ("own", "other"), [("a", "b"), ("a", f"a{SALT}x"), (f"a{SALT}x", "a"), (f"a{SALT}x", f"a{SALT}y")]
)
def test_another_tenant_or_salt_finds_nothing_after_a_restart(own: str, other: str) -> None:
    config = staged()
    bench = bench_of(config)
    bench.add(prompt(65), 2, tenant=own)
    bench.run()
    again = restarted(bench, config)
    strange, known = again.add(prompt(65), 2, tenant=other), again.add(prompt(65), 2, tenant=own)
    again.run()
    assert again.finished[strange].num_cached == 0
    assert again.finished[known].num_cached == 64


def test_swapped_requests_do_not_take_the_way_to_the_disk() -> None:
    bench = bench_of(staged())
    request = bench.add(prompt(17), 60)
    bench.step(3)
    assert bench.scheduler.preempt(request, swap=True)
    assert not bench.request(request).host_places
    bench.run()


def test_writes_stay_within_the_budget() -> None:
    bench = bench_of(staged(disk_write_s=BURST_S / 5))  # five at once
    bench.add(prompt(65), 2)
    bench.run()
    assert on_disk(bench, prompt(64)) == 5
    assert bench.engine.is_idle
    bench.clock.advance(100.0)
    bench.add(prompt(5, 9), 2)
    bench.run()
    assert on_disk(bench, prompt(64)) == 10


class LostDisk(FakeRunner):
    """Its disk is off from some step on: every ticket of it fails."""

    is_lost = False

    def _execute(self, plan: StepPlan) -> StepResult:
        result = super()._execute(plan)
        return result._replace(disk_is_off=True) if self.is_lost else result


@pytest.mark.parametrize("busy", [False, True])
def test_a_lost_disk_is_not_asked_any_more_and_no_request_fails(busy: bool) -> None:
    config = staged()
    runner = LostDisk(config, Faults(late_copies=0, late_moves=2))
    bench = Bench(config, runner=runner)
    bench.add(prompt(65), 2)
    bench.run()
    if busy:
        bench.add(prompt(65, 3), 8)
        bench.step(2)
    runner.is_lost, runner.faults.copy_failure = True, 1.1
    bench.add(prompt(65, 1), 2)
    bench.run()
    runner.faults.copy_failure = 0.0
    assert not bench.state.tiers.has_disk
    assert not bench.state.kv.levels[DISK][0].cache.entries()
    seen = len(bench.seen)
    again = bench.add(prompt(65), 2)
    bench.run()
    assert not any(len(each.plan.store.ticket) or len(each.plan.fetch.ticket) for each in bench.seen[seen:])
    assert bench.finished[again].num_cached == 64  # the device has it still


def test_fetches_that_fail_are_computed() -> None:
    config = staged()
    bench = bench_of(config)
    bench.add(prompt(65), 2)
    bench.run()
    again = restarted(bench, config)
    assert isinstance(again.runner, FakeRunner)
    again.runner.faults.copy_failure = 1.1
    request = again.add(prompt(65), 2)
    again.run()
    assert again.finished[request].num_cached == 0
    assert not on_disk(again, prompt(64))


def test_random_load_over_a_small_device() -> None:
    rng = random.Random(5)
    config = staged(disk_write_s=1e-3)
    bench = bench_of(config, copy_failure=0.05)
    texts = [prompt(70, number) for number in range(20)]
    for _ in range(150):
        for _ in range(rng.randint(0, 3)):
            bench.add(rng.choice(texts)[: rng.randint(1, 70)], rng.randint(1, 12))
        bench.step(rng.randint(1, 6))
    bench.run()
    assert bench.reasons(DecisionKind.LOAD).count(Rule.LOADS) > 10
    host = bench.state.kv.levels[HOST][0]
    assert host.num_free == host.num_places


def test_staging_needs_a_disk_and_places() -> None:
    for options in ({"num_staging_blocks": 1}, {"num_disk_blocks": 5, "num_staging_blocks": 9}):
        with pytest.raises(ConfigError, match="num_staging_blocks"):
            engine_config(num_host_blocks=8, cache_on_host=True, **options)


def test_what_eviction_has_learned_outlives_the_engine() -> None:
    bench = bench_of(staged())
    for _ in range(3):
        bench.add(prompt(65), 2)
        bench.run()
        bench.clock.advance(60.0)
    learned = bench.state.kv.learned()
    assert any(learned[0])
    again = bench_of(staged())
    again.scheduler.restore((), (), (), learned)
    assert again.state.kv.learned() == learned
    again.scheduler.restore((), (), (), ((float("nan"),) * len(learned[0]), (1.0,), ()))
    assert again.state.kv.learned() == learned
