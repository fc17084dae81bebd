"""Prefixes in a store that servers share, on real kernels: output has the same bits whoever computed them, and whatever
the store answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.audit.runlog import read_run_log
from paceline.config.engine import PreemptionCosts
from paceline.core.standing import WEIGHTS_DROPPED
from paceline.errors import ConfigError
from paceline.lab.sim.replayer import replay
from paceline.runner.stores.store_level import StoreLevel
from tests.kernels import host_code
from tests.model_folder import write_model, write_weights
from tests.native import disk_victim
from tests.native.disk_victim import answer, nap, options
from tests.shared_store import Client, fake_server
from tests.waiting import wait_until

Answers = list[list[tuple[int, float]]]
NUMBERS = range(4)
FOUND = 384  # tokens of a prompt that are found when all of it is known


@pytest.fixture(autouse=True)
def cheap_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreLevel, "with_rates", disk_victim.cheap_disk)
    monkeypatch.setattr("paceline.runner.stores.store_threads.NEWS_S", 0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    host_code()
    sizes: dict[str, Any] = {"max_position_embeddings": 512, "num_attention_heads": 2}
    return write_weights(write_model(tmp_path_factory.mktemp("model"), num_key_value_heads=1, **sizes))


@pytest.fixture(scope="module")
def computed(model: Path) -> Answers:
    with LLM(str(model), enable_prefix_caching=False, **options()) as llm:
        return [answer(llm, number)[0] for number in NUMBERS]


class Shared:
    """A store, and the engines that use it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.server, self.model, self.folder = fake_server(), model, folder
        self.clients: list[Client] = []

    def connect(self, url: str) -> Client:
        self.clients.append(Client(self.server))
        return self.clients[-1]

    def engine(self, **changes: Any) -> LLM:
        given = {"kv_store": "redis://:hunter2@store", "kv_store_key": str(self.folder / "key")}
        return LLM(str(self.model), **{**given, **options(), **changes})

    def filled(self) -> None:
        """An engine has written all prompts, and is gone."""
        with self.engine() as llm:
            for number in NUMBERS:
                answer(llm, number)
            write_all(llm)


@pytest.fixture
def shared(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    made = Shared(model, tmp_path)
    monkeypatch.setattr("paceline.runner.stores.redis_store.connect", made.connect)
    yield made
    for client in made.clients:
        client.may_go.set()


def level_of(llm: LLM) -> StoreLevel:
    found = llm._front.engine.on_close.__self__  # type: ignore[attr-defined]
    assert isinstance(found, StoreLevel)
    return found


def is_on(llm: LLM) -> bool:
    return llm._front.engine.scheduler.state.tiers.has_disk


def write_all(llm: LLM) -> None:
    """However long it takes: an engine that ends waits for some seconds only."""
    engine = llm.loaded.engine
    while not engine.is_idle:
        engine.step()


def test_an_engine_with_an_empty_memory_finds_what_another_wrote(shared: Shared, computed: Answers) -> None:
    shared.filled()
    with shared.engine() as llm:
        assert [answer(llm, number) for number in NUMBERS] == [(each, FOUND) for each in computed]


def test_engines_find_what_others_write_while_they_serve_and_that_replays(
    shared: Shared, computed: Answers
) -> None:
    log = shared.folder / "run.jsonl"
    with shared.engine(run_log=str(log)) as second:
        with shared.engine() as first:
            assert answer(first, 0) == (computed[0], 0)
            write_all(first)
        wait_until(lambda: len(level_of(second)._threads.news) >= 24)  # type: ignore[union-attr]
        assert answer(second, 0) == (computed[0], FOUND)
        assert answer(second, 1) == (computed[1], 0)
        write_all(second)
    assert '"restored"' in log.read_text()
    report = replay(read_run_log(log))
    assert report.is_equal, report
    with shared.engine() as third:
        assert answer(third, 1) == (computed[1], FOUND)


def test_a_model_that_slept_finds_what_it_and_others_wrote(shared: Shared, computed: Answers) -> None:
    shared.filled()
    with shared.engine() as llm:
        assert answer(llm, 0) == (computed[0], FOUND)
        nap(llm, WEIGHTS_DROPPED)
        assert [answer(llm, number) for number in NUMBERS] == [(each, FOUND) for each in computed]


LIES: dict[str, Callable[[bytes], Any]] = {
    "lost": lambda value: None,
    "short": lambda value: value[: len(value) // 2],
    "long": lambda value: value + value,
    "flipped": lambda value: value[:-1] + bytes([value[-1] ^ 1]),
    "invented": lambda value: bytes(len(value)),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_computed_again(shared: Shared, computed: Answers, lie: str) -> None:
    shared.filled()
    with shared.engine() as llm:
        client = shared.clients[-1]
        client.lie = lambda name, value: value and LIES[lie](value)
        assert [answer(llm, number)[0] for number in NUMBERS] == computed
        assert client.num_reads and level_of(llm).work().bad and is_on(llm)


def test_swapped_values_are_computed_again(shared: Shared, computed: Answers) -> None:
    shared.filled()
    client = Client(shared.server).real
    names = sorted(name for name in client.keys("*") if client.type(name) == b"string")
    values = [client.get(name) for name in names]
    for name, value in zip(names, values[1:] + values[:1], strict=True):
        client.set(name, value)
    with shared.engine() as llm:
        assert [answer(llm, number)[0] for number in NUMBERS] == computed
        assert level_of(llm).work().bad


def test_a_store_that_never_answers_is_waited_for_no_longer_than_computing(
    shared: Shared, computed: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cheap(_: StoreLevel, costs: PreemptionCosts) -> PreemptionCosts:
        return replace(costs, token_s=1e-3, disk_block_s=1e-5)

    shared.filled()
    monkeypatch.setattr(StoreLevel, "with_rates", cheap)
    with shared.engine() as llm:
        client = shared.clients[-1]
        client.may_go.clear()  # until the test is over
        assert [answer(llm, number) for number in NUMBERS] == [(each, 0) for each in computed]
        assert client.num_reads  # it was asked
        client.may_go.set()


def test_a_store_that_goes_away_is_left_alone_and_no_request_fails(
    shared: Shared, computed: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    shared.filled()
    with shared.engine() as llm:
        shared.server.connected = False
        assert [answer(llm, number)[0] for number in NUMBERS] == computed
        wait_until(lambda: level_of(llm).work().is_off)
        shared.server.connected = True
        assert [answer(llm, number)[0] for number in NUMBERS] == computed
        assert not is_on(llm)
    assert "is off until the server is started again" in caplog.text and "hunter2" not in caplog.text
    with shared.engine() as llm:
        assert answer(llm, 0) == (computed[0], FOUND)


def test_an_engine_starts_without_its_store(
    shared: Shared, computed: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    shared.server.connected = False
    with caplog.at_level(logging.WARNING), shared.engine() as llm:
        assert answer(llm, 0) == (computed[0], 0)
        assert answer(llm, 0)[0] == computed[0]
    assert "--kv-store cannot be reached" in caplog.text and "hunter2" not in caplog.text


def test_no_thread_is_left_behind(shared: Shared) -> None:
    before = threading.active_count()
    with shared.engine():
        assert threading.active_count() > before
    wait_until(lambda: threading.active_count() <= before)


def test_another_key_finds_nothing(shared: Shared, computed: Answers) -> None:
    shared.filled()
    (shared.folder / "key").unlink()
    with shared.engine() as llm:
        assert answer(llm, 0) == (computed[0], 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"enable_prefix_caching": False}, "needs prefix caching"), ({"mode": "static"}, "--mode continuous")],
)
def test_what_cannot_be_is_refused(shared: Shared, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-store .*{message}"):
        shared.engine(**changes)
