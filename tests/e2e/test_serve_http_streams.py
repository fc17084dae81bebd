"""Event streams of a live server: statuses, errors on the way, silence, clients that leave or do not read."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.http_server import FakeServer, fake_server, parse_reply, read_reply, request_bytes


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(stalled_client_timeout_s=0.5, stream_keep_alive_s=0.3, max_connections=64) as running:
        yield running
        assert running.stop() == 0


def stream_bytes(**body: object) -> bytes:
    return request_bytes("POST", "/v1/stream", json.dumps(body).encode())


def test_a_stream_arrives_whole(server: FakeServer) -> None:
    reply = server.post("/v1/stream", {"count": 3})
    assert reply.status == 200
    assert reply.body == b"data: 0 \n\ndata: 1 \n\ndata: 2 \n\ndata: [DONE]\n\n"
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-extra"] == "yes"


def test_frames_are_not_held_back(server: FakeServer) -> None:
    with server.connect() as client:
        client.sendall(stream_bytes(count=2, pause_s=0.2))
        first = b""
        while b"data: 0" not in first:
            first += client.recv(65536)
        assert b"data: 1" not in first
        read_reply_rest(client)


def read_reply_rest(client: socket.socket) -> bytes:
    data = b""
    while part := client.recv(65536):
        data += part
    return data


@pytest.mark.parametrize(
    "body, status, code",
    [({"fail_at": 0}, 500, "internal_error"), ({"busy_at": 0}, 503, "engine_unavailable")],
)
def test_what_fails_before_the_first_event_has_its_status(
    server: FakeServer, body: dict[str, int], status: int, code: str
) -> None:
    reply = server.post("/v1/stream", body)
    assert (reply.status, reply.code) == (status, code)
    assert ("retry-after" in reply.headers) == (status == 503)


@pytest.mark.parametrize(
    "body, code", [({"fail_at": 1}, "internal_error"), ({"busy_at": 1}, "engine_unavailable")]
)
def test_what_fails_later_is_one_frame_and_the_end(
    server: FakeServer, body: dict[str, int], code: str
) -> None:
    reply = server.post("/v1/stream", body)
    assert reply.status == 200
    first, error, rest = reply.body.split(b"\n\n")
    assert first.startswith(b"data: 0")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == code
    assert rest == b""
    assert b"secret" not in reply.raw


def test_a_long_wait_is_bridged_with_comments(server: FakeServer) -> None:
    reply = server.post("/v1/stream", {"first_s": 0.8, "count": 1})
    assert reply.body.startswith(b": keep-alive\n\n: keep-alive\n\ndata: 0")
    late = server.post("/v1/stream", {"first_s": 0.5, "fail_at": 0})
    assert late.status == 200
    assert b'"internal_error"' in late.body


def counts_after(server: FakeServer, name: str, before: dict[str, int]) -> None:
    server.wait_until(lambda: server.seen()[name] > before[name], 3.0)


@pytest.mark.parametrize(
    "path, body, counted",
    [
        ("/v1/slow", {}, "cancelled"),  # not streaming
        ("/v1/stream", {"first_s": 60}, "closed"),  # waiting for the first event
        ("/v1/stream", {"count": 10**9, "pause_s": 0.01}, "closed"),
        ("/v1/stream", {"count": 10**9}, "closed"),  # never returns to the event loop
    ],
)
@pytest.mark.parametrize("resets", [False, True])
def test_a_client_that_leaves_ends_its_work(
    server: FakeServer, path: str, body: dict[str, object], counted: str, resets: bool
) -> None:
    before = server.seen()
    client = server.connect()
    client.sendall(request_bytes("POST", path, json.dumps(body).encode()))
    server.wait_until(lambda: server.seen()["started"] > before["started"])
    if resets:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    client.close()
    counts_after(server, counted, before)


def test_a_client_that_leaves_before_its_body_starts_nothing(server: FakeServer) -> None:
    before = server.seen()
    with server.connect() as client:
        client.sendall(request_bytes("POST", "/v1/slow", b"{", headers=("Content-Length: 50",)))
    time.sleep(0.1)
    assert server.seen()["started"] == before["started"]


def test_a_client_that_does_not_read_is_bounded_and_cut(server: FakeServer) -> None:
    before = server.seen()
    with server.connect(receive_bytes=4096) as client:
        client.sendall(stream_bytes(count=20_000, size=1000))
        counts_after(server, "closed", before)
        made = server.seen()["frames"] - before["frames"]
        assert made < 1200  # a kilobyte each: about what the buffers of both sides hold
        # Reset, not closed: nothing unread stays with the system until it is read.
        server.wait_until(lambda: client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET)
    assert "connections_stalled_total" in server.get("/metrics").body.decode()


def test_a_slow_reader_gets_everything(server: FakeServer) -> None:
    with server.connect(receive_bytes=4096) as client:
        client.sendall(stream_bytes(count=1500, size=1000))
        data = b""
        while part := client.recv(16_384):
            data += part
            time.sleep(0.002)
    assert parse_reply(data).body.count(b"data: ") == 1501


def test_fifty_clients_leave_at_once(server: FakeServer) -> None:
    before = server.seen()
    clients = [server.connect() for _ in range(50)]
    for client in clients:
        client.sendall(stream_bytes(count=10**9, pause_s=0.05))
    server.wait_until(lambda: server.seen()["started"] >= before["started"] + 50)
    for client in clients:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.close()
    server.wait_until(lambda: server.seen()["closed"] >= before["closed"] + 50)
    server.wait_until(
        lambda: server.seen()["tasks"] <= before["tasks"] and server.seen()["fds"] <= before["fds"] + 2
    )


def test_too_many_connections_are_refused(server: FakeServer) -> None:
    clients = [server.connect() for _ in range(64)]
    try:
        with server.connect() as one_more:
            reply = read_reply(one_more)
        assert (reply.status, reply.code) == (503, "too_many_connections")
    finally:
        for client in clients:
            client.close()
    server.wait_until(lambda: server.get("/health").status == 200)
