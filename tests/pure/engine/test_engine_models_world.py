"""Worlds of several models: random traffic, adapters, levels whose copies are late and fail, sleeps, failed wakes, too
little memory, and the rules after every turn.

Engines, schedulers and the conductor are those of a server; devices are fakes on integers, which compare every answer
with the one it must be.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from paceline.config.engine import PreemptionCosts
from paceline.config.model_set import ModelShare
from paceline.core.adapter import NO_ADAPTER
from paceline.core.standing import HOST_LOST, WEIGHTS_DROPPED, Standing
from paceline.engine.conductor import Conductor, Needs, Seat, broken_rules
from paceline.engine.slab_trade import SlabTrade, broken_slabs
from paceline.kv.slabs import Owner, SlabMarket
from tests.cases import first
from tests.fake_faults import Faults
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

SEEDS = range(12)
SHORT_OF_SLABS = (28, 62, 64)  # in which a model asks for slabs of another one's floor
TURNS = 400
FLOOR, HOME = 4, 3  # slabs
LONGEST = 56  # tokens; they fit into a floor
COSTS = PreemptionCosts(token_s=1e-2, block_s=1e-4, disk_block_s=1e-3, disk_write_s=1e-3)
LONG = pytest.param(range(100, 130), TURNS, 3, marks=pytest.mark.campaign)


class World:
    """Two or three models on one device, driven as the engine's process drives them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"models:{seed}")
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        count = self.random.choice((2, 3))
        self.trade: SlabTrade | None = None
        if seed % 3:  # memory is shared
            self._share_memory(count)
        else:
            self.benches = [
                Bench(engine_config(num_blocks=self.random.choice((20, 40)))) for _ in range(count)
            ]
        seats = [self._seat(place) for place in range(count)]
        total, largest = sum(seat.needs.awake for seat in seats), max(seat.needs.awake for seat in seats)
        stays = sum(seat.needs.awake for seat in seats if seat.config.pinned)
        memory = self.random.choice((None, max(total // 2, stays + largest)))
        for bench in self.benches:
            for folder in "123":
                bench.engine.adapters.load(folder, Path(folder))
            bench.reads.finish()
        self.conductor = Conductor(seats, memory)
        self.conductor.begin()
        if self.trade is not None:
            self.trade.begin()
        for place, seat in enumerate(seats):
            if seat.standing is Standing.ASLEEP:
                self._sleep(place, seat.level)
        self.waking: dict[int, float] = {}
        self.busiest = 0  # peaks of models are out of phase

    def _share_memory(self, count: int) -> None:
        """Homes and floors of all models, and a few slabs more; blocks of models are of different sizes."""
        num_slabs = 1 + count * (FLOOR + HOME) + self.random.randint(0, 1)
        sizes = [self.random.choice((4, 5, 7)) for _ in range(count)]
        self.benches = []
        for size in sizes:
            host = self.random.choice((0, 0, 12))
            config = engine_config(
                depth=self.random.choice((0, 1)),
                num_blocks=num_slabs * size,
                slab_blocks=size,
                least_blocks=FLOOR * size,
                num_host_blocks=host,
                num_disk_blocks=host and 150,
                cache_on_host=bool(host),
                preemption_costs=COSTS if host else None,
                max_model_len=LONGEST,
                max_preemptions=self.random.choice((0, 2)),
                max_loras=self.random.choice((0, 0, 2)),
            )
            failing = self.random.choice((0.0, 0.1))
            faults = Faults(rng=random.Random(size), late_copies=2, late_moves=3, copy_failure=failing)
            self.benches.append(Bench(config, runner=FakeRunner(config, faults)))
        owners = [
            Owner(
                name=f"m{place}",
                share=self.random.choice((0.2, 1.0, 3.0)),
                floor=FLOOR,
                ceiling=self.random.choice((FLOOR + 1, num_slabs)),
                home=range(1 + place * HOME, 1 + (place + 1) * HOME),
            )
            for place in range(count)
        ]
        market = SlabMarket(num_slabs, owners)
        self.trade = SlabTrade(market, [bench.engine for bench in self.benches])

    def _seat(self, place: int) -> Seat:
        pinned = self.random.random() < 0.2
        idle_s = None if pinned or self.random.random() < 0.4 else self.random.choice((0.05, 0.5))
        awake = self.random.randint(50, 100)
        return Seat(
            config=ModelShare(
                name=f"m{place}",
                share=self.random.choice((0.2, 1.0, 3.0)),
                pinned=pinned,
                idle_sleep_s=idle_s,
                sleep_level=self.random.choice((1, 2)),
            ),
            needs=Needs(awake, awake // 2),
            wakes_s=[0.0, 0.01, 0.05],
        )

    def turn(self) -> None:
        if self.random.random() < 0.02:
            self.busiest = self.random.randrange(len(self.benches))
        for place, bench in enumerate(self.benches):
            share = 0.08 if self.trade is None else 0.9 if place == self.busiest else 0.05
            if self.random.random() < share:
                adapters = bench.engine.adapters.infos()
                bench.add(
                    prompt(self.random.randint(1, 40), self.random.randint(0, 9)),
                    self.random.randint(1, 12),
                    adapter=self.random.choice((NO_ADAPTER, NO_ADAPTER, *(each.number for each in adapters))),
                )
                self.counts["requests"] += 1
            if self.random.random() < 0.5:
                bench.reads.finish()
        self._rest_and_wake()
        if self.trade is not None:
            before = self.trade.num_reclaimed
            self.trade.settle()
            self.counts["slabs reclaimed"] += self.trade.num_reclaimed - before
        ready = [bench.engine.has_requests and not bench.engine.is_asleep for bench in self.benches]
        chosen = self.conductor.next(ready)
        if chosen is None:
            self.now_s += 0.02
        else:
            seconds = self.random.choice((0.001, 0.01, 0.05))
            self.benches[chosen].step()
            self.now_s += seconds
            self.conductor.charge(chosen, seconds)
            self.counts["steps"] += 1
        assert broken_rules(self.conductor, [bench.engine for bench in self.benches]) == []
        if self.trade is not None:
            assert list(broken_slabs(self.trade)) == []

    def _rest_and_wake(self) -> None:
        for place, due_s in list(self.waking.items()):
            if self.now_s >= due_s:
                del self.waking[place]
                self._finish_waking(place)
        if self.random.random() < 0.01:  # an operator
            place = self.random.randrange(len(self.benches))
            seat = self.conductor.seats[place]
            if seat.standing is Standing.AWAKE and not seat.config.pinned:
                self._sleep(place, self.random.choice((1, 2)))
            else:
                self.conductor.call(place)
        busy = [bench.engine.has_requests for bench in self.benches]
        for order in self.conductor.orders(self.now_s, busy):
            if order.level:
                self._sleep(order.model, order.level)
            else:
                self._begin_to_wake(order.model)

    def _sleep(self, place: int, level: int) -> None:
        bench, seat = self.benches[place], self.conductor.seats[place]
        if not bench.engine.is_asleep:
            bench.engine.sleep(levels_lost=HOST_LOST)
            bench.flush()
        if self.trade is not None and place in self.trade.market.awake():
            self.trade.slept(place)
        self.counts["sleeps with requests"] += bench.engine.has_requests
        self.counts["sleeps for room"] += level == WEIGHTS_DROPPED and self.conductor.memory is not None
        self.conductor.slept(place, max(level, seat.level))
        self.counts["sleeps"] += 1

    def _begin_to_wake(self, place: int) -> None:
        if self.trade is not None:
            self.counts["homes lent"] += bool(self.trade.market.in_the_way(place))
            if not self.trade.make_room(place):
                return
        self.conductor.waking(place)
        self.waking[place] = self.now_s + self.random.choice((0.0, 0.02, 0.1))

    def _finish_waking(self, place: int) -> None:
        if self.random.random() < 0.2:
            self.conductor.wake_failed(place)
            if self.trade is not None:
                self.trade.slept(place)
            self.counts["failed wakes"] += 1
            return
        self._wake(place)
        self.counts["wakes"] += 1

    def _wake(self, place: int) -> None:
        """With another runner, which finds what is on the disk."""
        bench = self.benches[place]
        old, bench.runner = bench.runner, FakeRunner(bench.config)
        assert isinstance(old, FakeRunner)
        bench.runner.faults, bench.runner._disk = old.faults, old._disk
        self.counts["failed copies"] += old.copies_failed
        bench.engine.wake(bench.runner)
        self.conductor.woke(place, self.now_s, 0.02)

    def end(self) -> None:
        """Every request of every model comes to its end."""
        for place, bench in enumerate(self.benches):
            if bench.engine.is_asleep:
                while self.trade is not None and not self.trade.make_room(place):
                    for other in self.benches:
                        other.step()
                self._wake(place)
            while bench.engine.has_requests:  # folders are read meanwhile
                bench.step()
                bench.reads.finish()
            bench.run()
            self._count(bench)
        if self.trade is not None:
            assert list(broken_slabs(self.trade)) == []

    def _count(self, bench: Bench) -> None:
        assert isinstance(bench.runner, FakeRunner)
        self.counts["failed copies"] += bench.runner.copies_failed
        self.counts["adapters evicted"] += bench.state.adapters.evicted
        for seen in bench.seen:
            self.counts["stores"] += len(seen.plan.store.disk)
            self.counts["fetches"] += len(seen.plan.fetch.disk)


@pytest.mark.parametrize("seed", first(1, (*SEEDS, *SHORT_OF_SLABS)))
def test_the_rules_hold_after_every_turn_and_every_request_is_answered(seed: int) -> None:
    world = World(seed)
    for _ in range(TURNS):
        world.turn()
    world.end()
    assert world.counts["steps"] > TURNS // 10


WANTED = (
    *(
        "sleeps",
        "sleeps with requests",
        "sleeps for room",
        "wakes",
        "failed wakes",
        "slabs reclaimed",
        "homes lent",
    ),
    *("stores", "fetches", "failed copies", "adapters evicted"),
)


@pytest.mark.parametrize(("seeds", "turns", "least"), [(SEEDS, TURNS // 2, 2), LONG])
def test_worlds_reach_what_they_are_there_for(seeds: range, turns: int, least: int) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed)
        for _ in range(turns):
            world.turn()
        world.end()
        counts += world.counts
    assert all(counts[name] >= least for name in WANTED), counts
