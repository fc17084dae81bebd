"""The live page against a real server: its files, who may watch, and a feed whose steps agree with its state."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.watch.unpack import unpack_steps
from tests.e2e.client_server import KEY, MODEL, ClientServer, client_server

ADMIN = "key-of-the-operator"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        yield running


def ask(
    server: ClientServer, method: str, path: str, body: object = None, key: str = ""
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def messages(server: ClientServer, count: int, query: str = "") -> list[dict[str, Any]]:
    """The next messages of the feed."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", f"/v1/admin/watch{query}", None, {"Authorization": f"Bearer {ADMIN}"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("content-type", "").startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    try:
        while len(found) < count:
            line = answer.readline()
            assert line, "the feed ended"
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
    finally:
        connection.close()
    return found


def watch(server: ClientServer, count: int) -> list[dict[str, Any]]:
    """The next messages of the feed, while requests are answered."""
    body = {"model": MODEL, "prompt": "hello " * 20, "max_tokens": 200, "ignore_eos": True}
    asked = [
        threading.Thread(target=ask, args=(server, "POST", "/v1/completions", body, KEY)) for _ in range(4)
    ]
    for thread in asked:
        threading.Timer(0.3, thread.start).start()
    try:
        return messages(server, count)
    finally:
        for thread in asked:
            while thread.ident is None:
                time.sleep(0.01)
            thread.join(60)


def test_the_page_needs_no_key_and_what_it_shows_does(server: ClientServer) -> None:
    status, headers, page = ask(server, "GET", "/ui")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"<canvas" in page
    assert "connect-src 'self'" in headers["content-security-policy"]
    for name in ("main.js", "stage.js", "style.css", "vendor/uplot.js", "icon.svg"):
        assert ask(server, "GET", f"/ui/{name}")[0] == 200
    status, headers, chat = ask(server, "GET", "/")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"/ui/chat/main.js" in chat
    assert ask(server, "GET", "/ui/chat/main.js")[0] == 200
    assert ask(server, "POST", "/", {})[0] == 405
    assert ask(server, "GET", "/ui/../keys")[0] in (401, 404)
    for path in ("/v1/admin/watch", "/v1/admin/about", "/v1/admin/requests/1/explain"):
        assert ask(server, "GET", path)[0] == 401
        assert ask(server, "GET", path, key=KEY)[0] == 403
    about = json.loads(ask(server, "GET", "/v1/admin/about", key=ADMIN)[2])
    assert about["engine"]["max_num_seqs"] >= 1 and about["model"]


def test_steps_of_the_feed_tell_what_its_state_says(server: ClientServer) -> None:
    found = watch(server, 8)
    assert [message["n"] for message in found] == list(range(found[0]["n"], found[0]["n"] + len(found)))
    assert not any(message["engine"]["first"] for message in found[1:])
    first = found[0]["engine"]["snapshot"]
    rows = dict(zip(first["rows"][0], first["rows"][1], strict=True))
    joined, ended = set(), set()
    for message in found[1:]:
        delta = message["engine"]
        for step in unpack_steps(delta):
            for row in step.get("leaves", ()):
                rows.pop(row, None)
            for row, request in step.get("joins", ()):
                rows[row] = request
                joined.add(request)
            ended |= {request for kind, request, *_ in step.get("notes", ()) if kind == "finish"}
        snapshot = delta["snapshot"]
        shown = {row: request for row, request in rows.items() if row not in snapshot["left"]}
        assert shown == dict(zip(snapshot["rows"][0], snapshot["rows"][1], strict=True))
    assert joined, "nobody was seen to come"
    told = json.loads(ask(server, "GET", f"/v1/admin/requests/{min(joined)}/explain", key=ADMIN)[2])
    assert told["branches"][0]["sentences"]


def test_the_last_minute_is_there_for_a_page_that_is_opened_late(server: ClientServer) -> None:
    body = {"model": MODEL, "prompt": "hello late page", "max_tokens": 40, "ignore_eos": True}
    status, _, answer = ask(server, "POST", "/v1/completions", body, KEY)
    assert status == 200
    wanted = json.loads(answer)["id"].removeprefix("cmpl-")
    server.wait_until(server.is_idle)
    begun = messages(server, 1, "?past=true")[0]
    names = {name: numbers for numbers, name, _ in begun["names"]}
    (number,) = names[wanted]
    assert not any(words for *_, words in begun["names"]), "prompts are not shown where there are keys"
    found = messages(server, 1 + begun["past"] + 1, "?past=true")[1:]
    steps = [step for message in found for step in unpack_steps(message["engine"])]
    assert number in [request for step in steps for _, request in step.get("joins", ())]
    seqs = [step["seq"] for step in steps]
    assert seqs == list(range(seqs[0], seqs[0] + len(seqs)))
    assert "past" not in messages(server, 1)[0], "who does not ask for it is told from now on"
    assert 0 < server.metric("watch_cpu_seconds_total") < server.metric("engine_cpu_seconds_total")


def test_traffic_is_many_requests_over_one_connection_and_ends_with_it(server: ClientServer) -> None:
    status, headers, stream = ask(
        server, "POST", "/v1/admin/traffic", {"message": "hello", "count": 5}, ADMIN
    )
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    frames = [line[6:] for line in stream.splitlines() if line.startswith(b"data: ")]
    assert frames[-1] == b"[DONE]"
    first, *chunks = [json.loads(frame) for frame in frames[:-1]]
    assert len(first["ids"]) == 5 and {chunk["id"] for chunk in chunks} == set(first["ids"])
    ended = [chunk["id"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ended) == sorted(first["ids"])
    for name in (first["ids"][0], first["ids"][0].removeprefix("chatcmpl-")):
        told = json.loads(ask(server, "GET", f"/v1/admin/requests/{name}/explain", key=ADMIN)[2])
        number = told["branches"][0]["number"]
        by_number = json.loads(ask(server, "GET", f"/v1/admin/requests/{number}/explain", key=ADMIN)[2])
        assert by_number["branches"][0]["sentences"] == told["branches"][0]["sentences"]
    for body in ({"message": "hello", "count": 257}, {"message": ""}, {"count": 2}, {"message": "a", "x": 1}):
        assert ask(server, "POST", "/v1/admin/traffic", body, ADMIN)[0] == 400
    assert ask(server, "POST", "/v1/admin/traffic", {"message": "hello"}, KEY)[0] == 403
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    given = {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json"}
    connection.request(
        "POST", "/v1/admin/traffic", json.dumps({"message": "hello " * 50, "count": 64}), given
    )
    assert connection.getresponse().readline()
    connection.close()
    server.wait_until(server.is_idle)
