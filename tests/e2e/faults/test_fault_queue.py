"""Q1, Q3, Q4: a queue that is full, waiting that takes too long, and requests that want more places than are left."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.e2e.faults.live import (
    ALWAYS,
    COMPLETIONS,
    LiveServer,
    error_of,
    flags_of,
)
from tests.e2e.http_server import read_reply

PLACES = 8
HOOKS = {
    "forward": "paceline.runner.native.step:NativeStep.forward",
    "tokenize": "paceline.text.tokenizer:Tokenizer._encode",
}
LONG = {"prompt": "on and on", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 2}
FLAGS = flags_of(
    num_gpu_blocks_override=200,
    max_num_seqs=2,
    max_waiting_requests=PLACES - 2,
    queue_timeout=1.5,
    request_timeout=4.0,
)


@contextmanager
def taken(server: LiveServer, places: int) -> Iterator[list[socket.socket]]:
    """So many places are taken by requests that take their time."""
    server.fault("forward", "wait", 0.05, last=ALWAYS)
    clients: list[socket.socket] = []
    with ExitStack() as stack:
        for number in range(places):  # one by one, so that their order is known
            body = {**LONG, "stream": number % 2 == 0}
            clients.append(stack.enter_context(server.send(COMPLETIONS, body)))
            server.wait_until(lambda: server.metrics()["admission_places_taken"] == len(clients))
        yield clients


def test_q1_a_full_queue_answers_before_anything_is_read(server: LiveServer) -> None:
    with taken(server, PLACES):
        server.wait_until(lambda: server.metrics()["admission_places_taken"] == PLACES)
        assert server.get("/health/ready").json["status"] == "full"
        server.fault("tokenize", "raise", last=ALWAYS)  # a request that gets so far is answered with 500
        for _ in range(20):
            reply = server.post(COMPLETIONS, SHORT)
            assert (reply.status, reply.code) == (429, "queue_full")
            assert int(reply.headers["retry-after"]) >= 1
        assert not server.struck("tokenize")


def test_q3_waiting_and_running_have_their_limits(server: LiveServer) -> None:
    with taken(server, 4) as clients:
        stream, plain, *queued = [read_reply(client) for client in clients]
    for reply in queued:
        assert (reply.status, reply.code) == (503, "queue_timeout")
        assert "retry-after" in reply.headers
    assert (plain.status, plain.code) == (504, "deadline_exceeded")
    error = error_of(stream)
    assert stream.status == 200 and error is not None and error["code"] == "deadline_exceeded"


def test_q4_all_places_or_none(server: LiveServer) -> None:
    branches = {**SHORT, "temperature": 1.0, "seed": 1}
    with taken(server, 4):
        server.wait_until(lambda: server.metrics()["admission_places_taken"] == 4)
        reply = server.post(COMPLETIONS, {**branches, "n": PLACES})
        assert (reply.status, reply.code) == (429, "queue_full")
        assert server.metrics()["admission_places_taken"] == 4
        with server.send(COMPLETIONS, {**branches, "n": 4}):
            server.wait_until(lambda: server.metrics()["admission_places_taken"] == PLACES)
    server.heal()
    server.wait_until(server.is_idle)
    assert len(server.post(COMPLETIONS, {**branches, "n": PLACES}).json["choices"]) == PLACES
