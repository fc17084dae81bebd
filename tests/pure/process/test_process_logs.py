"""Log records of the engine's process: told to the other side, or shown, and never too many."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

from paceline.process import frames
from paceline.process.channel import Channel, FrameReader, Rejects, make_header
from paceline.process.engine_service import MAX_CHARS, MOST_RECORDS, LogQueue


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, 1 << 16)
    theirs.sendall(make_header(b"x", 1) + b"x")
    channel.receive()
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.fixture
def logger() -> tuple[logging.Logger, LogQueue]:
    logger, queue = logging.Logger("test", logging.INFO), LogQueue()
    logger.addHandler(queue)
    return logger, queue


def received(sock: socket.socket) -> list[frames.FromEngine]:
    """What has arrived, in whole frames."""
    sock.settimeout(5)
    reader = FrameReader(1, 1 << 20, Rejects())
    found = reader.feed(sock.recv(1 << 20))
    while reader._buffer:
        found += reader.feed(sock.recv(1))
    return [frames.decode_from_engine(payload) for payload in found]


def test_records_travel_with_level_and_traceback(
    ends: tuple[Channel, socket.socket], logger: tuple[logging.Logger, LogQueue]
) -> None:
    log, queue = logger
    log.warning("one %d", 1)
    try:
        raise RuntimeError("a reason")
    except RuntimeError:
        log.exception("two")
    log.info("no %d", "number")
    log.error("x" * 2 * MAX_CHARS)
    queue.send(ends[0])
    one, two, three, four = received(ends[1])
    assert one == frames.Log(logging.WARNING, "one 1")
    assert isinstance(two, frames.Log) and two.message == "two"
    assert two.traceback.startswith("Traceback") and two.traceback.endswith("RuntimeError: a reason")
    assert three == frames.Log(logging.INFO, "no %d")
    assert isinstance(four, frames.Log) and len(four.message) == MAX_CHARS


def test_a_flood_is_bounded_and_told_of(
    ends: tuple[Channel, socket.socket], logger: tuple[logging.Logger, LogQueue]
) -> None:
    log, queue = logger
    for number in range(MOST_RECORDS + 7):
        log.warning("%d", number)
    messages: list[str] = []
    while len(messages) < MOST_RECORDS + 1:  # a socket may not hold all of them at once
        queue.send(ends[0])
        messages += [frame.message for frame in received(ends[1]) if isinstance(frame, frames.Log)]
    assert messages == [*map(str, range(MOST_RECORDS)), "7 log records were dropped"]


def test_what_was_not_taken_is_shown(
    logger: tuple[logging.Logger, LogQueue], capsys: pytest.CaptureFixture[str]
) -> None:
    log, queue = logger
    log.warning("left over")
    queue.spill()
    assert capsys.readouterr().err == "left over\n"
