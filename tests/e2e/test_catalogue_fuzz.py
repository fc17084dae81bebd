"""Requests drawn from the server's own description: no 5xx, no hang, no broken answer.

`PACELINE_FUZZ_SEED` and `PACELINE_FUZZ_REQUESTS` draw others, and more of them. A failure names its seed and number:
`Fuzz(seed, document).request(number)` are its bytes.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.catalogue.catalogue import canary, log_problems
from tests.e2e.catalogue.connections import ask_all
from tests.e2e.catalogue.entry import answer_of
from tests.e2e.catalogue.fuzz import Fuzz
from tests.e2e.catalogue.served import tiny_server
from tests.e2e.http_server import Reply

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
            assert isinstance(reply.json, dict)
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
    assert statuses[200] > num_requests // 5 and statuses[400] > num_requests // 5
