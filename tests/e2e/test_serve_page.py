"""The live page against a real server: its files, which keys may watch, and a feed whose steps agree with its state."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from paceline.cli.top.picture import unpack_steps
from tests.e2e.client_server import ADMIN, ClientServer


def messages(server: ClientServer, count: int, query: str = "") -> list[dict[str, Any]]:
    """The next messages of the feed."""
    answer = server.open("GET", f"/v1/admin/watch{query}", key=ADMIN)
    assert answer.status == 200 and answer.getheader("content-type", "").startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    try:
        while len(found) < count:
            line = answer.readline()
            assert line, "the feed ended"
            if line.startswith(b"data: "):
                found.append(json.loads(line[6:]))
    finally:
        answer.close()
    return found


def watch(server: ClientServer, count: int) -> list[dict[str, Any]]:
    """The next messages of the feed, while requests are answered."""
    fields = {"prompt": "hello " * 20, "max_tokens": 200, "ignore_eos": True}
    asked = [threading.Thread(target=server.complete, kwargs=fields) for _ in range(4)]
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
    page = server.ask("GET", "/ui", key="")
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    assert b"<canvas" in page.body and "connect-src 'self'" in page.headers["content-security-policy"]
    for name in ("main.js", "stage.js", "style.css", "vendor/uplot.js", "icon.svg"):
        assert server.ask("GET", f"/ui/{name}", key="").status == 200
    chat = server.ask("GET", "/", key="")
    assert chat.status == 200 and chat.headers["content-type"].startswith("text/html")
    assert b"/ui/chat/main.js" in chat.body
    assert server.ask("GET", "/ui/chat/main.js", key="").status == 200
    assert server.ask("POST", "/", {}, key="").status == 405
    assert server.ask("GET", "/ui/../keys", key="").status in (401, 404)
    for path in ("/v1/admin/watch", "/v1/admin/about", "/v1/admin/requests/1/explain"):
        assert server.ask("GET", path, key="").status == 401
        assert server.ask("GET", path).status == 403
    about = server.ask("GET", "/v1/admin/about", key=ADMIN).json
    assert about["engine"]["max_num_seqs"] >= 1 and about["model"] and "engines" not in about
    assert server.ask("GET", "/v1/admin/about?engine=0", key=ADMIN).json == about
    for path in ("/v1/admin/watch?engine=1", "/v1/admin/about?engine=1", "/v1/admin/about?engine=x"):
        assert server.ask("GET", path, key=ADMIN).status == 400


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
    assert joined, "no request was seen to come"
    told = server.ask("GET", f"/v1/admin/requests/{min(joined)}/explain", key=ADMIN).json
    assert told["branches"][0]["sentences"]


def test_the_last_minute_is_there_for_a_page_that_is_opened_late(server: ClientServer) -> None:
    answer = server.complete(prompt="hello late page", max_tokens=40, ignore_eos=True)
    assert answer.status == 200
    wanted = answer.json["id"].removeprefix("cmpl-")
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
    assert "past" not in messages(server, 1)[0], (
        "a viewer that does not ask for it gets what comes from now on"
    )
    assert 0 < server.metric("watch_cpu_seconds_total") < server.metric("engine_cpu_seconds_total")


def test_traffic_is_many_requests_over_one_connection_and_ends_with_it(server: ClientServer) -> None:
    stream = server.ask("POST", "/v1/admin/traffic", {"message": "hello", "count": 5}, key=ADMIN)
    assert stream.status == 200 and stream.headers["content-type"].startswith("text/event-stream")
    frames = [line[6:] for line in stream.body.splitlines() if line.startswith(b"data: ")]
    assert frames[-1] == b"[DONE]"
    first, *chunks = [json.loads(frame) for frame in frames[:-1]]
    assert len(first["ids"]) == 5 and {chunk["id"] for chunk in chunks} == set(first["ids"])
    ended = [chunk["id"] for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert sorted(ended) == sorted(first["ids"])
    for name in (first["ids"][0], first["ids"][0].removeprefix("chatcmpl-")):
        told = server.ask("GET", f"/v1/admin/requests/{name}/explain", key=ADMIN).json
        number = told["branches"][0]["number"]
        by_number = server.ask("GET", f"/v1/admin/requests/{number}/explain", key=ADMIN).json
        assert by_number["branches"][0]["sentences"] == told["branches"][0]["sentences"]
    for body in ({"message": "hello", "count": 257}, {"message": ""}, {"count": 2}, {"message": "a", "x": 1}):
        assert server.ask("POST", "/v1/admin/traffic", body, key=ADMIN).status == 400
    assert server.ask("POST", "/v1/admin/traffic", {"message": "hello"}).status == 403
    with server.open(
        "POST", "/v1/admin/traffic", {"message": "hello " * 50, "count": 64}, key=ADMIN
    ) as answer:
        assert answer.readline()
    server.wait_until(server.is_idle)
