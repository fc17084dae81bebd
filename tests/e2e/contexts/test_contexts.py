"""Contexts on a real server: their texts stand where they are named, their KV stays, other keys do not find them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client_server import KEY, MODEL, NARROW_KEY, ClientServer, client_server
from tests.e2e.http_server import Reply
from tests.e2e.model_cli import run

TEXT = "The lighthouse of Aldermoor has three lamps. " * 6
QUESTION = "Which of them burns at night?"
GREEDY = {"model": MODEL, "max_tokens": 12, "temperature": 0}
# Of 16,383 blocks a key may pin 32: 512 tokens.
FLAGS = ("--max-model-len", "2048", "--max-pinned-fraction-per-key", "0.002", "--block-size", "16")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), *FLAGS) as running:
        running.wait_for(200)
        yield running


def create(server: ClientServer, *, key: str = KEY, **fields: Any) -> dict[str, Any]:
    reply = server.ask("POST", "/v1/contexts", {"text": TEXT, **fields}, key=key)
    assert reply.status == 200, reply.body
    made: dict[str, Any] = reply.json
    return made


@pytest.fixture
def context(server: ClientServer) -> Iterator[dict[str, Any]]:
    made = create(server, name="lamps")
    yield made
    server.ask("DELETE", f"/v1/contexts/{made['id']}")


def chat(server: ClientServer, content: object, *, key: str = KEY, **fields: Any) -> Reply:
    body = {**GREEDY, "messages": [{"role": "user", "content": content}], **fields}
    return server.ask("POST", "/v1/chat/completions", body, key=key)


def parts(context_id: object) -> list[dict[str, Any]]:
    return [{"type": "context", "context": context_id}, {"type": "text", "text": QUESTION}]


def plain() -> list[dict[str, Any]]:
    return [{"type": "text", "text": TEXT}, {"type": "text", "text": QUESTION}]


def test_a_context_is_made_shown_listed_and_deleted(server: ClientServer) -> None:
    made = create(server, name="lamps", ttl_s=60)
    assert made["pinned"] and made["blocks"] >= len(TEXT) // 16
    assert made["expires_at"] - made["created_at"] == 60 and made["tokens"] > 0
    shown = server.ask("GET", f"/v1/contexts/{made['id']}").json
    assert shown == {**made, "text": TEXT}
    assert [each["id"] for each in server.ask("GET", "/v1/contexts").json["data"]] == [made["id"]]
    assert server.metric("contexts") == 1
    gone = server.ask("DELETE", f"/v1/contexts/{made['id']}")
    assert gone.json == {"id": made["id"], "object": "context", "deleted": True}
    assert server.ask("GET", "/v1/contexts").json["data"] == []
    server.wait_until(lambda: server.metric("kv_pins") == 0)


def test_its_text_stands_there_and_was_computed_before(server: ClientServer, context: dict[str, Any]) -> None:
    used = chat(server, parts(context["id"])).json
    cached = used["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= context["blocks"] * 16, "the first request finds all of it"
    same = chat(server, plain()).json
    assert used["choices"] == same["choices"]
    assert used["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


def test_the_other_apis_take_the_same_part(server: ClientServer, context: dict[str, Any]) -> None:
    def message(content: object) -> Any:
        body = {**GREEDY, "messages": [{"role": "user", "content": content}]}
        return server.ask("POST", "/v1/messages", body).json["content"]

    assert message(parts(context["id"])) == message(plain())
    count = {"model": MODEL, "messages": [{"role": "user", "content": parts(context["id"])}]}
    counted = server.ask("POST", "/v1/messages/count_tokens", count).json["input_tokens"]
    assert counted == chat(server, plain()).json["usage"]["prompt_tokens"]
    system = [{"type": "context", "context": context["id"]}]
    as_system = {**GREEDY, "system": system, "messages": [{"role": "user", "content": QUESTION}]}
    assert server.ask("POST", "/v1/messages", as_system).status == 200

    def response(content: list[dict[str, Any]]) -> Any:
        body = {
            "model": MODEL,
            "max_output_tokens": 12,
            "temperature": 0,
            "input": [{"role": "user", "content": content}],
        }
        output = server.ask("POST", "/v1/responses", body).json["output"]
        return [part["text"] for item in output for part in item["content"]]

    asked = [{"type": "context", "context": context["id"]}, {"type": "input_text", "text": QUESTION}]
    assert response(asked) == response(
        [{"type": "input_text", "text": TEXT}, {"type": "input_text", "text": QUESTION}]
    )


def test_a_context_put_into_a_running_answer_is_its_text(
    server: ClientServer, context: dict[str, Any]
) -> None:
    body = {
        **GREEDY,
        "prompt": "hello",
        "stream": True,
        "on_stop": "hold",
        "max_tokens": 3,
        "ignore_eos": True,
    }
    with server.open("POST", "/v1/completions", body) as answer:
        line = answer.readline()
        request_id = json.loads(line[6:])["id"]
        extend = f"/v1/requests/{request_id}/extend"
        given = {"content": parts(context["id"]), "max_tokens": 2}
        found = server.ask("POST", extend, given)
        tokens = server.ask(
            "POST", "/tokenize", {"prompt": f"{TEXT}\n{QUESTION}", "add_special_tokens": False}
        )
        assert found.status == 200, found.body
        assert found.json["tokens"] == tokens.json["count"]
        refused = server.ask("POST", extend, {**given, "context_reuse": "blend"})
        assert (refused.status, refused.code) == (400, "blend_unavailable")
        both = server.ask("POST", extend, {"content": parts(context["id"]), "text": "x"})
        assert (both.status, both.code) == (400, "invalid_value")


@pytest.mark.parametrize("route", ["chat", "get", "delete"])
def test_a_context_that_is_not_there_is_not_found(
    server: ClientServer, context: dict[str, Any], route: str
) -> None:
    """One that never was, one of another key."""
    for name, key in (("ctx_unknown", KEY), (context["id"], NARROW_KEY)):
        if route == "chat":
            reply = chat(server, parts(name), key=key)
        else:
            reply = server.ask(route.upper(), f"/v1/contexts/{name}", key=key)
        assert (reply.status, reply.code) == (404, "context_not_found")
    assert server.ask("GET", "/v1/contexts", key=NARROW_KEY).json["data"] == []


def test_tenants_share_no_kv_of_a_context(server: ClientServer, context: dict[str, Any]) -> None:
    other = chat(server, plain(), key=NARROW_KEY).json
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_an_expired_context_is_not_found(server: ClientServer) -> None:
    made = create(server, ttl_s=1)
    path = f"/v1/contexts/{made['id']}"
    server.wait_until(lambda: server.ask("GET", path).status == 404)
    assert chat(server, parts(made["id"])).code == "context_not_found"


def test_pins_beyond_the_limit_are_refused_with_the_limit(server: ClientServer) -> None:
    long = {"text": "A word. " * 100}
    refused = server.ask("POST", "/v1/contexts", long)
    assert (refused.status, refused.code) == (429, "pin_limit_exceeded")
    assert "this key may pin 32" in refused.json["error"]["message"]
    loose = create(server, **long, pin=False)
    assert not loose["pinned"] and loose["blocks"] == 0
    assert chat(server, parts(loose["id"])).status == 200
    server.ask("DELETE", f"/v1/contexts/{loose['id']}")


def test_blending_is_refused_by_name(server: ClientServer, context: dict[str, Any]) -> None:
    reply = chat(server, parts(context["id"]), context_reuse="blend")
    assert (reply.status, reply.code) == (400, "blend_unavailable")
    assert chat(server, parts(context["id"]), context_reuse="exact").status == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"text": ""},
        {"text": 5},
        {"text": "x", "ttl_s": 0},
        {"text": "x", "ttl_s": 86_401},
        {"text": "x", "pin": "yes"},
        {"text": "x", "role": "assistant"},
        {"text": "x", "name": "n" * 129},
        {"text": "a" * 2048 * 8},
    ],
)
def test_a_context_that_makes_no_sense_is_refused(server: ClientServer, body: dict[str, Any]) -> None:
    assert server.ask("POST", "/v1/contexts", body).status == 400


@pytest.mark.parametrize("named", [None, 5, {"id": "x"}, [], ""])
def test_a_part_without_an_id_is_refused(server: ClientServer, named: object) -> None:
    assert chat(server, parts(named)).status in (400, 404)
    assert chat(server, "hello").status == 200


def test_a_deleted_context_finishes_what_uses_it(server: ClientServer) -> None:
    made = create(server)
    whole = chat(server, plain(), max_tokens=40, ignore_eos=True).json["choices"][0]["message"]["content"]
    fields = {**GREEDY, "max_tokens": 40, "ignore_eos": True, "stream": True}
    body = {**fields, "messages": [{"role": "user", "content": parts(made["id"])}]}
    with server.open("POST", "/v1/chat/completions", body) as answer:
        assert server.ask("DELETE", f"/v1/contexts/{made['id']}").status == 200
        chunks = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    assert text == whole
    server.wait_until(lambda: server.metric("kv_pins") == 0)


def test_a_marked_prompt_is_pinned(server: ClientServer) -> None:
    marked = [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]
    body = {**GREEDY, "messages": [{"role": "user", "content": marked}]}
    assert server.ask("POST", "/v1/messages", body).status == 200
    server.wait_until(lambda: server.metric("kv_pins") == 1)


def test_the_command_keeps_shows_and_deletes(server: ClientServer, tmp_path: Path) -> None:
    def contexts(*arguments: str) -> Any:
        return run("contexts", *arguments, "--url", server.url, cache=tmp_path, PACELINE_API_KEY=KEY)

    file = tmp_path / "manual.txt"
    file.write_text(TEXT)
    made = json.loads(contexts("add", str(file), "--name", "manual", "--ttl-s", "60", "--json").stdout)
    assert made["name"] == "manual" and made["pinned"]
    listed = contexts("ls").stdout
    assert made["id"] in listed and "manual" in listed
    assert contexts("rm", made["id"]).stdout == f"Deleted {made['id']}.\n"
    again = contexts("rm", made["id"])
    assert again.returncode == 1 and "this key has no such context" in again.stderr
    loose = contexts("add", str(file), "--no-pin").stdout
    assert "not pinned" in loose
    contexts("rm", loose.split()[0])
    for wrong in (("add",), ("add", str(tmp_path)), ("rm",)):
        assert contexts(*wrong).returncode == 2


def test_a_new_engine_computes_a_context_when_it_is_asked_for(server: ClientServer) -> None:
    """The last of this file: the engine's process is killed."""
    made = create(server)
    before = chat(server, parts(made["id"])).json
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    for child in children.split():
        os.kill(int(child), signal.SIGKILL)
    server.wait_for(503)
    server.wait_for(200)
    first = chat(server, parts(made["id"])).json
    assert first["choices"] == before["choices"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    server.wait_until(lambda: server.metric("kv_pins") == 1)
    again = chat(server, parts(made["id"])).json
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["blocks"] * 16
