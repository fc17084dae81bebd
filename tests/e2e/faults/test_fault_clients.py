"""D1-D9: clients that leave, stall, trickle, pipeline and repeat themselves, against a live server."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults.live import (
    ALWAYS,
    COMPLETIONS,
    MODEL,
    LiveServer,
    flags_of,
    reset,
    without_fractions,
)
from tests.e2e.http_server import read_reply, request_bytes

ENDLESS = {"prompt": "on and on", "max_tokens": 15_000, "temperature": 0, "ignore_eos": True}
STALLED_S, LATE_S = 0.5, 0.7
SOON_S = 20.0
HOOKS = {"forward": "paceline.runner.native.step:NativeStep.forward"}
MODEL_FIXTURE = "long_model"
FLAGS = flags_of(
    num_gpu_blocks_override=6000,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_waiting_requests=300,
    stalled_client_timeout=STALLED_S,
    header_timeout=LATE_S,
    body_timeout=LATE_S,
)


def gauge(server: LiveServer, name: str) -> float:
    return server.metrics()[name]


def is_running(server: LiveServer, running: int, waiting: int = 0) -> bool:
    found = server.metrics()
    return (found["num_requests_running"], found["num_requests_waiting"]) == (running, waiting)


REQUEST = request_bytes("POST", COMPLETIONS, json.dumps({"model": MODEL, **ENDLESS}).encode())


@pytest.mark.parametrize("sent", [0, 20, REQUEST.index(b"\r\n\r\n") + 4, len(REQUEST) - 10])
def test_d1_a_request_that_is_not_complete_reaches_no_engine(server: LiveServer, sent: int) -> None:
    steps, lines = gauge(server, "engine_steps_total"), len(server.log_lines())
    for rude in (False, True):
        client = server.connect()
        client.sendall(REQUEST[:sent])
        reset(client) if rude else client.close()
    server.wait_until(lambda: gauge(server, "http_connections") == 1)
    assert gauge(server, "engine_steps_total") == steps
    assert not [
        line for line in server.log_lines()[lines:] if "traceback" in line or line["level"] == "error"
    ]


def test_d2_a_client_that_leaves_the_queue_is_never_computed(server: LiveServer) -> None:
    others = [server.send(COMPLETIONS, {**ENDLESS, "stream": True}) for _ in range(4)]
    server.wait_until(lambda: is_running(server, 4))
    for stream in (False, True):
        queued = server.send(COMPLETIONS, {**ENDLESS, "stream": stream})
        server.wait_until(lambda: is_running(server, 4, 1))
        queued.close()
        server.wait_until(lambda: is_running(server, 4, 0))
        server.wait_until(lambda: server.log_lines()[-1].get("status") == 499)
        assert server.log_lines()[-1]["output"] == 0
    for client in others:
        client.close()


PREFILL = {**ENDLESS, "prompt": "p" * 1500}


@pytest.mark.parametrize("rude", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [PREFILL, ENDLESS], ids=["prefill", "decode"])
def test_d3_a_client_that_leaves_frees_its_blocks(
    server: LiveServer, body: dict[str, Any], stream: bool, rude: bool
) -> None:
    tokens, steps = gauge(server, "generation_tokens_total"), gauge(server, "engine_steps_total")
    if body is PREFILL:
        server.fault("forward", "wait", 0.2, last=ALWAYS)  # its prompt takes two dozen steps
    client = server.send(COMPLETIONS, {**body, "stream": stream})
    server.wait_until(lambda: gauge(server, "kv_cache_usage_perc") > 0)
    server.wait_until(lambda: gauge(server, "engine_steps_total") > steps + 3)
    reset(client) if rude else client.close()
    server.wait_until(server.is_idle, SOON_S)
    if body is PREFILL:
        assert gauge(server, "generation_tokens_total") == tokens
    else:
        assert gauge(server, "generation_tokens_total") > tokens


def test_d3_a_client_may_leave_at_its_last_token(server: LiveServer) -> None:
    for wait_for in (1, 2, 3):
        client = server.send(COMPLETIONS, {**ENDLESS, "stream": True, "max_tokens": 3})
        data = b""
        while data.count(b"data: ") < wait_for:
            data += client.recv(65536)
        reset(client)
        server.wait_until(server.is_idle, SOON_S)


def test_d4_two_hundred_clients_leave_at_once(server: LiveServer) -> None:
    clients = [server.send(COMPLETIONS, {**ENDLESS, "stream": number % 2 == 0}) for number in range(200)]
    server.wait_until(lambda: is_running(server, 4, 196), SOON_S)
    for client in clients:
        reset(client)
    server.wait_until(server.is_idle, SOON_S)
    assert gauge(server, "http_connections") == 1


@pytest.mark.parametrize("bytes_at_a_time", [0, 10])
def test_d5_d6_a_client_that_hardly_reads_is_bounded_and_cut(
    server: LiveServer, bytes_at_a_time: int
) -> None:
    stalled = gauge(server, "connections_stalled_total")
    before = memory_of(server.process.pid)
    large = {**ENDLESS, "stream": True, "logprobs": 5}
    with server.send(COMPLETIONS, large, receive_bytes=4096) as client:
        while gauge(server, "connections_stalled_total") == stalled:
            if bytes_at_a_time:
                client.recv(bytes_at_a_time)
            # Others do not notice.
            assert without_fractions(server.sing()) == without_fractions(server.canary)
        assert memory_of(server.process.pid) - before < 16 << 20
        server.wait_until(server.is_idle, SOON_S)


def memory_of(pid: int) -> int:
    """Bytes of memory that are a process's own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_d7_half_sent_requests_are_dropped_and_disturb_no_other(server: LiveServer) -> None:
    late = gauge(server, "connections_timed_out_total")
    pieces = [b"", REQUEST[:30], REQUEST[:-5]]
    clients = [server.connect() for _ in range(150)]
    for number, client in enumerate(clients):
        client.sendall(pieces[number % 3])
    assert server.sing() == server.canary
    for number, client in enumerate(clients):
        with client:
            if number % 3:
                assert read_reply(client).status == 408
            else:
                assert client.recv(1) == b""
    assert gauge(server, "connections_timed_out_total") == late + 150


def test_d7_a_request_that_trickles_is_given_up(server: LiveServer) -> None:
    with server.connect() as client:
        started_s = time.monotonic()
        try:
            for byte in REQUEST[:200]:
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        except OSError:
            assert time.monotonic() - started_s > LATE_S
            return
        assert read_reply(client).status == 408


def test_d8_a_second_request_during_a_stream_ends_the_connection_cleanly(server: LiveServer) -> None:
    short = json.dumps({"model": MODEL, **ENDLESS, "max_tokens": 30, "stream": True}).encode()
    with server.connect() as client:
        client.sendall(request_bytes("POST", COMPLETIONS, short, close=False))
        client.sendall(request_bytes("GET", "/health", close=False))
        reply = read_reply(client)
    assert reply.status == 200 and reply.body.endswith(b"data: [DONE]\n\n")
    assert reply.raw.count(b"HTTP/1.1 ") == 1


def test_d9_a_hundred_times_the_same_request_has_a_hundred_answers(server: LiveServer) -> None:
    body = {**ENDLESS, "max_tokens": 3}
    with ThreadPoolExecutor(20) as pool:
        replies = list(
            pool.map(lambda _: server.post(COMPLETIONS, body, "X-Request-Id: the-same"), range(100))
        )
    assert {reply.status for reply in replies} == {200}
    assert len({json.dumps(reply.json["choices"]) for reply in replies}) == 1
    assert len({reply.json["id"] for reply in replies}) == 100
    assert {reply.headers["x-request-id"] for reply in replies} == {"the-same"}
    assert len({reply.headers["x-paceline-request-id"] for reply in replies}) == 100
