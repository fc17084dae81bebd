"""The engine's process with models that share memory: slabs move, models sleep and wake, and one that cannot be woken
harms no other. Devices are fakes; the service, the conductor and the trade are those of a server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.config.engine import ModelConfig
from paceline.config.model_set import ModelShare
from paceline.core.counters import CPUWork
from paceline.core.plan import Runner
from paceline.core.sampling import SamplingParams
from paceline.core.standing import DEVICE_LOST, WEIGHTS_DROPPED, WEIGHTS_KEPT, Pulse, Standing
from paceline.engine.adapters import Adapters
from paceline.engine.conductor import Conductor, Needs, Seat
from paceline.engine.slab_trade import broken_slabs
from paceline.factory import build_engine
from paceline.kv.slabs import Owner, SlabMarket
from paceline.process import frames
from paceline.process.channel import Channel, make_header
from paceline.process.engine_service import EngineService, LogQueue
from tests.fake_adapters import Memory, read
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import engine_config, prompt

FLOOR, HOME, SPARE = 3, 2, 2
NUM_SLABS = 1 + 2 * (FLOOR + HOME) + SPARE


class Weights:
    """In the place of a model's memory: it can be slow to leave, and fail to leave or to come back."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.may_leave = threading.Event()
        self.may_leave.set()
        self.levels: list[int] = []
        self.failures = 0  # of the next attempts to wake
        self.has_room = True  # on the host
        self.on_gpu, self.levels_lost = True, DEVICE_LOST

    def let_go(self, level: int) -> None:
        assert self.may_leave.wait(20)
        if level == WEIGHTS_KEPT and not self.has_room:
            raise MemoryError("no memory can be pinned")
        self.levels.append(level)

    def open(self) -> Runner:
        if self.failures:
            self.failures -= 1
            raise OSError("the file is gone")
        return FakeRunner(self._config)


class Serving:
    """A service of two models, turned by hand."""

    def __init__(self, **shares: Any) -> None:
        self.ours, self.theirs = socket.socketpair()
        config = engine_config(
            num_blocks=NUM_SLABS * 4,
            slab_blocks=4,
            least_blocks=FLOOR * 4,
            most_slabs=NUM_SLABS,
            max_model_len=40,
        )
        self.weights = [Weights(config) for _ in range(2)]
        self.engines = [build_engine(config, FakeRunner(config)) for _ in range(2)]
        models: list[Any] = [
            SimpleNamespace(
                engine=engine,
                sleeper=weights,
                checkpoint=SimpleNamespace(spec=SimpleNamespace(vocab_size=1 << 20)),
                cpu_work=CPUWork,
                free=None,
                pulse=Pulse(),
            )
            for engine, weights in zip(self.engines, self.weights, strict=True)
        ]
        names = [ModelShare(name=name, **shares) for name in "ab"]
        homes = [range(1 + HOME * place, 1 + HOME * (place + 1)) for place in range(2)]
        owners = [
            Owner(name=each.name, floor=FLOOR, ceiling=NUM_SLABS, home=home)
            for each, home in zip(names, homes, strict=True)
        ]
        seats = [Seat(config=each, needs=Needs(awake=FLOOR + HOME)) for each in names]
        self.conductor = Conductor(seats, NUM_SLABS - 1, time.monotonic())
        configure = frames.Configure(ModelConfig(), {}, 0.02, 0.02, 1 << 20)
        market = SlabMarket(NUM_SLABS, owners)
        self.service = EngineService(models, self.conductor, market, configure, LogQueue())
        self.service._channel = Channel(self.ours, 1 << 20)
        assert self.service._trade is not None
        self.trade = self.service._trade
        self.trade.begin()
        ping = frames.encode(frames.Ping())
        self.theirs.sendall(make_header(ping, 1) + ping)  # the engine never speaks first
        self.service._turn()

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()

    def standing(self, model: int) -> Standing:
        return self.conductor.seats[model].standing

    def add(self, model: int, count: int = 1, length: int = 30) -> None:
        self.service._models[model]._has_news = True
        for number in range(count):
            self.engines[model].add(prompt(length, number), SamplingParams(max_tokens=6, temperature=0.0))

    def rest(self, model: int, level: int) -> None:
        self.service._rest(model, frames.Rest(1, level))

    def until(self, reached: Callable[[], bool]) -> None:
        until_s = time.monotonic() + 20
        while not reached():
            assert time.monotonic() < until_s, "it never happens"
            self.service._turn()
            assert list(broken_slabs(self.trade)) == []

    def answered(self) -> bool:
        return not any(engine.has_requests for engine in self.engines)


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving()
    yield made
    made.close()


def test_slabs_go_to_the_model_that_is_short_and_back(serving: Serving) -> None:
    market = serving.trade.market
    serving.add(0, 8)
    serving.until(serving.answered)
    assert len(market.slabs(0)) == FLOOR + SPARE
    serving.add(1, 8)
    serving.until(serving.answered)
    assert len(market.slabs(1)) == FLOOR + SPARE and serving.trade.num_reclaimed == SPARE


@pytest.mark.parametrize("level", [WEIGHTS_KEPT, WEIGHTS_DROPPED])
def test_a_sleepers_home_is_lent_once_its_weights_have_left_and_comes_back(
    serving: Serving, level: int
) -> None:
    serving.weights[0].may_leave.clear()
    serving.rest(0, level)
    assert serving.standing(0) is Standing.ASLEEP
    serving.add(1, 12)
    for _ in range(5):
        serving.service._turn()
    assert not serving.trade.market.in_the_way(0), "its weights are there yet"
    serving.weights[0].may_leave.set()

    def is_lent() -> bool:
        if serving.answered():  # before the weights had left
            serving.add(1, 12)
        return bool(serving.trade.market.in_the_way(0))

    serving.until(is_lent)
    serving.until(serving.answered)
    assert serving.trade.market.in_the_way(0) and serving.weights[0].levels == [level]
    serving.add(1, 12)
    serving.add(0)
    serving.until(serving.answered)
    assert serving.standing(0) is Standing.AWAKE and not serving.trade.market.in_the_way(0)


def test_an_operator_is_answered_when_the_weights_have_left(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    monkeypatch.setattr(serving.service._models[0], "answer", answers.append)
    serving.weights[0].may_leave.clear()
    serving.rest(0, WEIGHTS_KEPT)
    for _ in range(5):
        serving.service._turn()
    assert serving.standing(0) is Standing.ASLEEP and not answers
    serving.weights[0].may_leave.set()
    serving.until(lambda: bool(answers))
    assert [(each.question, each.standing, each.rejected) for each in answers] == [(1, "asleep", None)]


def test_a_deeper_sleep_that_is_asked_for_while_weights_leave_is_not_forgotten(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = []
    monkeypatch.setattr(serving.service._models[0], "answer", answers.append)
    serving.weights[0].may_leave.clear()
    serving.rest(0, WEIGHTS_KEPT)
    serving.rest(0, WEIGHTS_DROPPED)
    serving.weights[0].may_leave.set()
    serving.until(lambda: len(answers) == 2)
    assert serving.weights[0].levels == [WEIGHTS_KEPT, WEIGHTS_DROPPED]
    assert serving.standing(0) is Standing.ASLEEP


def test_an_adapter_that_is_loaded_for_a_sleeper_wakes_it(serving: Serving) -> None:
    engine = serving.engines[0]
    found: list[Any] = []
    engine.adapters = Adapters(engine.scheduler, Memory(), read)
    serving.rest(0, WEIGHTS_KEPT)
    engine.adapters.load_later("a", Path("7"), 1, found.append)
    serving.until(lambda: bool(found))
    assert serving.standing(0) is Standing.AWAKE and found[0].number == 1


def test_weights_that_cannot_be_kept_are_read_again(serving: Serving) -> None:
    serving.weights[0].has_room = False
    serving.rest(0, WEIGHTS_KEPT)
    serving.add(0)
    serving.until(serving.answered)
    assert serving.weights[0].levels == [WEIGHTS_DROPPED]


def test_a_model_that_cannot_be_woken_harms_no_other(serving: Serving) -> None:
    serving.weights[0].failures = 2
    serving.rest(0, WEIGHTS_KEPT)
    serving.add(0)
    serving.until(lambda: serving.standing(0) is Standing.FAILED)
    serving.add(1, 12)
    serving.until(lambda: not serving.engines[1].has_requests)
    assert len(serving.trade.market.slabs(1)) > FLOOR and not serving.trade.market.slabs(0)
    serving.rest(0, 0)  # an operator tries again
    serving.until(serving.answered)
    assert serving.standing(0) is Standing.AWAKE


def test_an_idle_model_sleeps_and_wakes_with_the_next_request() -> None:
    serving = Serving(idle_sleep_s=0.05)
    serving.until(lambda: serving.standing(0) is Standing.ASLEEP)
    serving.add(0)
    serving.until(serving.answered)
    assert serving.weights[0].levels and serving.service._models[0].wakes == 1
    serving.close()
