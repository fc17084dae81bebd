"""Entries of the catalogue that are more than one request: keys on every route, tenants, floods, labels, aborts."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.config.server import ServerConfig
from paceline.server.access.keys_file import Keyring
from paceline.server.api.route import Route
from paceline.server.app import Api as MountedApi
from paceline.server.app import Application
from paceline.server.health import PUBLIC
from paceline.server.live.page_files import PAGE
from tests.e2e.catalogue.catalogue import canary, log_problems
from tests.e2e.catalogue.connections import ask_all
from tests.e2e.catalogue.entry import (
    BAD_KEY,
    CHAT,
    COMPLETIONS,
    COUNT,
    DETOKENIZE,
    GOOD,
    MESSAGES,
    QUEUE_FULL,
    RESPONSES,
    TOKENIZE,
    VALUE,
    answer_of,
)
from tests.e2e.catalogue.served import KEYS, TinyServer, signed, tiny_server
from tests.e2e.catalogue.structures import schema_format
from tests.e2e.http_server import Reply, request_bytes
from tests.pure.server_api.api_helpers import Api

BEARER = f"Authorization: Bearer {KEYS['alpha']}"
FLAGS = ("--body-timeout", "1", "--kv-cache-memory-bytes", str(64 * 2**20), "--max-waiting-requests", "64")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    with tiny_server(tmp_path_factory.mktemp("server"), *FLAGS) as running:
        yield running
        running.wait_until_idle()
        assert log_problems(running) == []
        assert running.metric("invariant_violations_total") == 0


@pytest.fixture(autouse=True)
def song(request: pytest.FixtureRequest) -> Iterator[None]:
    """A good request has the same answer before and after every test."""
    running: TinyServer = request.getfixturevalue("server")
    before = canary(running)
    yield
    assert canary(running) == before


def kept(method: str, path: str, body: Any = None, *headers: str) -> bytes:
    """A request on a connection that stays open."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    return request_bytes(method, path, data, headers=(BEARER, *headers), close=False)


def statuses_of(server: TinyServer, requests: list[bytes], connections: int) -> Counter[tuple[int, str]]:
    found: Counter[tuple[int, str]] = Counter()

    def handle(number: int, reply: Reply | Exception) -> None:
        assert isinstance(reply, Reply), f"{requests[number][:300]!r}: {reply!r}"
        found[answer_of(reply)] += 1

    asyncio.run(ask_all(server.port, requests, handle, connections=connections))
    assert found.total() == len(requests)
    return found


def test_8_a_body_that_does_not_come_is_answered_and_the_connection_closed(server: TinyServer) -> None:
    data = signed("POST", CHAT, b'{"model"', "Content-Length: 100")
    assert answer_of(server.raw(data)) == (408, "request_timeout")


def routes_of_the_application() -> Sequence[Route]:
    """Every route the application has once it is ready."""
    api = Api()
    app = Application(ServerConfig(), api.client, Keyring(()))
    app.become_ready(MountedApi(routes=list(api.routes.values()), model_name="tiny"))
    return app.main.table.routes


def test_30_every_route_but_probes_needs_a_key(server: TinyServer) -> None:
    table = routes_of_the_application()
    described = set(server.get("/openapi.json").json["paths"])
    assert described == {route.path.replace(":path}", "}") for route in table if route.openapi}, (
        "not the routes of the live server"
    )
    routes = sorted({(method, route.path) for route in table for method in route.methods})
    assert {path for _, path in routes} > PUBLIC
    for method, template in routes:
        path = re.sub(r"\{[a-z_]+(:path)?\}", "x", template)
        body = b"{}" if method == "POST" else None
        for headers in ((), ("Authorization: Bearer nobody",), ("x-api-key: nobody",)):
            reply = server.raw(request_bytes(method, path, body, headers=headers))
            if template in PUBLIC | PAGE:
                assert reply.status == 200, template
            else:
                assert reply.status == 401 and (method == "HEAD" or is_401(reply)), (method, template)
    assert answer_of(server.get("/nowhere", key=None)) == BAD_KEY


def is_401(reply: Reply) -> bool:
    return reply.status == 401 and b"API key" in reply.body and "www-authenticate" in reply.headers


def test_105_odd_requests_do_not_make_metrics_grow(server: TinyServer) -> None:
    def odd(number: int) -> bytes:
        way = number % 6
        if way == 0:
            return kept("GET", f"/x{number}/y?z={number}")
        if way == 1:
            return kept("GET", f"/v1/models/m{number}")
        if way == 2:
            return kept("POST", CHAT, {**GOOD[CHAT], "model": f"m{number}", f"f{number}": 1})
        if way == 3:
            return kept(("PUT", "DELETE", "PATCH", "OPTIONS")[number % 4], CHAT)
        if way == 4:
            return kept("POST", f"/v1/files/{number}", b"{}", f"X-Request-Id: id-{number}")
        return kept("POST", CHAT, {**GOOD[CHAT], "user": f"u{number}", "n": -number})

    statuses_of(server, [odd(number) for number in range(600)], 8)
    server.get("/metrics")
    before = server.get("/metrics").body
    statuses_of(server, [odd(number) for number in range(600, 3_000)], 16)
    after = server.get("/metrics").body
    assert len(after) < 256 * 1024
    assert series(after) == series(before)
    assert b'method="other"' in after


def series(page: bytes) -> set[bytes]:
    return {line.rpartition(b" ")[0] for line in page.splitlines() if not line.startswith(b"#")}


def test_107_probes_make_the_engine_do_nothing(server: TinyServer) -> None:
    steps = server.get("/health/deep").json["steps"]
    paths = ("/health", "/health/live", "/health/ready", "/health/deep", "/ping")
    requests = [request_bytes("GET", paths[number % 5], close=False) for number in range(2_000)]
    assert statuses_of(server, requests, 8) == {(200, ""): 2_000}
    assert server.get("/health/deep").json["steps"] == steps


def test_108_a_flood_is_answered_or_refused(server: TinyServer) -> None:
    body = {**GOOD[COMPLETIONS], "max_tokens": 1}
    found = statuses_of(server, [kept("POST", COMPLETIONS, body)] * 1_000, 250)
    assert set(found) <= {(200, ""), QUEUE_FULL} and found[200, ""] > 0


@pytest.mark.parametrize("num_each", [50, pytest.param(500, marks=pytest.mark.campaign)])
def test_109_good_and_bad_in_turn(server: TinyServer, num_each: int) -> None:
    """Schemas that compile and such that do not, each of them new to the server."""
    requests = []
    for number in range(num_each):
        for schema in ({"type": f"x{number}"}, {"enum": [number]}):
            requests.append(kept("POST", CHAT, GOOD[CHAT] | {"response_format": schema_format(schema)}))
    found = statuses_of(server, requests, 4)
    assert found == {(200, ""): num_each, VALUE: num_each}


def test_110_one_request_id_for_many_requests(server: TinyServer) -> None:
    ids: list[str] = []
    body = {**GOOD[COMPLETIONS], "max_tokens": 30, "ignore_eos": True}
    requests = [
        kept("POST", COMPLETIONS, {**body, "prompt": f"p{n}"}, "X-Request-Id: same") for n in range(16)
    ]

    def handle(number: int, reply: Reply | Exception) -> None:
        assert isinstance(reply, Reply) and reply.status == 200
        assert reply.headers["x-request-id"] == "same"
        assert reply.json["usage"]["completion_tokens"] == 30
        ids.append(reply.headers["x-paceline-request-id"])

    asyncio.run(ask_all(server.port, requests, handle, connections=16))
    assert len(set(ids)) == 16


def test_111_streams_that_are_opened_and_left(server: TinyServer) -> None:
    """Two thousand of them, left at once or after their first bytes."""
    body = {**GOOD[CHAT], "max_tokens": 200, "ignore_eos": True, "stream": True}
    data = kept("POST", CHAT, body)
    descriptors = Path(f"/proc/{server.process.pid}/fd")
    before = len(list(descriptors.iterdir()))

    async def leave(numbers: Iterator[int]) -> None:
        for number in numbers:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data)
            with suppress(ConnectionError):
                await writer.drain()
                if number % 2:
                    await asyncio.wait_for(reader.read(100), 60)
            writer.transport.abort()

    async def storm() -> None:
        numbers = iter(range(2_000))
        await asyncio.gather(*(leave(numbers) for _ in range(32)))

    asyncio.run(storm())
    server.wait_until_idle()
    server.wait_until(lambda: len(list(descriptors.iterdir())) <= before + 2)


def test_112_a_tenants_prompt_is_cached_for_no_other_tenant(server: TinyServer) -> None:
    body = {**GOOD[COMPLETIONS], "prompt": "a prompt of several blocks, long enough to be found again. " * 3}

    def cached(key: str, **more: Any) -> int:
        reply = server.post(COMPLETIONS, body | more, key=key)
        assert reply.status == 200
        return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("alpha") == 0
    assert cached("alpha") > 100
    assert cached("beta") == 0
    assert cached("beta") > 100
    assert cached("alpha", cache_salt="x") == 0
    assert cached("alpha", cache_salt="x") > 100
    # A tenant's name cannot be spelled with a salt.
    assert cached("beta", cache_salt="alpha") == 0


def test_a_key_has_as_many_requests_under_way_as_it_may(server: TinyServer) -> None:
    """Two for the key `low`. Three answers to one request will never fit; eight requests at once do not now."""
    assert answer_of(server.post(COMPLETIONS, {**GOOD[COMPLETIONS], "n": 2}, key="low")) == (200, "")
    assert answer_of(server.post(COMPLETIONS, {**GOOD[COMPLETIONS], "n": 3}, key="low")) == VALUE
    long = {**GOOD[COMPLETIONS], "max_tokens": 200, "ignore_eos": True}
    found = statuses_of(server, [signed("POST", COMPLETIONS, long, key="low")] * 8, 8)
    assert set(found) == {(200, ""), (429, "concurrency_exceeded")} and found[200, ""] >= 2


GENERATIONS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
SPENT = ((429, "rate_limit_exceeded"), (429, "*"))  # without a code where the API has none


def test_every_route_that_generates_holds_a_key_to_its_tokens(server: TinyServer) -> None:
    """Two come back in a second: the first request leaves enough spent for all the others to be refused."""
    reply = server.post(COMPLETIONS, {**GOOD[COMPLETIONS], "prompt": "x" * 80, "n": 2}, key="metered")
    total = reply.json["usage"]["total_tokens"]
    remaining = int(reply.headers["x-ratelimit-remaining-tokens"])
    assert reply.headers["x-ratelimit-limit-tokens"] == "120" and total == 86
    assert 120 - total <= remaining <= 120 - total + 20, "what was not used has been given back"
    assert reply.headers["x-ratelimit-remaining-requests"] in ("599", "600")
    for route in GENERATIONS:
        for stream in (False, True):
            more = {"max_output_tokens" if route == RESPONSES else "max_tokens": 100, "stream": stream}
            refused = server.post(route, {**GOOD[route], **more}, key="metered")
            assert answer_of(refused) in SPENT, route
            assert "tokens_per_minute" in refused.json["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.headers["x-ratelimit-remaining-requests"] in ("599", "600"), "429 is not counted"
    assert server.metric("requests_refused_by_key_limit_total") >= 8


def test_all_routes_that_generate_count_against_one_limit(server: TinyServer) -> None:
    assert server.post(MESSAGES, GOOD[MESSAGES], key="rare").status == 200
    for route in GENERATIONS:
        assert answer_of(server.post(route, GOOD[route], key="rare")) in SPENT, route
    for route in (TOKENIZE, DETOKENIZE, COUNT):
        assert server.post(route, GOOD[route], key="rare").status == 200, route


def test_a_priority_above_the_keys_is_refused_and_counted(server: TinyServer) -> None:
    before = server.metric("requests_refused_by_key_limit_total")
    for route in (CHAT, COMPLETIONS, MESSAGES):
        assert server.post(route, {**GOOD[route], "priority": -1}, key="low").status == 403, route
    assert server.metric("requests_refused_by_key_limit_total") == before + 3


def test_75_nothing_that_a_request_names_is_fetched(server: TinyServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": address}},
            {"type": "input_audio", "input_audio": {"data": address, "format": "wav"}},
            {"type": "file", "file": {"file_data": address}},
            {"type": "image", "source": {"type": "url", "url": address}},
        ]
        for part in parts:
            reply = server.post(CHAT, {**GOOD[CHAT], "messages": [{"role": "user", "content": [part]}]})
            assert answer_of(reply) == (400, "unsupported_modality")
        text = [{"role": "user", "content": f"see ![x]({address}) and {address}"}]
        assert server.post(CHAT, {**GOOD[CHAT], "messages": text}).status == 200
        assert server.post(CHAT, {**GOOD[CHAT], "model": address}).status == 404
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):  # no connection was made
            listener.accept()
