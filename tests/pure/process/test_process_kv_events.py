"""What an engine publishes of its cached prefixes, read by a subscriber that knows vLLM's published form alone."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.kv.prefix import KeyMaker
from paceline.process import frames
from paceline.process.kv_events import KVEventPublisher, shifted
from tests.pure.process.test_process_prefixes import Served

BLOCK = 4


@pytest.fixture
def zmq() -> Any:
    if find_spec("zmq") is None:
        if os.environ.get("PACELINE_REQUIRE_ZMQ") == "1":
            pytest.fail("zmq is not installed: pip install pyzmq==27.3.0")
        pytest.skip("zmq is not installed")
    return import_module("zmq")


class Subscriber:
    """Keeps the blocks that an engine has: hash -> hash of the block before it, and its tokens."""

    def __init__(self, zmq: Any, places: frames.KVEventPlaces) -> None:
        self._context = zmq.Context()
        self._zmq = zmq
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(places.endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(places.replay)
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.next = 0
        self.num_missed = 0
        self.ranks: set[int] = set()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self) -> None:
        """All that has come; what was missed is asked for first."""
        while self._sub.poll(0):
            topic, number, payload = self._sub.recv_multipart()
            assert topic == b"" and len(number) == 8
            number = int.from_bytes(number, "big")
            if number > self.next:
                self.num_missed += number - self.next
                self.catch_up()
            if number >= self.next:
                self._take(number, payload)

    def catch_up(self) -> None:
        self._replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(10_000), "no answer"
            _, _, number, payload = self._replay.recv_multipart()
            if number == (-1).to_bytes(8, "big", signed=True):
                assert payload == b""
                return
            if int.from_bytes(number, "big") >= self.next:
                self._take(int.from_bytes(number, "big"), payload)

    def _take(self, number: int, payload: bytes) -> None:
        assert number == self.next, "batches come in order"
        self.next = number + 1
        at, events, rank = msgspec.msgpack.decode(payload)
        assert abs(time.time() - at) < 600
        self.ranks.add(rank)
        for event in events:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.blocks.clear()
            return
        assert event["medium"] == "GPU"
        if event["type"] == "BlockRemoved":
            for each in event["block_hashes"]:
                del self.blocks[each]
            return
        assert event["type"] == "BlockStored" and event["block_size"] == BLOCK
        assert event["lora_id"] is event["lora_name"] is None
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        assert len(tokens) == BLOCK * len(event["block_hashes"])
        for at, each in enumerate(event["block_hashes"]):
            assert each not in self.blocks
            self.blocks[each] = parent, tuple(tokens[BLOCK * at : BLOCK * (at + 1)])
            parent = each

    def prefix(self, block: int | None) -> list[int] | None:
        """All tokens up to the end of a block; None where one before it is gone."""
        tokens: list[int] = []
        while block is not None:
            if block not in self.blocks:
                return None
            block, own = self.blocks[block]
            tokens[:0] = own
        return tokens


def places(folder: Path, rank: int = 0) -> frames.KVEventPlaces:
    return frames.KVEventPlaces(f"ipc://{folder}/events", f"ipc://{folder}/replay", rank)


@pytest.fixture
def published(zmq: Any, tmp_path: Path) -> Iterator[tuple[Served, KVEventPublisher, Subscriber]]:
    served, publisher = Served(), KVEventPublisher(places(tmp_path), BLOCK)
    served.service.publish_to(publisher)
    subscriber = Subscriber(zmq, places(tmp_path))
    yield served, publisher, subscriber
    publisher.close()
    subscriber.close()


def until(reached: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < until_s, "it never happens"
        time.sleep(0.002)


@pytest.mark.parametrize("num_requests", [300, pytest.param(10_000, marks=pytest.mark.campaign)])
def test_a_subscriber_has_exactly_what_is_cached_after_evictions(
    published: tuple[Served, KVEventPublisher, Subscriber], num_requests: int
) -> None:
    served, publisher, subscriber = published
    rng = random.Random(3)
    starts = [[1000 * number + each for each in range(32)] for number in range(5)]

    def follow() -> None:
        """Until it has read all that was published."""
        subscriber.read()
        if subscriber.next < publisher._next:
            until(publisher._waiting.empty)
            subscriber.catch_up()

    for count in range(num_requests):
        tokens = rng.choice(starts)[: rng.randrange(4, 33)] + [rng.randrange(9) for _ in range(6)]
        served.add(tokens, rng.choice("ab"))
        if count % 4 == 3:
            served.until(lambda: not served.engine.has_requests)
        if count % 50 == 49:
            until(lambda: follow() or subscriber.next == publisher._next)  # type: ignore[func-returns-value]
            served.turn()
    served.turn()
    until(lambda: follow() or subscriber.next == publisher._next)  # type: ignore[func-returns-value]
    names = served.cache.by_name
    assert subscriber.blocks.keys() == {int.from_bytes(name[:8], "big") for name in names}
    assert served.engine.scheduler.state.kv.num_evicted > num_requests, "there was room for all"
    assert subscriber.ranks == {0}
    # Its prefixes are those whose names the engine would make of the same tokens.
    maker, num_whole = KeyMaker(BLOCK, served.prefixes.key), 0
    for block in subscriber.blocks:
        whole = subscriber.prefix(block)
        if whole is None:
            continue
        num_whole += 1
        made = [maker.extend((), np.array(whole, np.int32), maker.root(tenant)) for tenant in "ab"]
        assert block in [int.from_bytes(keys[-1].key[:8], "big") for keys in made]
    assert num_whole > len(subscriber.blocks) // 2


def test_who_comes_late_asks_for_what_was_missed(
    published: tuple[Served, KVEventPublisher, Subscriber], zmq: Any, tmp_path: Path
) -> None:
    served, publisher, _ = published
    served.add(list(range(40)))
    served.until(lambda: not served.engine.has_requests)
    served.turn()
    until(lambda: len(publisher._sent) == publisher._next)
    late = Subscriber(zmq, places(tmp_path))
    served.add(list(range(100, 120)))

    def heard() -> bool:
        served.turn()
        late.read()
        return late.next > 0

    try:
        for number in range(200):  # its subscription is on its way
            served.add([200 + number] * 12)
            served.until(lambda: not served.engine.has_requests)
            if heard():
                break
            time.sleep(0.01)
        served.turn()
        until(lambda: late.read() or late.next == publisher._next)  # type: ignore[func-returns-value]
        assert late.num_missed > 1
        assert late.blocks.keys() == {int.from_bytes(name[:8], "big") for name in served.cache.by_name}
    finally:
        late.close()


def test_an_engine_of_a_fleet_has_its_own_port() -> None:
    assert shifted("tcp://*:5557", 0) == "tcp://*:5557"
    assert shifted("tcp://*:5557", 3) == "tcp://*:5560"
    assert shifted("ipc:///run/events", 2) == "ipc:///run/events_dp2"
    with pytest.raises(ConfigError, match="port"):
        shifted("tcp://host", 1)


def test_a_place_that_cannot_be_used_is_refused(zmq: Any) -> None:
    for endpoint in ("tcp://*:port", "nothing", "ipc:///no/such/folder/events"):
        with pytest.raises(ConfigError, match="--kv-events"):
            KVEventPublisher(frames.KVEventPlaces(endpoint, None), BLOCK)
