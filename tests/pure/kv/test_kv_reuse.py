"""The order that predicts reuse: what it hands out, what it learns, and that neither grows without bound."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.config.engine import KVConfig
from paceline.config.sized import Capacity
from paceline.core.request import BlockKey
from paceline.kv.block_pool import BlockPool
from paceline.kv.block_time import BlockTime
from paceline.kv.manager import KVManager
from paceline.kv.reuse import (
    BIN_OF,
    BINS,
    EPOCH_S,
    LAST_BIN,
    NUM_CLASSES,
    OLD,
    ONE_USE,
    REMEMBERED_TIMES,
    SPARE_ENTRIES,
    ReuseOrder,
    faded,
    index_of,
)
from paceline.kv.wishes import MOST_AT_ONCE, Wishes
from paceline.lab.sim.replica import arrivals_by_name, pools_with

SECOND = 1_000_000


def key(name: object) -> BlockKey:
    text = str(name).encode()
    return BlockKey(text, text)


class Cache:
    """Requests that take their blocks and let go of them at once, as blocks of one token."""

    def __init__(
        self, num_blocks: int, eviction: str = "reuse", make_pool: Callable[..., BlockPool] = BlockPool
    ) -> None:
        config = KVConfig(block_size=1, num_blocks=num_blocks + 1, eviction=eviction)
        capacity = Capacity(num_rows=2, max_blocks_per_row=num_blocks + 1)
        self.kv = KVManager(config, capacity, max_chunk=1, make_pool=make_pool)
        self.wishes = Wishes(self.kv)
        self.hits = 0

    @property
    def order(self) -> ReuseOrder:
        order = self.kv.groups[0].pool.evictable
        assert isinstance(order, ReuseOrder)
        return order

    def at(self, time_s: float) -> None:
        self.kv.block_time.set_time(time_s)

    def take(self, names: Sequence[object], row: int = 0) -> int:
        """A row takes the blocks of these names; returns how many were there."""
        keys = [key(name) for name in names]
        match = self.kv.match(keys, len(keys) + 1)
        self.kv.adopt(row, match)
        self.kv.extend(row, len(keys))
        self.kv.publish(row, keys, len(keys))
        self.hits += match.num_blocks
        return match.num_blocks

    def let_go(self, row: int = 0) -> None:
        self.kv.release(row)
        self.kv.settle()

    def ask(self, *names: object) -> int:
        found = self.take(names)
        self.let_go()
        return found

    def waiting(self) -> list[str]:
        """Names in the order they will be evicted."""
        pool = self.kv.groups[0].pool
        return [name.decode() for name in self.kv.groups[0].cache.names(list(pool.evictable))]


def test_the_end_of_a_prompt_goes_before_its_beginning() -> None:
    cache = Cache(8)
    cache.ask(*"abcd")
    assert cache.waiting() == ["d", "c", "b", "a"]
    cache.ask(*"vwxyz")
    assert cache.ask(*"abcd") == 3


def test_without_experience_what_was_freed_longest_ago_goes_first() -> None:
    """The same as least recently freed, across ages."""
    both = [Cache(20, name) for name in ("reuse", "lru")]
    for cache in both:
        for number in range(12):
            cache.at(40.0 * number)
            cache.ask(number, f"{number}b")
    assert both[0].waiting() == both[1].waiting()


def test_what_returns_is_kept_and_what_never_does_goes() -> None:
    """Users come back after 100 s; between their turns a flood of requests, each once, is larger than the cache."""

    def requests(rng: random.Random) -> list[tuple[float, list[str]]]:
        found = [(7.0 * number, [f"once-{number}-{part}" for part in range(6)]) for number in range(800)]
        for user in range(12):
            start = rng.uniform(0, 100)
            found += [
                (start + 100.0 * turn, [f"user-{user}-{part}" for part in range(4)]) for turn in range(55)
            ]
        return sorted(found)

    trace = requests(random.Random(3))
    arrivals = arrivals_by_name((time_s, map(key, names)) for time_s, names in trace)
    caches = [Cache(72, "reuse"), Cache(72, "lru"), Cache(72, make_pool=pools_with(arrivals))]
    for cache in caches:
        for time_s, names in trace:
            cache.at(time_s)
            cache.ask(*names)
    reuse, lru, belady = (cache.hits for cache in caches)
    assert lru == 0, "the flood is longer than a user's pause"
    assert belady >= reuse > belady // 2


def test_classes_are_learned_apart() -> None:
    """Blocks used often come back sooner than those used once: after a while their index is higher at every age."""
    cache = Cache(40)
    rng = random.Random(5)
    for number in range(2_000):
        cache.at(2.0 * number)
        cache.ask(f"often-{rng.randrange(4)}")
        cache.ask(f"once-{number}")
    index = cache.order.index
    assert index[(NUM_CLASSES - 1) * len(BINS)] > 10 * index[0]


def test_an_evicted_block_that_is_computed_again_counts_as_one_that_returned() -> None:
    cache = Cache(4)
    cache.ask("a")
    cache.at(50.0)
    cache.ask(*"wxyz")
    assert sum(cache.order.hits) == 0.0
    cache.ask("a")
    at = BIN_OF[50 // EPOCH_S]
    assert cache.order.hits[at] == 1.0
    uses = cache.order._blocks.uses[cache.kv.groups[0].cache.named(b"a")]
    assert ONE_USE < uses < 2 * ONE_USE, "its first use counts, as far as it has not faded"


def test_time_without_a_hit_lowers_the_index() -> None:
    cache = Cache(200)
    before = list(cache.order.index)
    for number in range(100):
        cache.at(float(number))
        cache.ask(number)
    assert cache.order.index[0] < before[0]
    assert cache.order.risk[0] > 0.0


@pytest.mark.parametrize("pause_s", [0, 3, EPOCH_S, 77, OLD * EPOCH_S - 1, OLD * EPOCH_S * 3, 10**6])
def test_blocks_at_risk_are_those_that_wait_and_those_remembered(pause_s: int) -> None:
    """Whatever the pauses between requests: no block is counted twice, or forgotten."""
    cache, rng = Cache(12), random.Random(pause_s)
    now_s = 0.0
    for number in range(120):
        now_s += rng.choice((0.0, 0.1, 1.0, float(pause_s)))
        cache.at(now_s)
        first = rng.randrange(8)
        cache.ask(*(f"{first}-{part}" for part in range(rng.randint(1, 6))), f"own-{rng.randrange(60)}")
        if number % 50 == 49:
            cache.kv.reset_cache()
        order = cache.order
        assert order._at_risk.sum() == len(order) + order.num_remembered
        assert order._at_risk.min() >= 0
        assert sorted(cache.waiting()) == sorted(
            key.key.decode() for key in cache.kv.groups[0].cache.entries().values()
        )


def test_what_is_remembered_is_bounded() -> None:
    cache = Cache(5)
    for number in range(200):
        cache.at(number / 10)
        cache.ask(number)
    assert cache.order.num_remembered == REMEMBERED_TIMES * 6  # blocks of the pool, the null block too


def test_entries_of_releases_are_bounded() -> None:
    """A prefix that is hit again and again leaves no trace of its earlier releases."""
    cache = Cache(400)
    for number in range(300):
        cache.at(float(number))
        cache.ask(*range(100), f"own-{number}")
        assert cache.order._entries <= 2 * len(cache.order) + SPARE_ENTRIES
    assert sum(map(len, cache.order._queues)) < 330, "300 with a block of their own, and few that are empty"


def test_releases_age_into_other_queues() -> None:
    cache = Cache(4)
    cache.ask("a")
    for bin_number, start in enumerate(BINS):
        cache.at(float(start * EPOCH_S))
        cache.order.pick(0)
        assert [number for number, queue in enumerate(cache.order._queues) if queue] == [bin_number]
    cache.at(1e9)
    cache.order.pick(0)
    assert cache.order._queues[LAST_BIN] and cache.waiting() == ["a"]


def test_uses_fade_by_half_in_300_seconds() -> None:
    uses = np.array([1, 1, 1, 4, 4000]) * ONE_USE
    left = faded(uses, np.array([0, 300, 150, 1200, 10**9]) * SECOND)
    assert left.tolist() == [ONE_USE, ONE_USE // 2, 724, ONE_USE // 4, 0]


def test_the_index_of_a_constant_rate_is_that_rate() -> None:
    for rate in (1e-6, 1e-4, 1e-2):
        assert index_of([rate] * len(BINS)) == pytest.approx([rate] * len(BINS))


def test_the_index_looks_ahead_to_a_better_age() -> None:
    """Blocks that return after 100 s and not before are worth keeping from the start, and worthless once it is over."""
    late = int(BIN_OF[100 // EPOCH_S])
    index = index_of([0.01 if at == late else 0.0 for at in range(len(BINS))])
    assert 0.0 < index[0] < index[late] and index[late + 1 :] == [0.0] * (LAST_BIN - late)


# -- waiting requests ----------------------------------------------------------------------------------------


def wait_for(cache: Cache, number: int, *names: object) -> None:
    """A request has waited for a second."""
    cache.wishes.comes(number, [key(name) for name in names], len(names) + 1)
    cache.at(cache.kv.block_time.now_us / SECOND + 1.0)
    cache.wishes.settle()


def test_what_waiting_requests_will_hit_goes_last() -> None:
    cache = Cache(8)
    cache.ask(*"ab")
    cache.ask(*"cd")
    cache.ask(*"ef")
    wait_for(cache, 1, *"ab")
    assert cache.waiting() == ["d", "c", "f", "e", "b", "a"]
    cache.ask(*"uvwxyz")
    assert cache.ask(*"ab") == 2


def test_of_what_is_wanted_the_last_request_loses_first() -> None:
    cache = Cache(8)
    for names in ("ab", "cd", "ef"):
        cache.ask(*names)
    for number, names in enumerate(("cd", "ab")):
        wait_for(cache, number, *names)
    assert cache.waiting() == ["f", "e", "b", "a", "d", "c"]


def test_what_no_request_waits_for_any_more_is_like_the_rest() -> None:
    cache = Cache(8)
    cache.ask(*"ab")
    wait_for(cache, 1, *"ab")
    cache.ask(*"cd")
    cache.wishes.leaves(1)
    cache.wishes.settle()
    assert cache.waiting() == ["d", "c", "b", "a"] and not cache.kv.groups[0].wanted
    assert cache.order.num_wanted() == 0


def test_what_a_tenant_leaves_beyond_its_share_goes_first() -> None:
    cache = Cache(40)
    cache.ask(*"xyz")  # of another, and older
    for names in ("abcd", "efgh"):
        cache.take([*names])
        cache.wishes.hold_to_share("alice", [key(name) for name in names], 0.125)  # five blocks
        cache.let_go()
    assert cache.waiting()[:3] == ["d", "c", "b"] and cache.order.num_wanted() == 0
    assert cache.ask(*"ab") == 2, "they are there until others need the room"
    assert cache.waiting()[:2] == ["d", "c"], "what is hit is like the rest again"
    wait_for(cache, 1, *"abcd")
    assert cache.waiting()[-4:] == ["d", "c", "b", "a"], "a request that waits is worth more"
    cache.ask(*(f"other {number}" for number in range(36)))
    assert cache.ask(*"abcd") == 4
    assert len(cache.order) == 40


def test_a_short_wait_costs_nothing_and_a_step_looks_up_few() -> None:
    cache = Cache(100)
    for number in range(40):
        cache.wishes.comes(number, [key(number)], 2)
    for time_s, num_wishes in ((0.09, 0), (1.0, MOST_AT_ONCE), (1.0, 2 * MOST_AT_ONCE), (1.0, 40)):
        cache.at(time_s)
        cache.wishes.settle()
        assert len(cache.wishes) == num_wishes


def test_two_requests_may_wait_for_one_block() -> None:
    cache = Cache(4)
    cache.ask("a")
    for number in (1, 2):
        wait_for(cache, number, "a")
    cache.wishes.leaves(1)
    cache.wishes.settle()
    cache.ask(*"xyz")
    cache.ask("w")
    assert cache.ask("a") == 1


def test_what_is_behind_a_missing_block_is_not_kept() -> None:
    cache = Cache(6)
    cache.ask(*"bc")
    wait_for(cache, 1, *"abc")
    assert cache.order.num_wanted() == 0
    cache.ask(*"a")
    assert cache.order.num_wanted() == 1, "a was computed while the request waits"


def test_a_wanted_block_that_is_evicted_all_the_same_is_wanted_when_it_is_back() -> None:
    cache = Cache(3)
    cache.ask("a")
    wait_for(cache, 1, "a")
    cache.ask(*"xyz")
    assert cache.order.num_wanted() == 0
    cache.ask("a")
    cache.ask(*"xy")
    assert cache.order.num_wanted() == 1
    assert cache.ask("a") == 1


def test_a_block_is_set_free_while_it_is_wanted() -> None:
    cache = Cache(6)
    cache.take(["a", "b"], row=1)
    wait_for(cache, 1, *"ab")
    cache.let_go(1)
    cache.ask(*"cd")
    assert cache.waiting() == ["d", "c", "b", "a"]


def test_wishes_fill_half_the_pool() -> None:
    cache = Cache(8)
    for number in range(8):
        cache.ask(number)
    for number in range(8):
        wait_for(cache, number, number)
    assert cache.order.num_wanted() == 4
    cache.wishes.leaves(0)
    cache.wishes.settle()
    assert cache.order.num_wanted() == 4 and b"4" in cache.kv.groups[0].wanted


def test_least_recently_freed_hears_no_wishes() -> None:
    cache = Cache(8, "lru")
    cache.ask("a")
    wait_for(cache, 1, "a")
    assert not len(cache.wishes) and not cache.kv.groups[0].wanted


def test_a_return_that_was_foreseen_counts_once() -> None:
    cache = Cache(4)
    cache.ask("a")
    wait_for(cache, 1, "a")
    assert sum(cache.order.hits) == 1.0
    cache.wishes.leaves(1)
    cache.ask("a")
    cache.wishes.settle()
    assert sum(cache.order.hits) == 1.0


def test_order_alone_does_not_depend_on_the_number_of_looks() -> None:
    """Two orders with the same history decide alike, whenever they were asked in between."""
    caches = [Cache(30), Cache(30)]
    for seed, cache in enumerate(caches):
        rng, looks = random.Random(9), random.Random(seed)
        for number in range(400):
            cache.at(3.0 * number)
            cache.ask((first := rng.randrange(60)), f"{first}-{rng.randrange(60)}")
            if looks.random() < 0.3:
                cache.order.pick(0)
    assert caches[0].waiting() == caches[1].waiting()
    assert caches[0].order.index == caches[1].order.index and caches[0].hits == caches[1].hits


def test_the_time_of_an_order_may_start_anywhere() -> None:
    time = BlockTime(1)
    time.set_time(1e6)
    order = ReuseOrder(4, time)
    order.entered([1], [b"a"])
    order.add([1])
    assert list(order) == [1] and order.pick(1) == [1]
