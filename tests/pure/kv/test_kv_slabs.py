"""Slabs: the market that knows their owners, and a pool whose blocks come and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.config.engine import KVConfig, ModelConfig
from paceline.config.model_set import ModelShare, SharedMemory
from paceline.errors import ConfigError
from paceline.kv.block_pool import ABSENT, BlockPool
from paceline.kv.slabs import FREE, Owner, SlabMarket
from paceline.process.engine_main import share_memory
from paceline.runner import device
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def market(*limits: tuple[int, int], num_slabs: int = 12, homes: int = 0) -> SlabMarket:
    owners = [
        Owner(
            name=str(number),
            floor=floor,
            ceiling=ceiling,
            home=range(1 + homes * number, 1 + homes * (number + 1)),
        )
        for number, (floor, ceiling) in enumerate(limits)
    ]
    return SlabMarket(num_slabs, owners)


def test_free_slabs_are_taken_up_to_the_ceiling_and_the_first_is_never_given() -> None:
    both = market((1, 3), (1, 99))
    assert [both.take(0) for _ in range(4)] == [1, 2, 3, None]
    taken = [both.take(1) for _ in range(9)]
    assert taken == [4, 5, 6, 7, 8, 9, 10, 11, None]
    assert both.owner(0) == FREE and both.slabs(0) == [1, 2, 3] and both.above_floor(1) == 7
    both.give(2)
    assert both.use(0) == (2, 0, 0, 11) and both.use(1) == (8, 0, 0, 11)
    assert both.take(0) == 2


def test_a_model_gives_what_it_has_above_its_floor_and_does_not_need() -> None:
    three = market((2, 99), (2, 99), (2, 99))
    for owner, count in ((0, 2), (1, 3), (2, 6)):
        for _ in range(count):
            three.take(owner)
    nobody_short, all_short = (lambda owner: False), (lambda owner: True)
    assert three.donors(0, nobody_short) == [2, 1], "the one furthest above its share first"
    assert three.donors(0, all_short) == [2], "one that is short gives what it has above its share"
    assert three.donors(2, all_short) == [], "and not to one above its own"
    assert three.donors(1, nobody_short) == [2], "a floor is not touched"


def test_the_home_of_a_sleeper_is_lent_last_and_comes_back() -> None:
    both = market((1, 99), (1, 99), num_slabs=8, homes=2)
    assert both.free() == [5, 6, 7] and both.owner(1) == 0 and both.awake() == [0, 1]
    both.leave_home(0)
    assert both.free() == [5, 6, 7, 1, 2]
    assert [both.take(1) for _ in range(4)] == [5, 6, 7, 1]
    assert both.take(1, lent=False) is None
    assert both.in_the_way(0) == [1]
    with pytest.raises(AssertionError):
        both.come_home(0)
    both.give(1)
    both.come_home(0)
    assert both.awake() == [0, 1] and both.free() == []


def test_blocks_leave_a_pool_and_come_back() -> None:
    pool = BlockPool(9)
    pool.lose(np.array([3, 4, 5]))
    assert (pool.usable, pool.num_free) == (5, 5) and pool.refs[3:6].tolist() == [ABSENT] * 3
    assert sorted(pool.allocate(5).tolist()) == [1, 2, 6, 7, 8]
    pool.gain(np.array([3, 4, 5]))
    assert sorted(pool.allocate(3).tolist()) == [3, 4, 5] and pool.usable == 8
    with pytest.raises(AssertionError):
        pool.lose(np.array([3]))
    with pytest.raises(AssertionError):
        pool.gain(np.array([6]))


def slab_bench() -> Bench:
    """Slabs of four blocks of four tokens: 1, 2 and 3 are there, 4 and 5 are not."""
    bench = Bench(engine_config(num_blocks=24, slab_blocks=4, least_blocks=8, most_slabs=5, max_model_len=28))
    for slab in (1, 2, 3):
        assert bench.engine.move_slab(slab, gained=True)
    return bench


def test_what_is_cached_in_a_slab_goes_with_it_and_rows_are_computed_again() -> None:
    bench = slab_bench()
    kv = bench.engine.scheduler.state.kv
    bench.add(prompt(10, 1), 2)
    bench.run()
    assert len(kv.groups[0].cache) and len(kv.slabs.spare()) == 3
    cached = next(iter(kv.groups[0].cache.entries())) // 4
    assert kv.slabs.spare()[-1] == cached, "one that holds nothing goes first"
    assert bench.engine.move_slab(cached, gained=False)
    assert not len(kv.groups[0].cache) and cached not in kv.slabs.numbers()
    bench.add(prompt(10, 2), 6)
    bench.step(2)
    held = int(kv.groups[0].table[0, 0]) // 4
    assert held not in kv.slabs.spare()
    assert bench.engine.move_slab(4, gained=True) and bench.engine.move_slab(held, gained=False)
    assert bench.engine.scheduler.state.rows.num_live == 0, "its row was preempted"
    bench.run()  # and its answer is the same


def test_a_request_must_fit_when_the_pool_is_smallest() -> None:
    bench = slab_bench()
    kv = bench.engine.scheduler.state.kv
    assert kv.can_ever_hold(28) and kv.slabs.least_usable == (8,) and not kv.can_ever_hold(33)


def test_sizes_of_a_model_follow_from_what_is_shared() -> None:
    shared = SharedMemory(num_slabs=11, slab_bytes=1000, kv_slabs=8, part=0.5)
    given = {"block_size": 4}
    sizes = shared.sizes(given, 100, 10_000, None)
    assert (sizes["num_blocks"], sizes["slab_blocks"]) == (110, 10)
    assert sizes["max_model_len"] == (4 * 10 - 1) * 4 and sizes["least_blocks"] == 40
    short = shared.sizes({**given, "max_model_len": 20}, 100, 20, None)
    assert (short["least_blocks"], short["most_slabs"]) == (10, 11)
    exact = shared.sizes({**given, "max_model_len": 20}, 100, 20, 2500)
    assert (exact["least_blocks"], exact["most_slabs"]) == (30, 3)
    with pytest.raises(ConfigError, match="--max-model-len 200 takes"):
        shared.sizes({**given, "max_model_len": 200}, 100, 200, 2500)
    with pytest.raises(ConfigError, match="holds no KV block"):
        shared.sizes(given, 1001, 20, None)
    with pytest.raises(ConfigError, match="whole slabs"):
        KVConfig(num_blocks=10, slab_blocks=4, least_blocks=4)


def test_limits_of_shared_memory_are_refused_where_none_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"a": "cpu", "b": "cpu", "c": "cuda"}
    monkeypatch.setattr(device, "choose_device", lambda model: devices[model.model])

    def shared(*names: str, **limits: Any) -> list[SharedMemory | None]:
        return share_memory([(ModelConfig(model=name), {}, ModelShare(**limits)) for name in names], None)

    assert shared("a") == shared("c") == [None] and shared("a", "b") == [None, None]
    with pytest.raises(ConfigError, match="several models on a GPU"):
        shared("a", "b", kv_floor_bytes=1 << 20)
    with pytest.raises(ConfigError, match="the same --device"):
        shared("a", "c")
