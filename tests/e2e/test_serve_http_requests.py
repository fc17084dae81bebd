"""The HTTP and JSON part of the bad-input catalogue against a live server, and its answers to good requests."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest

from tests.e2e.http_server import FakeServer, fake_server, read_one, read_reply, request_bytes

CANARY = {"body": {"canary": "Zażółć"}, "tenant": "default", "path": {}}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(header_timeout_s=0.6, body_timeout_s=0.6, keep_alive_timeout_s=0.8) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture(autouse=True)
def canary(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test a good request gets its good answer."""
    yield
    if "server" in request.fixturenames:
        found = request.getfixturevalue("server").post("/v1/echo", {"canary": "Zażółć"}).json
        found.pop("id")
        assert found == CANARY


def post(body: bytes, *headers: str) -> bytes:
    return request_bytes("POST", "/v1/echo", body, headers=headers)


BIG = b'{"a": "' + b"x" * (2 * 2**20) + b'"}'
HTTP = {
    "garbage": (b"\x00\x01\x02garbage\r\n\r\n", 400, "bad_request"),
    "tls hello": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, 400, "bad_request"),
    "large header": (
        request_bytes("GET", "/health", headers=("X-A: " + "a" * 16_400,)),
        431,
        "headers_too_large",
    ),
    "huge header": (
        request_bytes("GET", "/health", headers=("X-A: " + "a" * 400_000,)),
        431,
        "headers_too_large",
    ),
    "many headers": (
        request_bytes("GET", "/health", headers=tuple(f"X-{i}: 1" for i in range(120))),
        431,
        "headers_too_large",
    ),
    "long line": (request_bytes("GET", "/" + "a" * 9000), 414, "uri_too_long"),
    "two lengths": (post(b"{}", "Content-Length: 2", "Content-Length: 3"), 400, "bad_request"),
    "length and chunked": (
        post(b"{}", "Content-Length: 2", "Transfer-Encoding: chunked"),
        400,
        "bad_request",
    ),
    "negative length": (post(b"{}", "Content-Length: -1"), 400, "bad_request"),
    "length of words": (post(b"{}", "Content-Length: two"), 400, "bad_request"),
    "overflowing length": (post(b"{}", f"Content-Length: {2**64}"), 400, "bad_request"),
    "declared too large": (post(b"", "Content-Length: 2097153"), 413, "body_too_large"),
    "sent too large": (post(BIG), 413, "body_too_large"),
    "expects to send too much": (
        post(b"", "Content-Length: 99999999", "Expect: 100-continue"),
        413,
        "body_too_large",
    ),
    "chunked too large": (
        post(b"%x\r\n" % len(BIG) + BIG + b"\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
        413,
        "body_too_large",
    ),
    "bad chunk": (post(b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), 400, "bad_request"),
    "endless trailer": (
        post(b"2\r\n{}\r\n0\r\nX-A: " + b"a" * 400_000, "Transfer-Encoding: chunked"),
        431,
        "headers_too_large",
    ),
    "gzip": (post(b"{}", "Content-Encoding: gzip"), 415, "unsupported_media_type"),
    "text": (post(b"{}", "Content-Type: text/plain"), 415, "unsupported_media_type"),
    "form": (post(b"{}", "Content-Type: application/x-www-form-urlencoded"), 415, "unsupported_media_type"),
    "no type": (
        b"POST /v1/echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
        415,
        "unsupported_media_type",
    ),
    "utf-16 by name": (
        post(b"{}", "Content-Type: application/json; charset=utf-16"),
        400,
        "invalid_encoding",
    ),
    "no host": (b"GET /v1/seen HTTP/1.1\r\nConnection: close\r\n\r\n", 400, "bad_host"),
    "two hosts": (request_bytes("GET", "/v1/seen", headers=("Host: localhost", "Host: a")), 400, "bad_host"),
    "foreign host": (request_bytes("GET", "/v1/seen", headers=("Host: evil.example",)), 400, "bad_host"),
    "host with a path": (
        request_bytes("GET", "/v1/seen", headers=("Host: localhost/health",)),
        400,
        "bad_host",
    ),
    "host with a user": (request_bytes("GET", "/v1/seen", headers=("Host: a@localhost",)), 400, "bad_host"),
    "absolute target": (request_bytes("GET", "http://evil.example/v1/seen"), 400, "bad_request"),
    "tunnel": (request_bytes("CONNECT", "evil.example:80"), 400, "bad_request"),
    "star": (request_bytes("OPTIONS", "*"), 400, "bad_request"),
    "HTTP/3.7": (b"GET /health HTTP/3.7\r\nHost: localhost\r\n\r\n", 400, "bad_request"),
    "put": (request_bytes("PUT", "/v1/echo", b"{}"), 405, "method_not_allowed"),
    "trace": (request_bytes("TRACE", "/v1/echo"), 405, "method_not_allowed"),
    "unheard-of method": (request_bytes("FOO", "/v1/echo"), 405, "method_not_allowed"),
    **{
        f"path {path}": (request_bytes("GET", path), 404, "not_found")
        for path in (
            "//v1/seen",
            "/v1/../v1/seen",
            "/v1/%2e%2e/v1/seen",
            "/V1/seen",
            "/v1/seen/",
            "/v1%2fseen",
            "/v1/s%65en",
        )
    },
}


@pytest.mark.parametrize("name", HTTP)
def test_bad_http(server: FakeServer, name: str) -> None:
    data, status, code = HTTP[name]
    reply = server.raw(data)
    assert (reply.status, reply.code) == (status, code)
    assert b"100 Continue" not in reply.raw
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["content-type"] == "application/json"
    assert len(reply.headers["x-request-id"]) == 32
    if status == 405:
        assert "POST" in reply.headers["allow"]
        assert name == "unheard-of method" or "This route takes POST" in reply.json["error"]["message"]


JSON = {
    "empty": (b"", "empty_body"),
    "blanks": (b" \n ", "empty_body"),
    "null": (b"null", "not_an_object"),
    "list": (b"[]", "not_an_object"),
    "string": (b'"x"', "not_an_object"),
    "number": (b"5", "not_an_object"),
    "two objects": (b"{}{}", "invalid_json"),
    "trailing": (b"{} x", "invalid_json"),
    "cut": (b'{"a": ', "invalid_json"),
    "depth 33": (b'{"a":' + b"[" * 32 + b"]" * 32 + b"}", "too_deep"),
    "depth 900": (b'{"a":' * 900 + b"1" + b"}" * 900, "too_deep"),
    "depth 100k": (b"[" * 100_000, "too_deep"),
    "NaN": (b'{"a": NaN}', "invalid_number"),
    "Infinity": (b'{"a": [Infinity]}', "invalid_number"),
    "-Infinity": (b'{"a": -Infinity}', "invalid_number"),
    "1e999": (b'{"a": 1e999}', "invalid_number"),
    "5,000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "invalid_number"),
    "duplicate key": (b'{"a": 1, "a": 2}', "duplicate_key"),
    "nested duplicate": (b'{"a": {"b": 1, "b": 1}}', "duplicate_key"),
    "half a surrogate": (b'{"a": "\\ud800"}', "invalid_unicode"),
    "half in a key": (b'{"a": {"\\udc00": 1}}', "invalid_unicode"),
    "65 keys": (json.dumps({str(i): i for i in range(65)}).encode(), "too_many_keys"),
    "long key": (b'{"' + b"k" * 1000 + b'": 1}', "key_too_long"),
    "BOM": (b"\xef\xbb\xbf{}", "invalid_encoding"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "invalid_encoding"),
    "UTF-16 without a mark": ('{"a": 1}'.encode("utf-16-le"), "invalid_json"),
    "latin-1": (b'{"a": "\xe9"}', "invalid_encoding"),
    "control character": (b'{"a": "\x01"}', "invalid_json"),
}


@pytest.mark.parametrize("name", JSON)
def test_bad_json(server: FakeServer, name: str) -> None:
    data, code = JSON[name]
    reply = server.post("/v1/echo", data)
    assert (reply.status, reply.code) == (400, code)


def test_good_bodies(server: FakeServer) -> None:
    for body in (
        {"a": "\u0000￾\u202e"},
        {"a": "😀"},
        {"a": [[[1.5, -0.0, 1e10]]]},
        {str(i): i for i in range(64)},
        {"a": "x" * 1_000_000},
    ):
        assert server.post("/v1/echo", body).json["body"] == body
    nested = json.loads('{"a":' + "[" * 31 + "]" * 31 + "}")
    assert server.post("/v1/echo", nested).json["body"] == nested


def test_a_body_of_one_byte_chunks(server: FakeServer) -> None:
    body = b'{"a": "' + b"x" * 100_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    reply = server.raw(post(chunks, "Transfer-Encoding: chunked"))
    assert reply.json["body"] == {"a": "x" * 100_000}


def test_a_client_that_offers_http2_is_answered(server: FakeServer) -> None:
    offers = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAA")
    with server.connect() as client:
        client.sendall(request_bytes("POST", "/v1/echo", b'{"a": 1}', headers=offers, close=False))
        assert read_one(client).json["body"] == {"a": 1}


def test_websockets_are_not_spoken(server: FakeServer) -> None:
    reply_head = request_bytes(
        "GET", "/health", headers=("Upgrade: websocket", "Connection: Upgrade"), close=False
    )
    with server.connect() as client:
        client.sendall(reply_head)
        assert read_one(client).status == 200


def test_head_is_get_without_a_body(server: FakeServer) -> None:
    for path in ("/health", "/metrics", "/version", "/docs", "/v1/models/a"):
        reply = server.get(path, method="HEAD")
        assert (reply.status, reply.body) == (200, b"")
        assert int(reply.headers["content-length"]) > 0


def test_cors_is_off(server: FakeServer) -> None:
    asked = ("Origin: https://evil.example", "Access-Control-Request-Method: POST")
    reply = server.get("/v1/echo", *asked, method="OPTIONS")
    assert reply.status == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]


PREFLIGHT = (
    "Origin: https://app.example:8443",
    "Access-Control-Request-Method: POST",
    "Access-Control-Request-Headers: authorization,content-type",
)


@pytest.fixture(scope="module")
def crossed() -> Iterator[FakeServer]:
    origins, key = "https://app.example:8443, http://localhost:3000", {"PACELINE_API_KEY": "secret"}
    with fake_server(allowed_origins=origins, environment=key) as running:
        yield running


def test_a_page_of_an_allowed_origin_may_ask_first_and_needs_no_key_for_that(crossed: FakeServer) -> None:
    reply = crossed.get("/v1/echo", *PREFLIGHT, method="OPTIONS")
    assert (reply.status, reply.body) == (200, b"")
    assert reply.headers["access-control-allow-origin"] == "https://app.example:8443"
    assert reply.headers["access-control-allow-methods"] == "POST"
    assert reply.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "access-control-allow-credentials" not in reply.headers


def test_it_reads_answers_and_errors(crossed: FakeServer) -> None:
    for path, status in (("/health", 200), ("/v1/seen", 401), ("/v1/nowhere", 401)):
        reply = crossed.get(path, PREFLIGHT[0])
        assert reply.status == status
        assert reply.headers["access-control-allow-origin"] == "https://app.example:8443"
        assert reply.headers["access-control-expose-headers"] == "*"
        assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize(
    "origin",
    ["https://app.example", "http://app.example:8443", "https://app.example:8443.evil.example", "null"],
)
def test_pages_of_others_are_not_let_in(crossed: FakeServer, origin: str) -> None:
    asked = (f"Origin: {origin}", *PREFLIGHT[1:])
    reply = crossed.get("/v1/echo", *asked, method="OPTIONS")
    assert reply.status == 405
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert "access-control-allow-origin" not in crossed.get("/health", asked[0]).headers


def test_a_route_that_is_not_there_has_no_preflight(crossed: FakeServer) -> None:
    assert crossed.get("/v1/nowhere", *PREFLIGHT, method="OPTIONS").status == 401


@pytest.mark.parametrize("sent", ["good-id_1", "a" * 128])
def test_a_request_id_is_echoed_beside_our_own(server: FakeServer, sent: str) -> None:
    reply = server.post("/v1/echo", {}, f"X-Request-Id: {sent}")
    assert reply.headers["x-request-id"] == sent
    assert reply.headers["x-paceline-request-id"] == reply.json["id"]


@pytest.mark.parametrize("sent", ["a" * 129, "with blank", "émoji", ""])
def test_a_bad_request_id_is_not_echoed(server: FakeServer, sent: str) -> None:
    reply = server.post("/v1/echo", {}, f"X-Request-Id: {sent}")
    assert reply.headers["x-request-id"] == reply.json["id"]


def test_handlers_headers_and_parameters(server: FakeServer) -> None:
    assert server.post("/v1/echo", {}).headers["x-paceline-ignored-fields"] == "a, b"
    assert server.get("/v1/models/org/model%3Aq4").json["path"] == {"id": "org/model:q4"}


def test_what_is_raised_inside_stays_inside(server: FakeServer) -> None:
    reply = server.post("/v1/crash", {})
    assert (reply.status, reply.code) == (500, "internal_error")
    assert b"secret" not in reply.raw


# ---------------------------------------------------------------- time


def test_a_slow_head_is_answered_with_408(server: FakeServer) -> None:
    with server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHo")
        reply = read_reply(client)
    assert (reply.status, reply.code) == (408, "request_timeout")


def test_a_slow_body_is_answered_with_408(server: FakeServer) -> None:
    with server.connect() as client:
        client.sendall(post(b'{"a"', "Content-Length: 100"))
        for _ in range(4):  # trickling does not help
            time.sleep(0.1)
            client.sendall(b" ")
        reply = read_reply(client)
    assert (reply.status, reply.code) == (408, "request_timeout")


def test_an_unused_connection_is_closed(server: FakeServer) -> None:
    with server.connect() as client:
        assert client.recv(10) == b""


def test_an_idle_connection_is_kept_for_a_while_and_closed(server: FakeServer) -> None:
    with server.connect() as client:
        for _ in range(2):
            client.sendall(request_bytes("GET", "/health", close=False))
            assert read_one(client).status == 200
            time.sleep(0.2)
        client.sendall(b"\r\n")  # allowed before a request, but no reason to stay
        assert client.recv(10) == b""


def test_an_early_answer_leaves_the_connection_usable(server: FakeServer) -> None:
    with server.connect() as client:
        client.sendall(request_bytes("POST", "/nowhere", b"{}" * 1000, close=False))
        assert read_one(client).status == 404
        client.sendall(request_bytes("GET", "/health", close=False))
        assert read_one(client).status == 200


def test_a_refusal_is_told_on_a_connection_that_was_used_before(server: FakeServer) -> None:
    with server.connect() as client:
        client.sendall(request_bytes("GET", "/health", close=False))
        assert read_one(client).status == 200
        client.sendall(
            request_bytes("POST", "/v1/echo", b"", headers=("Content-Length: 99999999",), close=False)
        )
        assert read_reply(client).status == 413


def test_headers_that_quote_a_client_stay_on_their_line(server: FakeServer) -> None:
    reply = server.post("/v1/echo", {"header": "a\r\nx-evil: 1\u00e9" + "b" * 5000})
    assert "x-evil" not in reply.headers
    assert reply.headers["x-paceline-ignored-fields"].startswith("a??x-evil: 1?bbb")
    assert len(reply.headers["x-paceline-ignored-fields"]) == 2048


def test_a_second_request_on_a_busy_connection_ends_it_cleanly(server: FakeServer) -> None:
    first = request_bytes("POST", "/v1/slow", b'{"seconds": 0.2}', close=False)
    with server.connect() as client:
        client.sendall(first + request_bytes("POST", "/v1/echo", b"{}", close=False))
        reply = read_reply(client)
    assert (reply.status, reply.body) == (200, b"{}")
    assert reply.raw.count(b"HTTP/1.1") == 1


def test_many_connections_are_closed_without_growth(server: FakeServer) -> None:
    before = server.seen()["fds"]
    clients = [server.connect() for _ in range(100)]
    for client in clients:
        client.sendall(b"POST /v1/echo HTTP/1.1\r\n")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.close()
    server.wait_until(lambda: server.seen()["fds"] <= before + 2)
