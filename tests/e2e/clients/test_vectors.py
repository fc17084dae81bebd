"""Two hundred requests of each client that reads vectors, many at once: `openai`, LangChain, `huggingface_hub`, and the
bodies of Cohere's and Jina's. Each answer is the one of the same model without a server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI

from paceline import LLM
from tests.e2e.client_server import KEY, MODEL, ClientServer, client_server

COUNT = 200
TEXTS = [f"{'the quick brown fox ' * (number % 4)}jumps {number} times" for number in range(25)]
QUERY = TEXTS[3]
Vectors = np.ndarray


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("vectors"), "--pooling", "mean") as running:
        running.wait_for(200)
        yield running
        assert running.process.poll() is None
        running.wait_until(running.is_idle)
        assert "Traceback" not in running.log()


@pytest.fixture(scope="module")
def wanted(server: ClientServer) -> Vectors:
    with LLM(str(server.folder / MODEL), load_format="dummy", pooling="mean", max_model_len=512) as llm:
        return np.stack([output.outputs.data for output in llm.embed(TEXTS, use_tqdm=False)])


@pytest.fixture(scope="module")
def openai(server: ClientServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def all_at_once(ask: Callable[[int], Any], count: int = COUNT) -> list[Any]:
    """The answers to all requests, in their order; the first error is the test's."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, range(count)))


def texts_of(number: int) -> list[int]:
    """Which texts a request has: one to four."""
    return [(number + step) % len(TEXTS) for step in range(1 + number % 4)]


@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_openai(openai: OpenAI, wanted: Vectors, encoding: Any) -> None:
    given = {} if encoding is None else {"encoding_format": encoding}

    def ask(number: int) -> Any:
        answer = openai.embeddings.create(
            model=MODEL, input=[TEXTS[index] for index in texts_of(number)], **given
        )
        assert answer.usage.total_tokens == sum(len(TEXTS[index]) for index in texts_of(number))
        return [entry.embedding for entry in answer.data]

    for number, found in enumerate(all_at_once(ask)):
        if encoding == "base64":
            found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
        assert np.abs(np.array(found) - wanted[texts_of(number)]).max() < 1e-6


def test_langchain(server: ClientServer, wanted: Vectors) -> None:
    from langchain_openai import OpenAIEmbeddings
    from pydantic import SecretStr

    client = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SecretStr(KEY),
        check_embedding_ctx_length=False,
        max_retries=0,
    )

    def ask(number: int) -> Any:
        if number % 2:
            return [client.embed_query(TEXTS[texts_of(number)[0]])]
        return client.embed_documents([TEXTS[index] for index in texts_of(number)])

    for number, found in enumerate(all_at_once(ask)):
        assert np.abs(np.array(found) - wanted[texts_of(number)[: len(found)]]).max() < 1e-6


def test_hugging_face(server: ClientServer, wanted: Vectors) -> None:
    client = InferenceClient(model=f"{server.url}/embed", token=KEY)
    answers = all_at_once(lambda number: client.feature_extraction(TEXTS[number % len(TEXTS)], truncate=True))
    for number, found in enumerate(answers):
        assert np.abs(found[0] - wanted[number % len(TEXTS)]).max() < 1e-6


# What the libraries send, as their sources have it.
RERANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere, version 1": (
        "/v1/rerank",
        {"documents": [{"text": text} for text in TEXTS], "top_n": 3, "return_documents": True},
    ),
    "cohere, version 2": ("/v2/rerank", {"documents": TEXTS, "top_n": 3, "max_tokens_per_doc": 4096}),
    "jina": ("/v1/rerank", {"documents": TEXTS, "top_n": 3, "return_documents": False, "truncate": True}),
}


# Every request has all texts.
@pytest.mark.parametrize("count", [2 * len(TEXTS), pytest.param(COUNT, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", RERANKS)
def test_rerank(server: ClientServer, wanted: Vectors, name: str, count: int) -> None:
    path, body = RERANKS[name]

    def ask(number: int) -> Any:
        reply = server.ask("POST", path, {"model": MODEL, "query": TEXTS[number % len(TEXTS)], **body})
        assert reply.status == 200, reply.body
        return json.loads(reply.body)["results"]

    for number, found in enumerate(all_at_once(ask, count)):
        scores = wanted @ wanted[number % len(TEXTS)]
        assert len(found) == 3 and found[0]["index"] == number % len(TEXTS)
        values = [each["relevance_score"] for each in found]
        assert np.abs(np.array(values) - scores[[each["index"] for each in found]]).max() < 1e-6
        assert np.abs(np.array(values) - np.sort(scores)[::-1][:3]).max() < 1e-6
