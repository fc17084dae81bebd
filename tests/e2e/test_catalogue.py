"""Bad input against a live server: in peace, without assertions, while it is saturated, while its queue is full, and
drawn at random.

`PACELINE_FUZZ_SEED` and `PACELINE_FUZZ_REQUESTS` draw other requests, and more of them. A failure names its seed and
number: `Fuzz(seed, document).request(number)` are its bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.catalogue.catalogue import ENTRIES, Run, canary, log_problems
from tests.e2e.catalogue.connections import ask_all
from tests.e2e.catalogue.entry import COMPLETIONS, GOOD, OK, QUEUE_FULL, Entry, answer_of
from tests.e2e.catalogue.fuzz import Fuzz
from tests.e2e.catalogue.served import (
    FOLDER,
    KEYS,
    NAME,
    OTHERS_PROMPT,
    VARIABLE,
    TinyServer,
    signed,
    tiny_server,
)
from tests.e2e.crowd import crowd, requests_of_a_crowd
from tests.e2e.http_server import Reply

SMALL = ("--kv-cache-memory-bytes", str(64 * 2**20))
# Numbers that have separate tests in test_catalogue_more, beside those that are not one request.
ELSEWHERE = {8, 30, 107, 108, 109, 110, 111, 112, 113, 114, 115}
HOLD_CONTEXT = 100_000  # what fills the queue takes minutes to finish
# Every entry is a request over a socket: a tenth of them in `make test`, all in the campaign. A server that is busy all
# the while gets a fortieth.
ALL = pytest.param(ENTRIES, id="all", marks=pytest.mark.campaign)
SHARE = pytest.mark.parametrize("entries", [pytest.param(ENTRIES[::10], id="a tenth"), ALL])
FORTIETH = pytest.mark.parametrize("entries", [pytest.param(ENTRIES[::40], id="a fortieth"), ALL])


def test_every_number_of_the_catalogue_is_there() -> None:
    assert {entry.number for entry in ENTRIES} == set(range(1, 121)) - ELSEWHERE


@SHARE
def test_the_catalogue(tmp_path: Path, entries: list[Entry]) -> None:
    """Also entry 113: nothing that was planted comes out, in whatever is answered, logged or counted."""
    with tiny_server(tmp_path, *SMALL, PACELINE_API_KEY="canary-key-variable-1d0c") as server:
        other = server.raw(
            signed(
                "POST", COMPLETIONS, GOOD[COMPLETIONS] | {"prompt": OTHERS_PROMPT, "echo": True}, key="beta"
            )
        )
        assert other.status == 200 and OTHERS_PROMPT in other.json["choices"][0]["text"]
        server.said.clear()
        assert Run(server).over(entries) == []
        server.wait_until_idle()
        for path in ("/metrics", "/v1/models", "/openapi.json", "/docs", "/health/deep", "/tokenizer_info"):
            assert server.get(path).status == 200
        assert log_problems(server) == []
        assert server.metric("invariant_violations_total") == 0
        secrets = (*KEYS.values(), "canary-key-variable-1d0c", VARIABLE, FOLDER, OTHERS_PROMPT)
        for secret in secrets:
            assert not [said for said in server.said if secret.encode() in said], secret
            assert secret not in server.log[server.loaded_at :], secret
            assert secret not in server.card.decode(), secret


@pytest.mark.campaign
def test_the_catalogue_without_assertions_and_with_strict_fields(tmp_path: Path) -> None:
    """Entry 114: nothing that keeps the server safe is an assertion. Unknown fields are refused here (45)."""
    unknown = (400, "unknown_parameter")
    with tiny_server(tmp_path, *SMALL, "--strict-fields", PYTHONOPTIMIZE="1") as server:
        reply = server.post(COMPLETIONS, GOOD[COMPLETIONS] | {"tempature": 1})
        assert answer_of(reply) == unknown and "temperature" in reply.json["error"]["message"]
        assert Run(server, more_answers=(unknown,), listens_often=False).over(ENTRIES) == []
        server.wait_until_idle()
        assert log_problems(server) == []


@contextmanager
def full_queue(server: TinyServer, places: int) -> Iterator[None]:
    """As many requests as the server takes, none of which ends before its client leaves."""
    endless = {**GOOD[COMPLETIONS], "max_tokens": HOLD_CONTEXT, "ignore_eos": True}
    with ExitStack() as stack:
        for _ in range(places):
            client = socket.create_connection(("127.0.0.1", server.port), 60)
            stack.enter_context(client)
            client.sendall(signed("POST", COMPLETIONS, endless, key="holder"))
        server.wait_until(lambda: server.get("/health").json == {"status": "full"})
        yield
        assert server.get("/health").json == {"status": "full"}


@SHARE
def test_the_catalogue_while_the_queue_is_full(tmp_path: Path, entries: list[Entry]) -> None:
    """Entry 115: refusals only, at once; nothing fails, nothing hangs, and afterwards everything is as before."""
    flags = ("--max-num-seqs", "2", "--max-waiting-requests", "1", "--queue-timeout", "600")
    with tiny_server(tmp_path, *flags, context=HOLD_CONTEXT) as server:
        song = canary(server)
        with full_queue(server, places=3):
            reply = server.post(COMPLETIONS, GOOD[COMPLETIONS])
            assert answer_of(reply) == QUEUE_FULL and int(reply.headers["retry-after"]) >= 1
            # What is too long for the other tests' model is not too long here: its context is larger.
            failures = Run(server, more_answers=(QUEUE_FULL, OK), sings=False).over(entries)
            assert failures == []
            assert server.get("/health/live").status == 200
        server.wait_until_idle()
        assert canary(server) == song
        assert log_problems(server) == []


def is_saturated(server: TinyServer) -> bool:
    return server.metric("num_requests_waiting") > 0


@FORTIETH
def test_the_catalogue_while_the_server_is_saturated(tmp_path: Path, entries: list[Entry]) -> None:
    """Requests wait for rows, and all of it has the answer it has in peace, the canary too."""
    with tiny_server(tmp_path, *SMALL, "--max-num-seqs", "4") as server:
        requests = requests_of_a_crowd(NAME, partial(signed, "POST", key="holder"))
        run = Run(server, busy_s=30.0)
        with crowd(server.port, requests, lambda: server.wait_until(lambda: is_saturated(server))):
            # Inputs that are long may find the tokens of the queue taken.
            full = f"{QUEUE_FULL} instead of ({OK},)"
            assert [problem for problem in run.over(entries) if full not in problem] == []
            server.wait_until(lambda: is_saturated(server))
        server.wait_until_idle()
        assert log_problems(server) == []
        assert server.metric("invariant_violations_total") == 0


# ----------------------------------------------------------------
# Requests drawn from the server's own description: no 5xx, no hang, no broken answer.


SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "1"))
NUM_REQUESTS = int(os.environ.get("PACELINE_FUZZ_REQUESTS", "5000"))
CONNECTIONS = 24
ENDS = (b"data: [DONE]\n\n", b'data: {"type":"message_stop"}\n\n', b"}\n\n")


def problem(reply: Reply | Exception) -> str:
    """What is wrong with an answer, if anything."""
    if isinstance(reply, Exception):
        return f"no answer: {type(reply).__name__} {reply}"
    if reply.status >= 500:
        return "a failure of ours"
    kind = reply.headers.get("content-type", "")
    try:
        if kind.startswith("text/event-stream"):
            is_whole = reply.body.endswith(ENDS) and b'"error":{' not in reply.body
            return "" if is_whole else "a stream without its end"
        answer_of(reply)
        if kind == "application/json" and reply.body:
            assert isinstance(reply.json, dict | list)
    except (AssertionError, ValueError, KeyError) as error:
        return f"a strange answer: {type(error).__name__} {error}"
    return ""


@pytest.mark.parametrize(
    "num_requests", [NUM_REQUESTS // 10, pytest.param(NUM_REQUESTS, marks=pytest.mark.campaign)]
)
def test_drawn_requests_are_answered(tmp_path: Path, num_requests: int) -> None:
    failures: list[str] = []
    statuses: Counter[int] = Counter()
    # A short context, so that what asks for a million tokens is soon answered.
    with tiny_server(tmp_path, "--kv-cache-memory-bytes", str(64 * 2**20), context=128) as server:
        fuzz = Fuzz(SEED, server.get("/openapi.json").json)
        song = canary(server)

        def handle(number: int, reply: Reply | Exception) -> None:
            wrong = problem(reply)
            if wrong:
                said = reply.raw[:500] if isinstance(reply, Reply) else b""
                request = fuzz.request(number)
                failures.append(
                    f"{wrong}\n  seed {SEED} number {number}: {request[:2000]!r}\n  answer: {said!r}"
                )
            if isinstance(reply, Reply):
                statuses[reply.status] += 1

        requests = map(fuzz.request, range(num_requests))
        asyncio.run(ask_all(server.port, requests, handle, connections=CONNECTIONS))
        assert not failures, "\n".join(failures[:10])
        assert canary(server) == song
        server.wait_until_idle()
        assert log_problems(server) == []
        assert server.metric("invariant_violations_total") == 0
    print(dict(statuses))
    # Neither all right nor all wrong, or it would not be looking where it should.
    assert statuses.total() == num_requests
    assert statuses[200] > num_requests // 7 and statuses[400] > num_requests // 5
