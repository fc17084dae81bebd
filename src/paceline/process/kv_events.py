"""What is cached, for routers outside, in the wire form of vLLM (`vllm/distributed/kv_events.py`): `--kv-events`.

A PUB socket sends batches, each with a topic (empty), a sequence number (8 bytes, the highest first) and msgpack. A
ROUTER socket sends the last of them again, from the sequence number that a client asks for. A thread does both, so that
no step waits for the network; a batch that finds no room is dropped, and its missing number says so.
Events hold token ids, which are prompts. Decision: docs/decisions/0063-prefix-news.md.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.core.request import BlockKey
from paceline.errors import ConfigError
from paceline.process import frames

MOST_WAITING = 10_000  # batches
REPLAYED = 10_000
MEDIUM = "GPU"  # of the engine's first level, whatever the device is
NAME_BYTES = 8  # of a block's name that are its hash
ROOT_BYTES = 32  # before the tokens of a payload
END = (-1).to_bytes(8, "big", signed=True)
LOOK_S = 0.05  # from one look for replays to the next
CLOSE_S = 1.0
_logger = logging.getLogger("paceline")


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    """One of those below; its class is its type."""


class BlockStored(Event):
    """Blocks that follow each other; their tokens stand in `token_ids`."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEventPublisher:
    """Publishes what one engine stores and evicts. The first batch says that it starts with nothing."""

    def __init__(self, places: frames.KVEventPlaces, block_size: int) -> None:
        """Raises ConfigError where there is no ZeroMQ, or no such place."""
        try:
            import zmq
        except ImportError as error:
            raise ConfigError("--kv-events needs ZeroMQ: pip install 'paceline[kv-events]'") from error
        self._block_size, self._rank = block_size, places.rank
        self._context: Any = zmq.Context()
        self._replay: Any = None
        try:
            self._pub: Any = self._context.socket(zmq.PUB)
            endpoint = shifted(places.endpoint, places.rank)
            if any(mark in endpoint for mark in ("*", "::", "ipc://")):  # as vLLM decides
                self._pub.bind(endpoint)
            else:
                self._pub.connect(endpoint)
            if places.replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.bind(shifted(places.replay, places.rank))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"--kv-events {places.endpoint}: {error}") from error
        self._next = 0
        self._waiting: queue.Queue[tuple[bytes, bytes]] = queue.Queue(MOST_WAITING)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAYED)
        self._is_closing = False
        self._put([AllBlocksCleared()])
        self._thread = threading.Thread(target=self._run, name="paceline-kv-events", daemon=True)
        self._thread.start()

    def publish(self, evicted: Sequence[bytes], stored: Sequence[BlockKey]) -> None:
        """Names that cannot be hit any more, and keys that can, a block's parent before it."""
        events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        if evicted:
            events.append(BlockRemoved([hash_of(name) for name in evicted], MEDIUM))
        last: BlockStored | None = None
        before = b""
        for key in stored:
            if last is None or not key.parent or key.parent != before:
                parent = hash_of(key.parent) if key.parent else None
                last = BlockStored([], parent, [], self._block_size, None, MEDIUM, None)
                events.append(last)
            last.block_hashes.append(hash_of(key.key))
            last.token_ids += np.frombuffer(key.payload, "<i4", self._block_size, ROOT_BYTES).tolist()
            before = key.key
        if events:
            self._put(events)

    def close(self) -> None:
        """Send what waits, for a moment."""
        self._is_closing = True
        self._thread.join(CLOSE_S)

    def _put(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        payload = msgspec.msgpack.encode(EventBatch(time.time(), events, self._rank))
        number = self._next.to_bytes(8, "big")
        self._next += 1
        try:
            self._waiting.put_nowait((number, payload))
        except queue.Full:
            _logger.warning("--kv-events: batch %d is dropped, nothing takes what waits", self._next - 1)

    def _run(self) -> None:
        while True:
            try:
                if self._replay is not None and self._replay.poll(0):
                    self._send_again()
                batch = self._waiting.get(timeout=LOOK_S)
                self._pub.send_multipart((b"", *batch))
                self._sent.append(batch)
            except queue.Empty:
                if self._is_closing:
                    break
            except Exception:
                _logger.exception("--kv-events: a batch could not be sent")
                time.sleep(LOOK_S)
        self._context.destroy(linger=int(1000 * CLOSE_S))

    def _send_again(self) -> None:
        asked = self._replay.recv_multipart()
        if len(asked) != 3:
            return
        client, _, start = asked
        for number, payload in self._sent:
            if int.from_bytes(number, "big") >= int.from_bytes(start, "big"):
                self._replay.send_multipart((client, b"", b"", number, payload))
        self._replay.send_multipart((client, b"", b"", END, b""))


def hash_of(name: bytes) -> int:
    """A block's hash as it travels."""
    return int.from_bytes(name[:NAME_BYTES], "big")


def shifted(endpoint: str, rank: int) -> str:
    """Of the engine with this number: TCP ports count up, other places get a suffix."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"--kv-events {endpoint}: has no port, as in tcp://*:5557")
    return f"{host}:{int(port) + rank}"
