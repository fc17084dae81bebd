"""Frames over a socket: cut at any byte, too large, of another incarnation, or no frames at all."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.process.channel import Channel, ChannelBroken, ChannelClosed, FrameReader, Rejects, make_header

LIMIT = 1000


def frame(payload: bytes, incarnation: int = 1, client: int = 0) -> bytes:
    return make_header(payload, incarnation, client) + payload


@given(st.lists(st.binary(max_size=300), max_size=12), st.lists(st.integers(1, 70), min_size=1))
def test_frames_come_out_whole_however_the_bytes_arrive(payloads: list[bytes], pieces: list[int]) -> None:
    stream = b"".join(map(frame, payloads))
    reader, found, at = FrameReader(1, LIMIT, Rejects()), [], 0
    for turn in range(len(stream) + 1):
        size = pieces[turn % len(pieces)]
        found += reader.feed(stream[at : at + size])
        at += size
    assert found == payloads


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=50).map(lambda payload: (payload, frame(payload))),
            st.integers(LIMIT + 1, 5 * LIMIT).map(lambda size: (None, frame(bytes(size)))),
            st.binary(max_size=50).map(lambda payload: (None, frame(payload, incarnation=2))),
            st.binary(max_size=50).map(lambda payload: (None, frame(payload, client=1))),
        ),
        max_size=12,
    ),
    st.integers(1, 400),
)
def test_what_is_not_wanted_is_passed_over_and_counted(
    parts: list[tuple[bytes | None, bytes]], piece: int
) -> None:
    rejects = Rejects()
    reader, found = FrameReader(1, LIMIT, rejects), []
    stream = b"".join(raw for _, raw in parts)
    for at in range(0, len(stream), piece):
        found += reader.feed(stream[at : at + piece])
    reader.at_end()
    assert found == [payload for payload, _ in parts if payload is not None]
    assert rejects.total == sum(payload is None for payload, _ in parts)


def test_a_frame_that_is_cut_off_by_the_end_is_counted() -> None:
    rejects = Rejects()
    reader = FrameReader(1, LIMIT, rejects)
    assert reader.feed(frame(b"whole") + frame(b"cut off")[:-1]) == [b"whole"]
    reader.at_end()
    assert rejects.truncated == 1


def test_bytes_that_are_no_frame_end_the_connection() -> None:
    with pytest.raises(ChannelBroken):
        FrameReader(1, LIMIT, Rejects()).feed(b"GET / HTTP/1.1\r\n")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours, LIMIT)
    yield channel, theirs
    channel.close()
    theirs.close()


def test_a_channel_takes_what_has_arrived_and_never_waits(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    assert channel.receive() == []
    theirs.sendall(frame(b"one", 7) + frame(b"two", 7) + frame(b"three", 7)[:4])
    assert channel.receive() == [b"one", b"two"]
    theirs.sendall(frame(b"three", 7)[4:])
    channel.wait(5)
    assert channel.receive() == [b"three"]


def test_a_channel_speaks_as_the_incarnation_it_was_spoken_to(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(frame(b"one", 7))
    channel.receive()
    assert channel.send(b"answer")
    assert theirs.recv(100) == frame(b"answer", 7)


def test_a_full_socket_holds_no_other_client_up(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(frame(b"one", 1))
    channel.receive()
    payload, num_sent = bytes(range(250)) * 400, 0
    while channel.send(payload):
        num_sent += 1
    assert not channel.is_free and num_sent
    theirs.settimeout(5)
    got = b""
    while len(got) < (num_sent + 1) * len(frame(payload)):
        got += theirs.recv(1 << 20)
        channel.flush()
    assert got == frame(payload) * (num_sent + 1)
    assert channel.is_free


def test_waiting_ends_when_there_is_room_again(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(frame(b"one", 1))
    channel.receive()
    while channel.send(bytes(100_000)):
        pass
    theirs.settimeout(5)
    while not channel.is_free:
        theirs.recv(1 << 20)
        started_s = time.monotonic()
        channel.wait(60)
        assert time.monotonic() - started_s < 30


def test_the_end_of_the_other_side_is_noticed(ends: tuple[Channel, socket.socket]) -> None:
    channel, theirs = ends
    theirs.sendall(frame(b"one") + b"PL")
    assert channel.receive() == [b"one"]
    theirs.close()
    with pytest.raises(ChannelClosed):
        channel.receive()
    assert channel.rejects.truncated == 1
    with pytest.raises(ChannelClosed):
        channel.send(b"anybody?")
