"""Rerank, score, classify and predict over sockets, as the clients of Cohere, Jina, vLLM and TEI send and read them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from paceline import LLM
from tests.e2e.batch_client import begin, jsonl, results, wait
from tests.e2e.client_server import KEY, MODEL, NARROW_KEY, ClientServer, client_server
from tests.model_folder import ENCODER_CONTEXT, write_encoder

QUERY = "which fox jumps?"
DOCUMENTS = ["the quick brown fox", "a", "a lazy dog", "fox jumps over"]
LONG = "the quick brown fox jumps over the lazy dog " * 4
RERANK = ("/rerank", "/v1/rerank", "/v2/rerank")


class CrossServer(ClientServer):
    """A classifier of one label."""

    labels = 1

    def _model_flags(self) -> list[str]:
        flags = super()._model_flags()
        write_encoder(Path(flags[0]), labels=self.labels)
        return flags


class LabelServer(CrossServer):
    labels = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("cross")
    flags = ("--max-num-seqs", "8", "--batch-dir", str(folder / "kept"))
    with client_server(folder, *flags, kind=CrossServer) as running:
        running.wait_for(200)
        yield running
        assert running.process.poll() is None
        running.wait_until(running.is_idle)
        assert "Traceback" not in running.log()


@pytest.fixture(scope="module")
def scores(server: ClientServer) -> tuple[list[float], list[float]]:
    """Of the documents, with the sigmoid and without, by the same model without a server."""
    with LLM(str(server.folder / MODEL), load_format="dummy") as llm:
        found = [llm.score(QUERY, DOCUMENTS, raw=raw, use_tqdm=False) for raw in (False, True)]
    return found[0], found[1]


def post(server: ClientServer, path: str, body: dict[str, Any], **more: Any) -> Any:
    reply = server.ask("POST", path, body, **more)
    found = json.loads(reply.body)
    assert reply.status == 200, found
    return found


def order(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda index: -values[index])


@pytest.mark.parametrize("path", RERANK)
def test_cohere_and_jina_get_results_in_order(
    server: ClientServer, scores: tuple[list[float], list[float]], path: str
) -> None:
    # What Cohere's client of version 1, its client of version 2 and Jina's send.
    bodies: tuple[dict[str, Any], ...] = (
        {"documents": [{"text": text} for text in DOCUMENTS], "top_n": 3, "return_documents": True},
        {"documents": DOCUMENTS, "top_n": 3, "max_tokens_per_doc": 4096, "return_documents": True},
        {"documents": DOCUMENTS, "top_n": 3, "return_documents": True, "truncate": None},
    )
    for body in bodies:
        found = post(server, path, {"model": MODEL, "query": QUERY, **body})
        assert [each["index"] for each in found["results"]] == order(scores[0])[:3]
        for each in found["results"]:
            assert abs(each["relevance_score"] - scores[0][each["index"]]) < 1e-6
            assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert found["model"] == MODEL and found["id"].startswith("rerank-")
        assert found["meta"]["api_version"]["version"] == ("2" if path == "/v2/rerank" else "1")
        # Each pair is read with its three marks.
        num_tokens = sum(len(QUERY) + len(text) + 3 for text in DOCUMENTS)
        assert found["usage"]["total_tokens"] == found["meta"]["tokens"]["input_tokens"] == num_tokens
    short = post(server, path, {"query": QUERY, "documents": DOCUMENTS, "return_documents": False})
    assert len(short["results"]) == 4 and "document" not in short["results"][0]
    told = post(server, path, {"query": QUERY, "documents": DOCUMENTS})["results"][0]
    assert ("document" in told) == (path != "/v2/rerank")


def test_tei_gets_a_list(server: ClientServer, scores: tuple[list[float], list[float]]) -> None:
    found = post(server, "/rerank", {"query": QUERY, "texts": DOCUMENTS})
    assert [each["index"] for each in found] == order(scores[0])
    assert all(set(each) == {"index", "score"} for each in found)
    raw = post(
        server,
        "/rerank",
        {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "return_text": True, "truncate": False},
    )
    assert [each["text"] for each in raw] == [DOCUMENTS[index] for index in order(scores[1])]
    assert max(abs(each["score"] - scores[1][each["index"]]) for each in raw) < 1e-6


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_vllm_gets_scores_in_order(
    server: ClientServer, scores: tuple[list[float], list[float]], path: str
) -> None:
    for names in (("text_1", "text_2"), ("queries", "documents")):
        for first in (QUERY, [QUERY], [QUERY] * 4):
            found = post(server, path, {"model": MODEL, names[0]: first, names[1]: DOCUMENTS})
            values = [each["score"] for each in found["data"]]
            assert [each["index"] for each in found["data"]] == [0, 1, 2, 3]
            assert np.abs(np.array(values) - np.array(scores[0])).max() < 1e-6
    single = post(server, path, {"text_1": QUERY, "text_2": DOCUMENTS[2]})
    assert abs(single["data"][0]["score"] - scores[0][2]) < 1e-6
    assert single["object"] == "list" and single["data"][0]["object"] == "score"


def test_long_pairs_are_cut_where_that_is_asked_for(server: ClientServer) -> None:
    body = {"query": QUERY, "documents": [LONG, "a"]}
    for cut in (
        {"truncate": True},
        {"truncate": True, "truncation_strategy": "only_second", "truncation_direction": "Left"},
        {"max_tokens_per_doc": 20},
    ):
        found = post(server, "/v1/rerank", {**body, **cut})
        most = 20 + len(QUERY) + 3 if "max_tokens_per_doc" in cut else ENCODER_CONTEXT
        assert found["usage"]["total_tokens"] == most + len(QUERY) + 1 + 3


def test_lines_of_batches_are_answered_as_calls_are(
    server: ClientServer, scores: tuple[list[float], list[float]]
) -> None:
    wanted: Any = {
        "/v1/rerank": {"query": QUERY, "documents": DOCUMENTS},
        "/v1/score": {"text_1": QUERY, "text_2": DOCUMENTS},
    }
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        for url, body in wanted.items():
            line = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": MODEL, **body}}
            wrong = {**line, "custom_id": "b", "body": {"model": MODEL}}
            batch = wait(client, begin(client, jsonl(line, wrong), url).id)
            assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
            (found,) = results(client, batch.output_file_id).values()
            answer, called = found["response"]["body"], post(server, url, body)
            for own in (answer, called):
                del own["id"]
                own.pop("created", None)
            assert answer == called
            assert batch.usage.input_tokens == called["usage"]["prompt_tokens"]
            (refused,) = results(client, batch.error_file_id).values()
            assert refused["response"]["status_code"] == 400


def test_a_client_that_leaves_ends_its_call(server: ClientServer) -> None:
    body = {"query": QUERY, "documents": [f"{number} {LONG[:90]}" for number in range(2000)]}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {NARROW_KEY}"}
    connection.request("POST", "/v1/rerank", json.dumps(body), headers)
    server.wait_until(lambda: server.metric("generations_under_way") > 0)
    assert server.ask("POST", "/score", {"text_1": "a", "text_2": "b"}, key=NARROW_KEY).status == 429
    connection.close()
    server.wait_until(server.is_idle)
    post(server, "/score", {"text_1": "a", "text_2": "b"}, key=NARROW_KEY)


MEDIA = {"image_url": {"url": "data:image/png;base64,AAAA"}}
BAD: list[tuple[str, dict[str, Any], str, str, str]] = [
    ("/v1/rerank", {"documents": ["a"]}, "query", "invalid_value", "query must be a text"),
    ("/v1/rerank", {"query": "", "documents": ["a"]}, "query", "invalid_value", "query must be a text"),
    ("/v2/rerank", {"query": 5, "documents": ["a"]}, "query", "invalid_value", "query must be a text"),
    ("/rerank", {"query": "a"}, "documents", "invalid_value", "a list of 1 to 2048 texts"),
    ("/rerank", {"query": "a", "texts": []}, "texts", "invalid_value", "a list of 1 to 2048 texts"),
    ("/rerank", {"query": "a", "texts": ["b"], "documents": ["b"]}, "texts", "invalid_value", "not both"),
    ("/v1/rerank", {"query": "a", "documents": "b"}, "documents", "invalid_value", "a list of 1"),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b", ""]},
        "documents[1]",
        "invalid_value",
        "documents[1] must be a text that is not empty",
    ),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b", [5]]},
        "documents[1]",
        "invalid_value",
        "documents[1] must be a text",
    ),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b"] * 2049},
        "documents",
        "invalid_value",
        "at most 2048 texts, not 2049",
    ),
    ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "invalid_value", "top_n must be"),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b"], "rank_fields": ["title"]},
        "rank_fields",
        "unsupported_parameter",
        "rank_fields is not supported",
    ),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b", "x" * 200]},
        "documents[1]",
        "context_length_exceeded",
        "context length is 128 tokens; the input has 204",
    ),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b", "x" * 1_000_000]},
        "documents[1]",
        "context_length_exceeded",
        "of 1000001 characters is refused unread",
    ),
    (
        "/rerank",
        {"query": "x" * 200, "texts": ["b"], "truncate": True, "truncation_strategy": "only_second"},
        "texts",
        "invalid_value",
        "its first text has 200 tokens and leaves no room",
    ),
    (
        "/v1/rerank",
        {"query": MEDIA, "documents": ["b"]},
        "query",
        "unsupported_modality",
        "type 'image_url'; this model takes text",
    ),
    (
        "/v1/rerank",
        {"query": "a", "documents": ["b", {"audio": "AAAA"}]},
        "documents[1]",
        "unsupported_modality",
        "documents[1] holds a part of type 'audio'; this model takes text",
    ),
    (
        "/v1/score",
        {"text_1": "a", "text_2": {"content": [{"type": "video_url", "video_url": {}}]}},
        "text_2",
        "unsupported_modality",
        "type 'video_url'; this model takes text",
    ),
    ("/v1/score", {"text_1": "a"}, "text_2", "invalid_value", "give text_2 or documents"),
    ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "text_1", "invalid_value", "give text_1 or"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "invalid_value", "2 texts and 3"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", "invalid_value", "a list of 1 to 2048 texts"),
    ("/classify", {"input": ["a", [5]]}, "input", "invalid_value", "input must be"),
    ("/classify", {"input": [[5], [9_999]]}, "input[1]", "invalid_value", "token id 9999 is not in"),
    ("/predict", {"inputs": [["a", "b", "c"]]}, "inputs[0]", "invalid_value", "inputs[0] must be a text, a"),
    ("/predict", {"inputs": []}, "inputs", "invalid_value", "inputs must be a text, a pair"),
    ("/predict", {"inputs": {"image": "AAAA"}}, "inputs", "unsupported_modality", "this model takes text"),
    ("/predict", {"inputs": [["a"]] * 2049}, "inputs", "invalid_value", "at most 2048 inputs, not 2049"),
]


@pytest.mark.parametrize(("path", "body", "param", "code", "message"), BAD, ids=lambda value: str(value)[:40])
def test_bad_input_names_its_field_and_harms_nothing(
    server: ClientServer,
    scores: tuple[list[float], list[float]],
    path: str,
    body: dict[str, Any],
    param: str,
    code: str,
    message: str,
) -> None:
    reply = server.ask("POST", path, body)
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["param"], error["code"]) == (400, param, code), error
    assert message in error["message"]
    (canary,) = post(server, "/score", {"text_1": QUERY, "text_2": DOCUMENTS[0]})["data"]
    assert abs(canary["score"] - scores[0][0]) < 1e-6


def test_a_cross_encoder_has_one_label_and_no_vectors(
    server: ClientServer, scores: tuple[list[float], list[float]]
) -> None:
    found = post(server, "/predict", {"inputs": [QUERY, DOCUMENTS[0]]})
    assert found == [{"score": pytest.approx(scores[0][0], abs=1e-6), "label": "kind 0"}]
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/embed", {"inputs": "a"})):
        reply = server.ask("POST", path, body)
        assert (reply.status, reply.json["error"]["code"]) == (404, "unsupported_route")
        assert f"{path} is not offered: the model's files do not say" in reply.json["error"]["message"]


VECTORS = (*RERANK, "/v1/embeddings", "/embed", "/v1/score", "/score")


def test_a_chat_model_without_pooling_says_what_is_missing(plain_server: ClientServer) -> None:
    for path in (*VECTORS, "/classify", "/predict"):
        reply = plain_server.ask("POST", path, {"inputs": ["a", {"image": 5}]})
        error = reply.json["error"]
        assert (reply.status, error["code"]) == (404, "unsupported_route")
        assert ("--pooling last or mean" if path in VECTORS else "has no labels") in error["message"]
    for path in ("/v1/audio/speech", "/v1/images/generations", "/embed_sparse", "/embed_all", "/pooling"):
        reply = plain_server.ask("POST", path, {"input": "a"})
        assert (reply.status, reply.json["error"]["code"]) == (404, "unsupported_route")
    assert plain_server.complete().status == 200


def test_classifiers_score_their_labels(tmp_path: Path) -> None:
    texts = ["hello there", "the quick brown fox"]
    with client_server(tmp_path, kind=LabelServer) as server:
        server.wait_for(200)
        with LLM(str(tmp_path / MODEL), load_format="dummy") as llm:
            wanted = [each.outputs.probs for each in llm.classify(texts, use_tqdm=False)]
        found = post(server, "/classify", {"model": MODEL, "input": texts})
        assert np.abs(np.array([each["probs"] for each in found["data"]]) - np.array(wanted)).max() < 1e-6
        best = [order(probs)[0] for probs in wanted]
        assert [each["label"] for each in found["data"]] == [f"kind {label}" for label in best]
        assert {each["num_classes"] for each in found["data"]} == {3}
        assert found["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in texts)
        (single,) = (post(server, "/predict", {"inputs": text}) for text in texts[:1])
        assert [each["label"] for each in single] == [f"kind {label}" for label in order(wanted[0])]
        many = post(server, "/predict", {"inputs": [[text] for text in texts], "truncate": True})
        assert many[0] == single and len(many) == 2
        raw = post(server, "/predict", {"inputs": texts[0], "raw_scores": True})
        values = np.exp([each["score"] for each in raw])
        assert np.abs(values / values.sum() - sorted(wanted[0], reverse=True)).max() < 1e-6
        for path, body in (
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ):
            reply = server.ask("POST", path, body)
            assert (reply.status, reply.json["error"]["code"]) == (404, "unsupported_route")
            assert "this model has 3 labels" in reply.json["error"]["message"]
