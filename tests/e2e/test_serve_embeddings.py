"""/v1/embeddings and TEI's /embed over sockets: texts and token ids, floats and base64, many inputs beside streams,
clients' libraries, what is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI

from paceline import LLM
from tests.e2e.batch_client import begin, jsonl, results, wait
from tests.e2e.client_server import COMPLETION, KEY, MODEL, ClientServer, client_server

ROUTE = "/v1/embeddings"
TEXTS = ["hello there", "a", "the quick brown fox jumps over the lazy dog", "hello there, you"]
WIDTH, LONGEST = 64, 4096


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    flags = (
        "--pooling",
        "mean",
        "--max-model-len",
        str(LONGEST),
        "--max-num-seqs",
        "8",
        "--max-waiting-requests",
        "4",
    )
    folder = tmp_path_factory.mktemp("embeddings")
    with client_server(folder, *flags, "--batch-dir", str(folder / "kept")) as running:
        running.wait_for(200)
        yield running
        assert running.process.poll() is None
        running.wait_until(running.is_idle)


@pytest.fixture(scope="module")
def wanted(server: ClientServer) -> dict[str, np.ndarray]:
    """The vectors of the same model without a server."""
    with LLM(str(Path(server.folder) / MODEL), load_format="dummy", pooling="mean", max_model_len=512) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    return {text: output.outputs.data for text, output in zip(TEXTS, outputs, strict=True)}


def post(server: ClientServer, path: str = ROUTE, **body: Any) -> tuple[int, Any]:
    reply = server.ask("POST", path, {"model": MODEL, **body})
    return reply.status, json.loads(reply.body)


def vectors(server: ClientServer, **body: Any) -> np.ndarray:
    status, answer = post(server, **body)
    assert status == 200, answer
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.array([entry["embedding"] for entry in answer["data"]], np.float32)


def test_texts_have_the_vectors_of_the_model(server: ClientServer, wanted: dict[str, np.ndarray]) -> None:
    together = vectors(server, input=TEXTS)
    assert np.abs(together - np.stack([wanted[text] for text in TEXTS])).max() < 1e-6
    for text in TEXTS:
        assert np.abs(vectors(server, input=text)[0] - wanted[text]).max() < 1e-6


def test_token_ids_base64_and_dimensions(server: ClientServer, wanted: dict[str, np.ndarray]) -> None:
    status, answer = post(server, input=TEXTS[0], encoding_format="base64")
    found = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert status == 200 and np.abs(found - wanted[TEXTS[0]]).max() < 1e-6
    assert answer["object"] == "list" and answer["model"] == MODEL
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    ids = json.loads(server.ask("POST", "/tokenize", {"model": MODEL, "prompt": TEXTS[0]}).body)["tokens"]
    assert np.abs(vectors(server, input=ids)[0] - wanted[TEXTS[0]]).max() < 1e-6
    assert np.abs(vectors(server, input=[ids, ids[:1]])[0] - wanted[TEXTS[0]]).max() < 1e-6
    short = vectors(server, input=TEXTS[0], dimensions=16)[0]
    cut = wanted[TEXTS[0]][:16]
    assert np.abs(short - cut / np.linalg.norm(cut)).max() < 1e-6


def test_the_official_client_reads_them(server: ClientServer, wanted: dict[str, np.ndarray]) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        for encoding in ("float", "base64"):
            answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=encoding)
            if encoding == "float":
                found = np.array([entry.embedding for entry in answer.data])
                assert np.abs(found - np.stack([wanted[text] for text in TEXTS])).max() < 1e-6
        plain = client.embeddings.create(model=MODEL, input=TEXTS)  # the client asks for base64 by itself
        assert np.abs(np.array(plain.data[0].embedding) - wanted[TEXTS[0]]).max() < 1e-6


def test_langchain_reads_them(server: ClientServer, wanted: dict[str, np.ndarray]) -> None:
    from langchain_openai import OpenAIEmbeddings
    from pydantic import SecretStr

    client = OpenAIEmbeddings(
        model=MODEL,
        base_url=f"{server.url}/v1",
        api_key=SecretStr(KEY),
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    found = np.array(client.embed_documents(TEXTS))
    assert np.abs(found - np.stack([wanted[text] for text in TEXTS])).max() < 1e-6
    assert np.abs(np.array(client.embed_query(TEXTS[1])) - wanted[TEXTS[1]]).max() < 1e-6


def test_hugging_face_reads_embed(server: ClientServer, wanted: dict[str, np.ndarray]) -> None:
    client = InferenceClient(model=f"{server.url}/embed", token=KEY)
    single = client.feature_extraction(TEXTS[0])
    assert single.shape == (1, WIDTH) and np.abs(single[0] - wanted[TEXTS[0]]).max() < 1e-6
    options: dict[str, Any] = {"normalize": False, "truncate": True, "truncation_direction": "left"}
    plain = client.feature_extraction(TEXTS[0], **options)
    assert abs(np.linalg.norm(plain) - 1) > 1e-2
    assert np.abs(plain[0] / np.linalg.norm(plain) - wanted[TEXTS[0]]).max() < 1e-6


def test_tei_gets_lists_of_numbers(server: ClientServer, wanted: dict[str, np.ndarray]) -> None:
    status, found = post(server, "/embed", inputs=TEXTS, dimensions=16)
    cut = np.stack([wanted[text][:16] for text in TEXTS])
    assert status == 200
    assert np.abs(np.array(found) - cut / np.linalg.norm(cut, axis=1, keepdims=True)).max() < 1e-6
    long = TEXTS[2] * LONGEST
    ends = {"Right": long[:LONGEST], "left": long[-LONGEST:]}
    for side, text in ends.items():
        _, one = post(server, "/embed", inputs=long, truncate=True, truncation_direction=side)
        assert np.abs(np.array(one) - np.array(post(server, "/embed", inputs=text)[1])).max() < 1e-6


def test_any_model_with_vectors_ranks_by_their_cosines(
    server: ClientServer, wanted: dict[str, np.ndarray]
) -> None:
    scores = [float(wanted[TEXTS[0]] @ wanted[text]) for text in TEXTS]
    _, found = post(server, "/v1/rerank", query=TEXTS[0], documents=TEXTS)
    assert [each["index"] for each in found["results"]] == sorted(range(4), key=lambda at: -scores[at])
    for each in found["results"]:
        assert abs(each["relevance_score"] - scores[each["index"]]) < 1e-6
    # Texts that come twice are computed once.
    _, twice = post(server, "/v1/score", text_1=[TEXTS[0]] * 8, text_2=TEXTS * 2)
    assert np.abs(np.array([each["score"] for each in twice["data"]]) - np.array(scores * 2)).max() < 1e-6
    assert twice["usage"] == found["usage"]


def test_a_line_of_a_batch_has_its_vectors(server: ClientServer, wanted: dict[str, np.ndarray]) -> None:
    body = {"model": MODEL, "input": TEXTS}
    lines = [{"custom_id": name, "method": "POST", "url": ROUTE, "body": body} for name in ("a", "b")]
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        endpoint: Any = ROUTE
        batch = wait(client, begin(client, jsonl(*lines), endpoint).id)
        found = results(client, batch.output_file_id)
    assert list(found) == ["a", "b"]
    for line in found.values():
        values = np.array([each["embedding"] for each in line["response"]["body"]["data"]])
        assert np.abs(values - np.stack([wanted[text] for text in TEXTS])).max() < 1e-6


def test_many_inputs_take_one_place_and_keep_no_stream_waiting(
    server: ClientServer, wanted: dict[str, np.ndarray]
) -> None:
    alone = post(server, "/v1/completions", **{**COMPLETION, "temperature": 0})[1]["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        bulk = pool.submit(vectors, server, input=TEXTS * 75)
        beside = []
        while not bulk.done():
            status, answer = post(server, "/v1/completions", **{**COMPLETION, "temperature": 0})
            beside.append((status, answer["choices"][0]["text"] if status == 200 else answer))
        found = bulk.result()
    assert beside and set(beside) == {(200, alone)}
    assert found.shape == (300, WIDTH)
    assert np.abs(found - np.stack([wanted[text] for text in TEXTS * 75])).max() < 1e-6


def test_what_is_too_long_is_cut_where_that_is_asked_for(server: ClientServer) -> None:
    ids = list(range(5, 25)) * (LONGEST // 10)
    status, answer = post(server, input=[[5], ids])
    assert (status, answer["error"]["param"]) == (400, "input[1]")
    assert (
        f"maximum context length is {LONGEST} tokens; the input has {len(ids)}" in answer["error"]["message"]
    )
    cut = vectors(server, input=ids, truncate=True)
    assert np.abs(cut - vectors(server, input=ids[:LONGEST])).max() < 1e-6


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "input"),
    ({"input": ""}, "input", "is empty"),
    ({"input": []}, "input", "input must be"),
    ({"input": ["a", ""]}, "input[1]", "is empty"),
    ({"input": ["a", [5]]}, "input", "input must be"),
    ({"input": [5, "a"]}, "input", "input must be"),
    ({"input": [[5], []]}, "input", "input must be"),
    ({"input": 7}, "input", "input must be"),
    ({"input": ["a"] * 2049}, "input", "at most 2048 inputs, not 2049"),
    ({"input": [[5], [99_999]]}, "input[1]", "token id 99999 is not in"),
    ({"input": [5, -1]}, "input", "token id -1 is not in"),
    ({"input": "a", "dimensions": 65}, "dimensions", "65 are asked for, and a vector of this model has 64"),
    ({"input": "a", "dimensions": 0}, "dimensions", "dimensions must be"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format must be"),
    ({"input": "a", "prompt_name": "query"}, "prompt_name", "is not among this model's prompts (none)"),
    ({"input": ["a", {"image": "AAAA"}]}, "input[1]", "holds a part of type 'image'; this model takes text"),
    (
        {"input": {"type": "input_audio"}},
        "input",
        "holds a part of type 'input_audio'; this model takes text",
    ),
    ({"input": "a", "truncation_direction": "up"}, "truncation_direction", "must be one of right, left"),
    ({"input": "a", "messages": []}, "messages", "messages is not supported by /v1/embeddings"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD, ids=lambda value: str(value)[:32])
def test_bad_input_names_its_field_and_harms_nothing(
    server: ClientServer, wanted: dict[str, np.ndarray], body: dict[str, Any], param: str, message: str
) -> None:
    status, answer = post(server, **body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert message in answer["error"]["message"]
    assert np.abs(vectors(server, input=TEXTS[0])[0] - wanted[TEXTS[0]]).max() < 1e-6


def test_a_request_for_vectors_can_be_explained(server: ClientServer) -> None:
    reply = server.ask("POST", ROUTE, {"model": MODEL, "input": TEXTS[:2]})
    story = json.loads(server.ask("GET", f"/v1/requests/{reply.headers['x-request-id']}/explain").body)
    assert len(story["branches"]) == 2
    assert "has its vector" in " ".join(story["branches"][0]["sentences"])
