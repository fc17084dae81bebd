"""E1-E3, E5-E10, G1, G2: an engine that fails, computes nonsense, dies, hangs or babbles, as clients see it."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.crowd import crowd, requests_of_a_crowd
from tests.e2e.faults.live import (
    ALWAYS,
    COMPLETIONS,
    MODEL,
    LiveServer,
    error_of,
    flags_of,
    is_alive,
    live_server,
    said,
    stop_and_check,
    wait_for_end,
)
from tests.e2e.http_server import Reply, request_bytes

HOOKS = {
    "forward": "paceline.models.decoder:Decoder.forward",
    "layer": "paceline.models.decoder:Decoder._layer",
    "logits": "paceline.models.decoder:Decoder.logits",
    "sample": "paceline.runner.sampling.sampler:Sampler.sample",
    "mask": "paceline.text.guide.matcher:Matcher.mask",
    "send": "paceline.process.supervisor:Link.send",
    "deliver": "paceline.process.engine_service:EngineService._deliver",
}
GONE = {"engine_unavailable"}
STUCK_S, REPLACED_S = 3.0, 7.0
TOLD_S = 10.0  # within which every client learns of it; a second on a machine that does nothing else
FLAGS = flags_of(
    # Parts of a native step cannot be wrapped.
    cpu_backend="torch",
    num_gpu_blocks_override=96,
    max_num_seqs=8,
    stuck_after_s=STUCK_S,
    restart_after_s=REPLACED_S,
    max_restarts=20,
    restart_backoff_s=0.0,
)


def body(number: int, **fields: Any) -> tuple[str, dict[str, Any]]:
    prompt = {"prompt": f"request number {number} of some", "temperature": 0, "ignore_eos": True}
    return COMPLETIONS, {**prompt, "max_tokens": 12, "stream": number % 2 == 0, **fields}


def begin(server: LiveServer, pool: ThreadPoolExecutor, **fields: Any) -> list[Future[Reply]]:
    """Requests of both kinds that are under way, at steps slow enough for all to be there at once.

    On a busy machine one of them may end before the last has begun, or meet an engine that has just been replaced and
    is late with its first heartbeats: then all begin again.
    """
    ended: set[str] = set()
    for _ in range(5):
        server.wait_until(lambda: server.get("/health/ready").status == 200)
        server.fault("forward", "wait", 0.03, last=ALWAYS)
        futures = [pool.submit(server.post, *body(number, **fields)) for number in range(8)]
        while not any(future.done() for future in futures):
            if server.metrics()["num_requests_running"] == 8:
                return futures
            time.sleep(0.02)
        ended |= codes([future.result() for future in futures])
    raise AssertionError(f"eight requests never ran at once; they ended with {ended}")


def codes(replies: list[Reply]) -> set[str]:
    return {"" if error is None else error["code"] for error in map(error_of, replies)}


@pytest.mark.parametrize("kind", ["raise", "device_memory", "memory"])
def test_e1_e3_a_computation_that_fails_once_is_noticed_by_no_client(server: LiveServer, kind: str) -> None:
    alone = [said(server.post(*body(number))) for number in range(4)]
    failed = server.metrics()["engine_failed_steps_total"]
    server.fault("forward", kind, first=4)
    assert [said(reply) for reply in server.all_at_once([body(number) for number in range(4)])] == alone
    server.wait_until(lambda: server.metrics()["engine_failed_steps_total"] == failed + 1)


def test_e2_an_engine_that_always_fails_is_replaced(server: LiveServer) -> None:
    engine = server.engine
    server.fault("forward", "raise", first=5, last=ALWAYS)
    assert codes(server.all_at_once([body(number) for number in range(8)])) <= GONE | {"internal_error"}
    # Two failures end the requests under way; the third in a row, with the next request, ends the engine.
    assert codes([server.post(*body(number)) for number in range(2)]) <= {"starting", "internal_error", *GONE}
    wait_for_end([engine])
    server.heal()
    server.wait_until(lambda: server.get("/health/ready").status == 200, 60.0)
    assert server.engine != engine


@pytest.mark.parametrize("token", [-1, 100, 2**31, 2**40])
def test_e6_an_unknown_token_fails_its_request_alone(server: LiveServer, token: int) -> None:
    alone = [said(server.post(*body(number))) for number in range(4)]
    server.fault("sample", "token", token, first=3)
    replies = server.all_at_once([body(number) for number in range(4)])
    assert sorted(codes(replies)) == ["", "numerical_error"]
    assert sum(error_of(reply) is not None for reply in replies) == 1
    for reply, answer in zip(replies, alone, strict=True):
        assert error_of(reply) is not None or said(reply) == answer


def test_e5_a_row_that_is_not_finite_fails_alone(server: LiveServer) -> None:
    alone = [said(server.post(*body(number))) for number in range(4)]
    server.fault("logits", "nan", "first", first=3)
    replies = server.all_at_once([body(number) for number in range(4)])
    assert [error["code"] for error in map(error_of, replies) if error is not None] == ["numerical_error"]
    for reply, answer in zip(replies, alone, strict=True):
        assert error_of(reply) is not None or said(reply) == answer
    assert said(server.post(*body(0))) == alone[0]  # nothing of it was kept for others


def test_e5_a_model_without_any_finite_number_is_loaded_again(server: LiveServer) -> None:
    engine = server.engine
    server.fault("logits", "nan", "all", last=ALWAYS)
    seen = set()
    for number in range(4):
        reply = server.post(*body(number))
        seen |= codes([reply])
        if not is_alive(engine):
            break
    assert "numerical_error" in seen and seen <= {"numerical_error", "starting", *GONE}
    wait_for_end([engine])
    server.heal()
    server.wait_until(lambda: server.get("/health/ready").status == 200, 60.0)
    assert server.engine != engine


GUIDED = {"structured_outputs": {"regex": "[a-f]{24}"}, "max_tokens": 40, "ignore_eos": False}


@pytest.mark.parametrize("code", ["grammar_error", "grammar_too_complex"])
@pytest.mark.parametrize("number", [0, 1])  # a stream, and a whole answer
@pytest.mark.parametrize("is_saturated", [False, True])
def test_g1_a_guide_that_cannot_go_on_ends_its_request_alone(
    server: LiveServer, code: str, number: int, is_saturated: bool
) -> None:
    with neighbours(server) if is_saturated else nullcontext():
        break_a_guide(server, code, number)


def neighbours(server: LiveServer) -> AbstractContextManager[None]:
    """More requests than rows, none of them with a form."""
    requests = requests_of_a_crowd(MODEL, signed, guided=False)
    return crowd(server.port, requests, lambda: server.wait_until(lambda: is_full(server)))


def is_full(server: LiveServer) -> bool:
    return server.metrics()["num_requests_waiting"] > 0


def signed(path: str, body: dict[str, Any]) -> bytes:
    return request_bytes("POST", path, json.dumps(body).encode())


def break_a_guide(server: LiveServer, code: str, number: int) -> None:
    guided, others = body(number, **GUIDED), [body(index) for index in range(2, 5)]
    whole = said(server.post(*guided))  # compiled, so that masks are those of steps from here on
    alone = [said(server.post(*each)) for each in others]
    server.fault("mask", "broken", code, first=7, last=ALWAYS)
    broken, *replies = server.all_at_once([guided, *others])
    assert codes([broken]) == {code}
    assert [said(reply) for reply in replies] == alone
    server.heal()
    assert said(server.post(*guided)) == whole  # nothing of it was kept for others


@pytest.mark.parametrize("is_saturated", [False, True])
def test_g2_masks_that_fail_once_are_noticed_by_no_client(server: LiveServer, is_saturated: bool) -> None:
    bodies = [body(0, **GUIDED), body(1, **GUIDED), body(2), body(3)]
    alone = [said(server.post(*each)) for each in bodies]
    failed = server.metrics()["engine_failed_steps_total"]
    with neighbours(server) if is_saturated else nullcontext():
        server.fault("mask", "raise", first=5)
        assert [said(reply) for reply in server.all_at_once(bodies)] == alone
    server.wait_until(lambda: server.metrics()["engine_failed_steps_total"] == failed + 1)


def test_e7_every_request_is_answered_when_the_engine_dies(server: LiveServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = begin(server, pool, max_tokens=200)
        engine = server.engine
        os.kill(engine, signal.SIGKILL)
        wait_for_end([engine])
        server.wait_until(lambda: server.get("/health/ready").status == 503, TOLD_S)
        died_s = time.monotonic()
        assert codes([future.result() for future in futures]) == GONE
        assert time.monotonic() - died_s < TOLD_S
    assert server.get("/health/live").status == 200


def test_e8_a_stopped_engine_is_told_and_may_come_back(server: LiveServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        futures = begin(server, pool, max_tokens=200)
        engine = server.engine
        os.kill(engine, signal.SIGSTOP)
        try:
            server.wait_until(lambda: server.get("/health/ready").status == 503, STUCK_S + TOLD_S)
            assert server.get("/health/live").status == 200
            assert codes([future.result() for future in futures]) <= GONE | {""}
            assert codes([server.post(*body(1))]) == GONE
        finally:
            os.kill(engine, signal.SIGCONT)
    server.wait_until(lambda: server.get("/health/ready").status == 200)
    assert server.engine == engine


def test_e8_an_engine_that_stays_silent_is_replaced(server: LiveServer) -> None:
    engine = server.engine
    server.fault("forward", "wait", 3600)
    assert codes([server.post(*body(1))]) == GONE
    wait_for_end([engine], REPLACED_S + TOLD_S)
    assert b"Current thread" in server.log_path.read_bytes()


def test_e8_a_long_step_is_not_taken_for_one_that_hangs(server: LiveServer) -> None:
    alone = said(server.post(*body(1)))
    server.fault("layer", "wait", 0.55 * STUCK_S, last=2)  # both layers of one step
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.post, *body(1))
        while not slow.done():
            assert server.get("/health/ready").status == 200
            time.sleep(0.1)
        assert said(slow.result()) == alone


def test_e10_frames_that_make_no_sense_are_counted(server: LiveServer) -> None:
    alone = said(server.post(*body(1)))
    before = server.metrics()["engine_frames_rejected_total"]
    server.fault("send", "junk")
    assert said(server.post(*body(1))) == alone
    server.fault("deliver", "babble", first=3)
    assert said(server.post(*body(1))) == alone
    server.wait_until(lambda: server.metrics()["engine_frames_rejected_total"] == before + 6 + 2)


def test_e7_an_engine_that_is_lost_for_good_ends_the_server_with_70(model: Path, tmp_path: Path) -> None:
    with live_server(model, tmp_path / "w", *flags_of(max_restarts=0, num_gpu_blocks_override=96)) as server:
        os.kill(server.engine, signal.SIGKILL)
        stop_and_check(server, TOLD_S, 70)


def test_e9_an_engine_does_not_outlive_the_http_process(model: Path, tmp_path: Path) -> None:
    with live_server(model, tmp_path / "w", *flags_of(num_gpu_blocks_override=96)) as server:
        engine = server.engine
        with server.send(*body(0, max_tokens=200)) as client:
            assert client.recv(1)
            server.process.kill()
            wait_for_end([engine], TOLD_S)
