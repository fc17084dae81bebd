"""Contexts that are placed, on a real server: the same text whether they were computed before, on the way or again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client_server import KEY, MODEL, NARROW_KEY, ClientServer, client_server
from tests.e2e.contexts.test_contexts import GREEDY, chat, create

TEXTS = tuple(
    f"The {place} has {count} lamps, and its keeper is called {name}. " * 5
    for place, count, name in (
        ("tower", "three", "Anna"),
        ("harbour", "nine", "Ben"),
        ("mill", "two", "Clara"),
    )
)
QUESTION = {"type": "text", "text": "Who keeps the mill?"}
# Of 16,383 blocks a key may pin 96: 1,536 tokens.
FLAGS = (
    "--cpu-backend",
    "torch",
    "--context-reuse",
    "blend",
    "--max-model-len",
    "4096",
    "--max-pinned-fraction-per-key",
    "0.006",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), *FLAGS, "--block-size", "16") as running:
        running.wait_for(200)
        yield running


@pytest.fixture(scope="module")
def contexts(server: ClientServer) -> list[str]:
    return [create(server, text=text, pin=False)["id"] for text in TEXTS]


def named(*ids: str) -> list[dict[str, Any]]:
    return [*({"type": "context", "context": each} for each in ids), QUESTION]


def blended(server: ClientServer, *ids: str, key: str = KEY, **fields: Any) -> Any:
    reply = chat(
        server, named(*ids), key=key, context_reuse="blend", max_tokens=24, ignore_eos=True, **fields
    )
    assert reply.status == 200, reply.body
    return reply.json


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def reused(answer: Any) -> int:
    details: dict[str, int] = answer["usage"]["prompt_tokens_details"]
    return details.get("reused_tokens", 0)


def test_the_model_tells_what_was_measured(server: ClientServer) -> None:
    shown = server.ask("GET", f"/v1/models/{MODEL}").json["paceline"]["blending"]
    assert shown["offered"] and 0.85 <= shown["kept"] <= 1


def test_the_same_text_resident_evicted_or_computed_on_the_way(
    server: ClientServer, contexts: list[str]
) -> None:
    first = blended(server, *contexts)
    assert reused(first) > 3 * (len(TEXTS[0].split()) - 16), "their bodies were copied"
    turned = blended(server, *contexts[::-1])
    assert reused(turned) == reused(first), "in another order the same modules serve"
    again = blended(server, *contexts)
    assert text_of(again) == text_of(first)
    with ThreadPoolExecutor(6) as threads:
        several = list(threads.map(lambda _: blended(server, *contexts, cache_salt="other"), range(6)))
    assert {text_of(each) for each in several} == {text_of(first)}, "computed again, in one batch"


def test_exact_is_a_plain_prompt_beside_blended_ones(server: ClientServer, contexts: list[str]) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    plain = [*({"type": "text", "text": text} for text in TEXTS), QUESTION]
    exact, same = chat(server, named(*contexts), **fields).json, chat(server, plain, **fields).json
    assert exact["choices"] == same["choices"] and not reused(exact)
    assert exact["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/responses"])
def test_the_other_apis_blend_too(server: ClientServer, contexts: list[str], route: str) -> None:
    kind = "text" if route == "/v1/messages" else "input_text"
    # Which no test has asked for before.
    order = contexts[1:] if kind == "text" else [*contexts[1:], contexts[1]]
    turns = [{"role": "user", "content": [*named(*order)[:-1], {**QUESTION, "type": kind}]}]
    length = {"max_tokens": 8} if route == "/v1/messages" else {"max_output_tokens": 8}
    body = {"model": MODEL, "temperature": 0, "context_reuse": "blend", **length}
    reply = server.ask("POST", route, {**body, "messages" if kind == "text" else "input": turns})
    assert reply.status == 200, reply.body
    if route == "/v1/responses":
        assert reply.json["usage"]["input_tokens_details"]["reused_tokens"] > 0


def test_a_receipt_tells_what_was_placed_computed_and_cached(server: ClientServer) -> None:
    """Of the same contexts at first, with another question, and in another order; an estimate knows before."""
    made = [
        create(server, text=f"{word}, {text}", pin=False)["id"]
        for word, text in zip("ab", TEXTS, strict=False)
    ]
    told = []
    for order, question in ((made, "Who?"), (made, "Where is that?"), (made[::-1], "Who?")):
        content = [*named(*order)[:-1], {"type": "text", "text": question}]
        body = {**GREEDY, "messages": [{"role": "user", "content": content}], "context_reuse": "blend"}
        estimate = server.ask("POST", "/v1/estimate", body).json
        before = server.metric("reused_tokens_total"), server.metric("reused_tokens_recomputed_total")
        answer = server.ask("POST", "/v1/chat/completions", body, **{"x-paceline-receipt": "true"}).json
        usage, details = answer["usage"], answer["usage"]["prompt_tokens_details"]
        receipt = {"reused_tokens": 0, "reused_tokens_recomputed": 0, **usage["paceline"]}
        parts = ("prompt_tokens_computed", "prompt_tokens_cached", "reused_tokens")
        assert sum(receipt[part] for part in parts) == usage["prompt_tokens"] == estimate["prompt_tokens"]
        assert details["cached_tokens"] == receipt["prompt_tokens_cached"] == estimate["cached_tokens"]
        assert reused(answer) == receipt["reused_tokens"]
        after = server.metric("reused_tokens_total"), server.metric("reused_tokens_recomputed_total")
        counted = receipt["reused_tokens"], receipt["reused_tokens_recomputed"]
        assert counted == tuple(now - then for now, then in zip(after, before, strict=True))
        told.append((receipt["prompt_tokens_cached"], *counted))
    first, same, turned = told
    assert first[2] == turned[2] == 2 * 16, "the beginning of each"
    assert turned[1] == first[1] and turned[0] == first[0], "what stands before the contexts was there"
    assert same[0] > first[1] and same[1] < 16 and not same[2], "at most the end of the last is not cached"


def test_keys_have_modules_of_their_own(server: ClientServer, contexts: list[str]) -> None:
    reply = chat(server, named(*contexts), key=NARROW_KEY, context_reuse="blend")
    assert (reply.status, reply.code) == (404, "context_not_found")
    before = server.metric("prompt_tokens_total")
    mine = [create(server, text=text, pin=False, key=NARROW_KEY)["id"] for text in TEXTS]
    other = blended(server, *mine, key=NARROW_KEY)
    assert text_of(other) == text_of(blended(server, *contexts))
    assert server.metric("prompt_tokens_total") > before


def test_a_context_for_blending_is_pinned_alone(server: ClientServer) -> None:
    made = create(server, text=TEXTS[0], context_reuse="blend", ttl_s=60)
    assert made["pinned"] and made["blocks"] == made["tokens"] // 16
    assert made["context_reuse"] == "blend"
    server.wait_until(lambda: server.metric("kv_pins") == 1)
    assert reused(blended(server, made["id"])) > 0
    refused = server.ask("POST", "/v1/contexts", {"text": "A word. " * 400, "context_reuse": "blend"})
    assert (refused.status, refused.code) == (429, "pin_limit_exceeded")
    server.ask("DELETE", f"/v1/contexts/{made['id']}")
    server.wait_until(lambda: server.metric("kv_pins") == 0)
    assert chat(server, named(made["id"]), context_reuse="blend").code == "context_not_found"


def test_a_context_deleted_while_it_is_blended_finishes(server: ClientServer, contexts: list[str]) -> None:
    made = create(server, text=TEXTS[1], pin=False)["id"]
    fields = {**GREEDY, "max_tokens": 24, "ignore_eos": True, "context_reuse": "blend", "stream": True}
    turns = [{"role": "user", "content": named(contexts[0], made, contexts[0])}]
    with server.open("POST", "/v1/chat/completions", {**fields, "messages": turns}) as answer:
        assert server.ask("DELETE", f"/v1/contexts/{made}").status == 200
        chunks = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == text_of(blended(server, contexts[0], contexts[1], contexts[0]))


def injected(server: ClientServer, context: str, **fields: Any) -> tuple[str, int]:
    """What an answer under way goes on with when a context is put into it, and how many of its tokens were copied."""
    body = {
        **GREEDY,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "on_stop": "hold",
        "max_tokens": 3,
        "ignore_eos": True,
    }
    with server.open("POST", "/v1/chat/completions", body) as answer:
        path = f"/v1/requests/{until_held(answer)[0]['id']}"
        found = server.ask("POST", f"{path}/extend", {"content": named(context), "max_tokens": 12, **fields})
        assert found.status == 200, found.body
        chunks = until_held(answer)
        server.ask("POST", f"{path}/prune", {})
        chunks += [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"] if not choice.get("injected")]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, reused(next(chunk for chunk in chunks if chunk.get("usage")))


def until_held(answer: Any) -> list[Any]:
    """The chunks of an answer until it has come to its end and is kept."""
    chunks: list[Any] = []
    while not (chunks and any(choice.get("held") for choice in chunks[-1]["choices"])):
        line = answer.readline()
        assert line, "the answer has ended"
        if line.startswith(b"data: {"):
            chunks.append(json.loads(line[6:]))
    return chunks


def test_a_context_put_into_a_running_answer_is_copied(server: ClientServer) -> None:
    made = create(server, text="A ferry leaves the northern pier at noon. " * 7, pin=False)["id"]
    first, num_copied = injected(server, made, context_reuse="blend")
    assert num_copied > 40
    again, num_again = injected(server, made, context_reuse="blend")
    assert (again, num_again) == (first, 0), "all of it is in the cache, under the same keys"
    assert injected(server, made)[1] == 0, "without the word it is text"
    refused = server.ask("POST", "/v1/requests/unknown/extend", {"context_reuse": "blend"})
    assert refused.status == 400


@pytest.mark.parametrize(
    "fields", [{"kv_keep": {"first": 4, "recent": 64}}, {"prompt_logprobs": 1}, {"search": {"type": "beam"}}]
)
def test_what_cannot_be_blended_is_refused(
    server: ClientServer, contexts: list[str], fields: dict[str, Any]
) -> None:
    reply = chat(server, named(*contexts), context_reuse="blend", **fields)
    assert (reply.status, reply.code) == (400, "blend_unavailable"), reply.body
    assert blended(server, contexts[0])["usage"]["prompt_tokens"] > 0


def test_a_new_engine_answers_the_same(server: ClientServer, contexts: list[str]) -> None:
    """The last of this file: the engine's process is killed. What was pinned is pinned again by what uses it."""
    pinned = create(server, text=TEXTS[0], context_reuse="blend", ttl_s=600)
    server.wait_until(lambda: server.metric("kv_pins") == 1)
    before = blended(server, *contexts)
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    for child in children.split():
        os.kill(int(child), signal.SIGKILL)
    server.wait_for(503)
    server.wait_for(200)
    after = blended(server, *contexts)
    assert text_of(after) == text_of(before) and reused(after) > 0
    assert server.metric("kv_pins") == 0, "another context of the same text pins nothing"
    assert reused(blended(server, pinned["id"])) > 0
    server.wait_until(lambda: server.metric("kv_pins") == 1)
    server.ask("DELETE", f"/v1/contexts/{pinned['id']}")
    server.wait_until(lambda: server.metric("kv_pins") == 0)
