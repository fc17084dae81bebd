"""PATCH /v1/requests/{id} on a real server: a stream that is paused says so, waits, goes on and ends the same."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.client_server import COMPLETION, ENDLESS, KEY, NARROW_KEY, ClientServer, client_server

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("server"), "--stream-keep-alive", "0.2") as running:
        running.wait_for(200)
        yield running


class Stream:
    """A completion that comes token by token."""

    def __init__(self, server: ClientServer, **fields: Any) -> None:
        body = {**COMPLETION, "stream": True, "ignore_eos": True, **fields}
        self._answer = server.open("POST", "/v1/completions", body)
        self.text = ""
        self.finish_reason: str | None = None
        self.num_chunks = self.num_comments = 0
        self.id = self.error = ""
        self.read()

    def read(self) -> bool:
        """One line of the stream; False at its end."""
        line = self._answer.readline()
        if line.startswith(b":"):
            self.num_comments += 1
        elif line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                self.error = chunk["error"]["code"]
                return True
            self.id = chunk["id"]
            self.num_chunks += 1
            self.text += chunk["choices"][0]["text"]
            self.finish_reason = chunk["choices"][0]["finish_reason"]
        return bool(line) and b"[DONE]" not in line

    def close(self) -> None:
        self._answer.close()


def change(server: ClientServer, request_id: str, key: str = KEY, **given: Any) -> tuple[int, Any]:
    answer = server.ask("PATCH", f"/v1/requests/{request_id}", given, key=key)
    return answer.status, answer.json


def test_a_paused_stream_holds_nothing_and_goes_on_as_if_nothing_had_been(server: ClientServer) -> None:
    plain = Stream(server, max_tokens=400, seed=3)
    while plain.read():
        pass
    stream = Stream(server, max_tokens=400, seed=3)
    assert change(server, stream.id, paused=True)[0] == 200
    server.wait_until(server.is_idle)  # no row and no block, and the stream is still open
    until_s = time.monotonic() + PATIENCE_S
    while not stream.num_comments and time.monotonic() < until_s:
        stream.read()
    assert stream.num_comments and stream.finish_reason is None
    status, told = change(server, stream.id, paused=False, priority=5)
    assert status == 200 and told["paused"] is False and told["service_tier"] == "standard"
    while stream.read():
        pass
    assert stream.finish_reason == plain.finish_reason == "length"
    assert stream.text == plain.text
    status, told = change(server, stream.id, paused=True)
    assert (status, told["error"]["code"]) == (409, "request_ended")


def test_a_paused_request_can_be_left_and_ends_at_its_deadline(server: ClientServer) -> None:
    left = Stream(server, max_tokens=ENDLESS)
    assert change(server, left.id, paused=True)[0] == 200
    left.close()
    late = Stream(server, max_tokens=ENDLESS)
    assert change(server, late.id, paused=True, deadline_ms=300)[0] == 200
    while late.read():
        pass
    assert late.error == "deadline_exceeded"
    server.wait_until(server.is_idle)
    server.wait_until(lambda: change(server, left.id, paused=False)[0] == 409)
    late.close()


def test_another_caller_and_what_makes_no_sense(server: ClientServer) -> None:
    stream = Stream(server, max_tokens=ENDLESS)
    assert change(server, stream.id, NARROW_KEY, paused=True)[0] == 404
    assert change(server, "nobody", paused=True)[1]["error"]["code"] == "request_not_found"
    for given, param in (({"paused": "no"}, "paused"), ({"deadline_ms": -1}, "deadline_ms"), ({"x": 1}, "x")):
        status, told = change(server, stream.id, **given)
        assert (status, told["error"]["param"]) == (400, param)
    assert change(server, stream.id)[0] == 400
    stream.close()
    server.wait_until(server.is_idle)


def test_a_better_class_than_the_keys_is_refused(server: ClientServer) -> None:
    refused = server.complete(service_tier="interactive")
    assert (refused.status, refused.json["error"]["param"]) == (403, "service_tier")


def test_paused_streams_go_on_when_the_server_drains(tmp_path_factory: pytest.TempPathFactory) -> None:
    with client_server(tmp_path_factory.mktemp("draining"), "--drain-timeout", "60") as running:
        running.wait_for(200)
        stream = Stream(running, max_tokens=300)
        assert change(running, stream.id, paused=True)[0] == 200
        running.wait_until(running.is_idle)
        running.process.terminate()
        while stream.read():
            pass
        assert stream.finish_reason == "length"
        stream.close()
