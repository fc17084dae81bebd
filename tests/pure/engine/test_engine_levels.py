"""Prefixes on the host and on a disk: what comes back, what is computed instead, and that output never depends on it.

The bench compares every output with the reference and checks all invariants after every half-step.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, PreemptionCosts
from paceline.config.model_set import ModelShare
from paceline.core.events import DecisionKind, Rule
from paceline.core.request import SALT, RequestId, RequestState
from paceline.core.standing import ALL_LOST, DEVICE_LOST, HOST_LOST, WEIGHTS_KEPT
from paceline.engine.conductor import Conductor, Seat, broken_rules
from paceline.errors import ConfigError
from paceline.kv.tiers import BURST_S, DISK, HOST
from paceline.scheduler.loading import Load
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, BreakingRunner, engine_config, prompt

DEAR = {"token_s": 1e-2, "block_s": 1e-4, "step_s": 0.0, "disk_block_s": 1e-3}


class Latest(random.Random):
    """Every copy is as late as it may be."""

    def randint(self, a: int, b: int) -> int:
        return b


def levels(host: int = 64, disk: int = 0, **costs: float) -> EngineConfig:
    """A device of 64 blocks of 4 tokens, and places below."""
    return engine_config(
        num_blocks=65,
        num_host_blocks=host,
        num_disk_blocks=disk,
        cache_on_host=True,
        eviction="lru",
        preemption_costs=PreemptionCosts(**{**DEAR, **costs}),
    )


def bench_of(config: EngineConfig, **faults: Any) -> Bench:
    return Bench(config, runner=FakeRunner(config, Faults(**{"rng": Latest(0), "late_copies": 0, **faults})))


def flood(bench: Bench, count: int, start: int = 50) -> None:
    """Other prompts of 4 blocks, one after another: what came before them leaves the device."""
    for number in range(start, start + count):
        bench.add(prompt(17, number), 2)
        bench.run()


def num_cached(bench: Bench, request_id: RequestId) -> int:
    return bench.finished[request_id].num_cached


def test_what_the_device_evicts_comes_back_from_the_host() -> None:
    bench = bench_of(levels())
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 20)
    assert bench.state.kv.match(bench.hooks_keys(prompt(16)), 17).num_blocks < 4
    again = bench.add(prompt(17), 2)
    bench.run()
    assert num_cached(bench, again) == 16
    assert bench.reasons(DecisionKind.LOAD, again) == [Rule.LOADS]


@pytest.mark.parametrize("disk", [0, 400])
@pytest.mark.parametrize("other", ["b", f"default{SALT}x"])
def test_another_tenant_or_salt_finds_nothing_below_the_device(disk: int, other: str) -> None:
    bench = bench_of(levels(24 if disk else 64, disk))
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 32 if disk else 20)
    strange = bench.add(prompt(17), 2, tenant=other)
    bench.run()
    own = bench.add(prompt(17), 2)
    bench.run()
    assert (num_cached(bench, strange), num_cached(bench, own)) == (0, 16)


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("disk", [0, 400])
@pytest.mark.parametrize("levels_lost", [DEVICE_LOST, HOST_LOST, ALL_LOST])
def test_what_is_below_the_device_stays_over_a_sleep_where_its_memory_does(
    levels_lost: int, disk: int, late: int
) -> None:
    """Copies may be under way when it begins: none of them arrives behind it."""
    bench = bench_of(levels(24 if disk else 64, disk), late_copies=late, late_moves=late)
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 32 if disk else 20)
    bench.add(prompt(17, 99), 8)
    bench.step(2)
    bench.engine.sleep(levels_lost=levels_lost)
    old = bench.runner
    assert isinstance(old, FakeRunner) and not old._copies
    bench.flush()
    conductor = Conductor([Seat(config=ModelShare(name="a"))])
    conductor.slept(0, WEIGHTS_KEPT)
    assert broken_rules(conductor, [bench.engine]) == []
    if levels_lost > DEVICE_LOST:
        bench.runner = FakeRunner(bench.config, old.faults)
        bench.runner._disk = old._disk
    bench.engine.wake(bench.runner)
    again = bench.add(prompt(17), 2)
    bench.run()
    stays = levels_lost == DEVICE_LOST or (levels_lost == HOST_LOST and disk)
    assert num_cached(bench, again) == (16 if stays else 0)


def test_both_estimates_are_on_record() -> None:
    bench = bench_of(levels())
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 20)
    again = bench.add(prompt(17), 2)
    bench.run()
    (load,) = [d for d in bench.watch.decisions if d.kind is DecisionKind.LOAD]
    assert load.request == again and load.detail == (
        f"load {0.1 * load.value / 4:.1f} ms, compute {10 * load.value:.1f} ms"
    )


def test_what_is_dearer_to_load_is_computed() -> None:
    bench = bench_of(levels(block_s=1.0))
    bench.state.tiers.budgets[0].block_s = 1e-6  # it goes down all the same
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 20)
    again = bench.add(prompt(17), 2)
    bench.run()
    assert bench.reasons(DecisionKind.LOAD, again) == [Rule.COMPUTES]
    assert num_cached(bench, again) < 16


def test_a_load_that_fails_is_computed_and_its_place_forgotten() -> None:
    config = levels()
    faults = Faults(rng=Latest(0), late_copies=0)
    bench = Bench(config, runner=FakeRunner(config, faults))
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 20)
    faults.copy_failure = 1.1
    again = bench.add(prompt(17), 2)
    bench.step()
    faults.copy_failure = 0.0
    bench.run()
    assert bench.reasons(DecisionKind.LOAD, again) == [Rule.LOADS, Rule.LOAD_FAILED]
    assert num_cached(bench, again) == 0


def test_a_request_that_ends_while_it_loads_leaves_the_host_its_prefix() -> None:
    bench = bench_of(levels(), late_copies=3)
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 20)
    again = bench.add(prompt(17), 2)
    bench.step()
    bench.engine.abort(again)
    bench.flush()
    bench.run()
    third = bench.add(prompt(17), 2)
    bench.run()
    assert num_cached(bench, third) == 16


def test_a_request_is_blocked_on_its_row_while_it_loads() -> None:
    bench = bench_of(levels(), late_copies=3)
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 20)
    again = bench.add(prompt(17), 2)
    bench.step()
    assert bench.states()[again] is RequestState.BLOCKED and bench.request(again).row >= 0
    bench.run()


def test_two_requests_for_one_prefix_load_it_once() -> None:
    bench = bench_of(levels(), late_copies=2)
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 20)
    both = [bench.add(prompt(17), 2) for _ in range(2)]
    bench.run()
    assert [num_cached(bench, number) for number in both] == [16, 16]
    assert bench.reasons(DecisionKind.LOAD) == [Rule.LOADS]


def on_disk(late_moves: int = 0, **costs: float) -> Bench:
    """A prompt of 4 blocks lies on the disk."""
    bench = bench_of(levels(24, 400, **costs), late_moves=late_moves)
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 32)
    tiers, keys = bench.state.tiers, bench.hooks_keys(prompt(17))
    assert tiers.look(keys, 0, 4).num_disk == 4
    return bench


def test_a_request_waits_for_the_disk_where_that_is_sooner_and_others_pass_it() -> None:
    bench = on_disk(late_moves=3)
    again, other = bench.add(prompt(17), 2), bench.add(prompt(5, 99), 2)
    bench.step()
    assert bench.states() == {again: RequestState.WAITING, other: RequestState.RUNNING}
    bench.run()
    assert bench.reasons(DecisionKind.LOAD, again) == [Rule.LOADING, Rule.LOADS]
    assert bench.reasons(DecisionKind.DEFER, again) == [Rule.LOADING]
    assert num_cached(bench, again) == 16


def test_it_waits_no_longer_than_computing_takes_and_what_comes_late_is_cached() -> None:
    bench = on_disk(late_moves=400)  # computing takes 160 ms, a step 1 ms
    again = bench.add(prompt(17), 2)
    steps = 0
    while bench.states()[again] is RequestState.WAITING:
        bench.step()
        steps += 1
    assert 155 <= steps <= 165
    while bench.engine.has_requests or bench.state.kv.tickets.open:
        bench.step()
    assert num_cached(bench, again) == 0
    assert not bench.state.kv.fetching
    host = bench.state.kv.levels[1][0]
    assert len(host.find(bench.hooks_keys(prompt(17))[:4])) == 4


@pytest.mark.parametrize(("step_s", "waits"), [(0.15, True), (0.17, False)])
def test_it_does_not_wait_for_what_should_be_later_than_computing(step_s: float, waits: bool) -> None:
    # Computing takes 160 ms; a load may take 1.25 times that, once it is on the host.
    bench = on_disk(step_s=step_s)
    bench.clock.advance(1.0)  # the disk has written all
    again = bench.add(prompt(17), 2)
    bench.run()
    assert any(len(seen.plan.fetch.disk) for seen in bench.seen)
    assert bench.reasons(DecisionKind.LOAD, again) == ([Rule.LOADING, Rule.LOADS] if waits else [])
    assert num_cached(bench, again) == (16 if waits else 0)


def test_a_slow_disk_is_not_asked() -> None:
    bench = on_disk(disk_block_s=1.0)
    again = bench.add(prompt(17), 2)
    bench.run()
    assert not any(len(seen.plan.fetch.disk) for seen in bench.seen)
    assert not bench.reasons(DecisionKind.LOAD, again)


def test_bytes_of_the_disk_that_are_not_right_are_computed() -> None:
    bench = on_disk()
    bench.runner.faults.copy_failure = 1.1  # type: ignore[attr-defined]
    again = bench.add(prompt(17), 2)
    bench.step()
    bench.runner.faults.copy_failure = 0.0  # type: ignore[attr-defined]
    bench.run()
    assert num_cached(bench, again) == 0
    assert not bench.state.tiers.look(bench.hooks_keys(prompt(17)), 4, 4).num_disk


def test_writes_keep_to_their_budget() -> None:
    bench = bench_of(levels(24, 400, disk_write_s=BURST_S))
    flood(bench, 32)
    # The burst; the run takes a fraction of it.
    assert sum(len(seen.plan.store.disk) for seen in bench.seen) == 1


def test_prompts_are_written_whole_or_in_part_from_their_beginning() -> None:
    bench = bench_of(levels(24, 400, disk_write_s=BURST_S / 6))
    flood(bench, 32)
    disk = bench.state.kv.levels[DISK][0]
    written = [len(disk.find(bench.hooks_keys(prompt(17, number)))) for number in range(50, 82)]
    assert sorted(written)[-3:] == [0, 2, 4]
    assert len(disk.cache) == 6  # nothing stands behind a gap


def test_what_two_prompts_share_is_written_once_and_found_for_both() -> None:
    bench = bench_of(levels(24, 400, disk_write_s=BURST_S / 100))
    shared = prompt(9)
    both = [[*shared, *prompt(8, number)] for number in (7, 8)]
    for tokens in both:
        bench.add(tokens, 2)
        bench.run()
    flood(bench, 32)
    disk = bench.state.kv.levels[DISK][0]
    assert [len(disk.find(bench.hooks_keys(tokens))) for tokens in both] == [4, 4]
    stored = [head.key for seen in bench.seen for head in seen.plan.store.heads()]
    assert len(stored) == len(set(stored))


def test_a_reset_of_the_cache_forgets_every_level() -> None:
    bench = on_disk()
    bench.scheduler.reset_prefix_cache()
    assert not any(len(part.cache) for level in bench.state.kv.levels for part in level)
    again = bench.add(prompt(17), 2)
    bench.run()
    assert num_cached(bench, again) == 0


def test_no_request_waits_for_what_was_on_its_way_when_the_cache_was_reset() -> None:
    bench = on_disk(late_moves=3)
    bench.add(prompt(17), 2)
    bench.step()
    assert len(bench.state.kv.fetching) == 4
    bench.scheduler.reset_prefix_cache()
    assert not bench.state.kv.fetching
    bench.run()
    again = bench.add(prompt(17), 2)
    bench.step()
    assert bench.states()[again] is RequestState.RUNNING
    assert not bench.reasons(DecisionKind.DEFER, again)
    bench.run()


def test_a_step_that_fails_takes_the_device_and_not_the_host() -> None:
    config = levels()
    runner = BreakingRunner(config)
    bench = Bench(config, runner=runner)
    bench.add(prompt(17), 2)
    bench.run()
    flood(bench, 20)
    runner._fail_wait = (runner._waits + 1,)
    bench.add(prompt(5, 99), 2)
    bench.run()
    again = bench.add(prompt(17), 2)
    bench.run()
    assert bench.reasons(DecisionKind.LOAD, again) == [Rule.LOADS]
    assert num_cached(bench, again) >= 8  # what had arrived before


def test_swapped_requests_go_before_prefixes() -> None:
    bench = bench_of(levels(host=8))
    flood(bench, 20)
    host = bench.state.kv.levels[1][0]
    assert len(host.cache) and host.num_free == 8
    first = bench.add(prompt(25, 99), 8)
    bench.step(2)
    assert bench.scheduler.preempt(first, swap=True)
    assert host.num_free == 8 - 7
    bench.run()


def test_levels_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_host_blocks"):
        KVConfig(cache_on_host=True)
    with pytest.raises(ConfigError, match="sliding window"):
        KVConfig(cache_on_host=True, num_host_blocks=4, groups=(GroupSpec(window=8),))
    with pytest.raises(ConfigError, match="num_disk_blocks"):
        KVConfig(num_disk_blocks=4)


def test_a_load_waits_for_room_rather_than_evict_what_the_host_lacks() -> None:
    """Prompts of 4 blocks that fill a device of 64 three times: sent at once, the loads of a second round would take
    more blocks at a time than the device keeps empty."""
    bench = bench_of(levels(host=512), late_copies=1)
    counters, found = bench.state.counters, 0
    for _ in range(2):
        found = counters.cached_tokens
        for number in range(48):
            bench.add(prompt(17, number), 2)
        bench.run()
    assert counters.cached_tokens - found > 0.95 * 48 * 16 and counters.found_tokens[HOST] > 0.9 * 48 * 16
    assert Rule.MAKING_ROOM in bench.reasons(DecisionKind.DEFER)


def test_requests_that_waited_for_room_are_forgotten_without_a_disk_too() -> None:
    bench = bench_of(levels())
    loading = bench.scheduler.composer.admission.loading
    load = Load(Rule.MAKING_ROOM, 4, load_s=1.0, compute_s=1.0, busy_s=0.0)
    loading.patience = {RequestId(number): (0.0, load) for number in range(100, 3000)}
    loading.waits(bench.request(bench.add(prompt(17), 2)), load)
    assert len(loading.patience) == 1


def test_nothing_is_evicted_before_it_was_copied_though_copies_are_two_steps_late() -> None:
    """Prompts of many steps, of which each takes a quarter of what the device keeps empty."""
    config = levels(host=512)
    config = replace(config, scheduler=replace(config.scheduler, max_num_batched_tokens=16))
    bench = bench_of(config, late_copies=2)
    for number in range(10):
        bench.add(prompt(49, number), 2)
    bench.run()
    again = [bench.add(prompt(49, number), 2) for number in range(10)]
    bench.run()
    assert [num_cached(bench, number) for number in again] == [48] * 10


def test_copies_and_loads_are_counted_by_level() -> None:
    bench = bench_of(levels(host=24, disk=200), late_copies=1)
    for _ in range(2):
        for number in range(24):
            bench.add(prompt(17, number), 2)
            bench.run()
    counters = bench.state.counters
    assert (
        set(counters.copied_blocks) == {"host_out", "host_in", "disk_out", "disk_in"} == set(counters.copy_s)
    )
    assert counters.copied_blocks["disk_in"] >= counters.found_tokens[2] // 4 > 0
    assert sum(counters.found_tokens) == counters.cached_tokens
    ends = bench.finished.values()
    assert sum(end.cost.from_disk for end in ends) == counters.found_tokens[2]
    assert sum(end.cost.from_host for end in ends) == counters.found_tokens[HOST]
    assert counters.loads[Rule.LOADS.value] > 0 and counters.load_saved_s > 0.0
    assert not counters.failed_copies
