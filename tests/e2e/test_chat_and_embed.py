"""One server and one model: chat streams and calls for vectors at once, each answered as if it were alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.client_server import KEY, MODEL, NARROW_KEY, ClientServer, client_server

TEXTS = ["hello there", "a", "the quick brown fox jumps over the lazy dog", "hello there, you"]
CHATS = [
    {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "temperature": 0} for text in TEXTS
]
ROWS, BULK = 8, 2048


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    flags = ("--pooling", "mean", "--max-num-seqs", str(ROWS), "--max-waiting-requests", "4")
    with client_server(tmp_path_factory.mktemp("both"), *flags, "--scheduling-policy", "fair") as running:
        running.wait_for(200)
        yield running
        assert running.process.poll() is None
        running.wait_until(running.is_idle)
        assert "Traceback" not in running.log()


def streamed(server: ClientServer, body: dict[str, Any]) -> tuple[int, str]:
    """Status and text of a chat."""
    with server.open("POST", "/v1/chat/completions", {"model": MODEL, "stream": True, **body}) as answer:
        if answer.status != 200:
            return answer.status, answer.read().decode()
        lines = [line[6:] for line in answer.read().decode().splitlines() if line.startswith("data: {")]
    parts = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    return 200, "".join(parts)


def vectors(server: ClientServer, texts: list[str], key: str = KEY) -> np.ndarray:
    reply = server.ask("POST", "/v1/embeddings", {"model": MODEL, "input": texts}, key=key)
    assert reply.status == 200, reply.body
    return np.array([each["embedding"] for each in reply.json["data"]], np.float32)


def test_both_are_answered_as_alone(server: ClientServer) -> None:
    alone = [streamed(server, body) for body in CHATS]
    wanted = np.concatenate([vectors(server, [text]) for text in TEXTS])
    with ThreadPoolExecutor(6) as pool:
        chats = [pool.submit(streamed, server, body) for body in CHATS * 4]
        embedded = [pool.submit(vectors, server, TEXTS[shift:] + TEXTS[:shift]) for shift in (0, 1, 2, 3) * 4]
        ranks = [
            pool.submit(server.ask, "POST", "/v1/rerank", {"query": TEXTS[0], "documents": TEXTS})
            for _ in range(8)
        ]
        assert [each.result() for each in chats] == alone * 4
        for shift, each in zip((0, 1, 2, 3) * 4, embedded, strict=True):
            assert np.abs(each.result() - np.roll(wanted, -shift, axis=0)).max() < 1e-6
        for reply in ranks:
            found = {each["index"]: each["relevance_score"] for each in reply.result().json["results"]}
            assert all(abs(found[index] - wanted[0] @ wanted[index]) < 1e-6 for index in range(4))


def test_chat_is_never_refused_beside_a_bulk_call(server: ClientServer) -> None:
    """More inputs than the server has places, by far: they take one."""
    alone = [streamed(server, body) for body in CHATS[:2]]
    texts = [f"{number}: {TEXTS[2]}" for number in range(BULK)]
    with ThreadPoolExecutor(3) as pool:
        bulk = pool.submit(vectors, server, texts)
        beside = []
        while not bulk.done():
            asked = [pool.submit(streamed, server, body) for body in CHATS[:2]]
            beside += [each.result() for each in asked]
        found = bulk.result()
    assert set(beside) == set(alone)
    assert found.shape == (BULK, 64)
    some = np.concatenate([vectors(server, [texts[number]]) for number in (0, 777, BULK - 1)])
    assert np.abs(found[[0, 777, BULK - 1]] - some).max() < 1e-6


def test_each_counts_against_the_tokens_of_its_key(tmp_path: Path) -> None:
    """Embedded tokens count against a key's limit by the minute as those of chats do, on every route."""
    secret = "key-with-few-tokens"
    entry = {"name": "few", "sha256": hashlib.sha256(secret.encode()).hexdigest(), "tokens_per_minute": 600}

    class Metered(ClientServer):
        def _model_flags(self) -> list[str]:
            flags = super()._model_flags()
            with Path(flags[-1]).open("a") as keys:
                keys.write("\n" + json.dumps(entry))
            return flags

    with client_server(tmp_path, "--pooling", "mean", kind=Metered) as server:
        server.wait_for(200)
        body = {"model": MODEL, "query": "x" * 100, "documents": ["y" * 200, "z" * 100]}
        first = server.ask("POST", "/v1/rerank", body, key=secret)
        assert first.status == 200 and first.json["usage"]["prompt_tokens"] == 400
        more = server.ask("POST", "/v1/embeddings", {"input": ["x" * 150] * 2}, key=secret)
        assert (more.status, more.json["error"]["code"]) == (429, "rate_limit_exceeded")
        chat = {"messages": [{"role": "user", "content": "x" * 180}], "max_tokens": 40}
        assert server.ask("POST", "/v1/chat/completions", chat, key=secret).status == 429
        assert server.ask("POST", "/v1/embeddings", {"input": "x" * 100}, key=secret).status == 200
        assert server.ask("POST", "/v1/embeddings", {"input": "x" * 100}, key=NARROW_KEY).status == 200
