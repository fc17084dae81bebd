"""The live page against a real server: its files, who may watch, and a feed whose steps agree with its state."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.watch.told import told_steps
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


def watch(server: ClientServer, count: int) -> list[dict[str, Any]]:
    """The next messages of the feed, while somebody generates."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/v1/admin/watch", None, {"Authorization": f"Bearer {ADMIN}"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.getheader("content-type", "").startswith("text/event-stream")
    body = {"model": MODEL, "prompt": "hello " * 20, "max_tokens": 200, "ignore_eos": True}
    asked = [
        threading.Thread(target=ask, args=(server, "POST", "/v1/completions", body, KEY)) for _ in range(4)
    ]
    for thread in asked:
        thread.start()
    found: list[dict[str, Any]] = []
    try:
        while len(found) < count:
            line = answer.readline()
            assert line, "the feed ended"
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
    finally:
        connection.close()
        for thread in asked:
            thread.join(60)
    return found


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
    messages = watch(server, 8)
    assert [message["n"] for message in messages] == list(
        range(messages[0]["n"], messages[0]["n"] + len(messages))
    )
    assert messages[0]["engine"]["first"] and not any(message["engine"]["first"] for message in messages[1:])
    first = messages[0]["engine"]["scene"]
    rows = dict(zip(first["rows"][0], first["rows"][1], strict=True))
    joined, ended = set(), set()
    for message in messages[1:]:
        cut = message["engine"]
        for step in told_steps(cut):
            for row in step.get("leaves", ()):
                rows.pop(row, None)
            for row, request in step.get("joins", ()):
                rows[row] = request
                joined.add(request)
            ended |= {request for kind, request, *_ in step.get("notes", ()) if kind == "finish"}
        scene = cut["scene"]
        shown = {row: request for row, request in rows.items() if row not in scene["left"]}
        assert shown == dict(zip(scene["rows"][0], scene["rows"][1], strict=True))
    assert joined, "nobody was seen to come"
    told = json.loads(ask(server, "GET", f"/v1/admin/requests/{min(joined)}/explain", key=ADMIN)[2])
    assert told["branches"][0]["sentences"]


def test_an_engine_that_nobody_watches_any_more_pays_nothing(server: ClientServer) -> None:
    assert watch(server, 2)
    spent, steps = 0.0, 0.0

    def has_stopped() -> bool:
        """Whether two hundred steps went by for nothing."""
        nonlocal spent, steps
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 50, "ignore_eos": True}
        assert ask(server, "POST", "/v1/completions", body, KEY)[0] == 200
        now = server.metric("watch_cpu_seconds_total")
        if now != spent:
            spent, steps = now, server.metric("engine_steps_total")
        return server.metric("engine_steps_total") >= steps + 200

    server.wait_until(has_stopped)
    assert 0 < spent < server.metric("engine_cpu_seconds_total")
