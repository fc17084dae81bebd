"""Entries 1 to 31: bytes that are no request, and what headers and paths can get wrong.

Those that need time to go wrong (8) or several requests (26 in flight, 27 time, 30) are separate tests.
"""

from __future__ import annotations

import json

from tests.e2e.catalogue.entry import (
    BAD_KEY,
    CHAT,
    COMPLETIONS,
    GOOD,
    NO_ROUTE,
    OK,
    Answer,
    Entry,
    entry,
)
from tests.e2e.catalogue.served import KEYS, signed
from tests.e2e.http_server import Reply, request_bytes

BAD, HOST, LARGE_HEAD, LARGE_BODY, LONG_LINE, MEDIA = (
    *((400, "bad_request"), (400, "bad_host"), (431, "headers_too_large")),
    *((413, "body_too_large"), (414, "uri_too_long"), (415, "unsupported_media_type")),
)
METHOD, ENCODING, FORBIDDEN = (405, "method_not_allowed"), (400, "invalid_encoding"), (403, "key_disabled")
BODY = json.dumps(GOOD[COMPLETIONS]).encode()
BEARER = f"Authorization: Bearer {KEYS['alpha']}"
MOST_BODY, MOST_HEAD, MOST_LINE, MOST_HEADERS = 2 * 2**20, 16_384, 8_192, 100

KEYS_27: list[tuple[str, tuple[str, ...], Answer]] = [
    ("none", (), BAD_KEY),
    ("wrong", ("Authorization: Bearer x",), BAD_KEY),
    ("beginning", (f"Authorization: Bearer {KEYS['alpha'][:-1]}",), BAD_KEY),
    ("other case", (f"Authorization: Bearer {KEYS['alpha'].upper()}",), BAD_KEY),
    ("its hash", ("x-api-key: " + "0" * 64,), BAD_KEY),
]
KEYS_28: list[tuple[str, tuple[str, ...], Answer]] = [
    ("Bearer alone", ("Authorization: Bearer",), BAD_KEY),
    ("Bearer and blanks", ("Authorization: Bearer    ",), BAD_KEY),
    ("Basic", ("Authorization: Basic eDp5",), BAD_KEY),
    ("two", (BEARER, BEARER), BAD_KEY),
    ("two kinds", ("x-api-key: x", "x-api-key: y"), BAD_KEY),
    ("not ASCII", ("Authorization: Bearer \xff\xfe\xe9",), BAD_KEY),
    ("NUL", ("Authorization: Bearer a\x00b",), BAD),
    ("1 MB", ("Authorization: Bearer " + "k" * 1_000_000,), LARGE_HEAD),
]


def sent(body: bytes, *headers: str) -> bytes:
    return signed("POST", COMPLETIONS, body, *headers)


def chunked(
    parts: list[bytes],
    coding: str = "Transfer-Encoding: chunked",
    trailer: str = "",
    key: str | None = "alpha",
) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    own = () if key is None else (f"Authorization: Bearer {KEYS[key]}",)
    lines = (f"POST {COMPLETIONS} HTTP/1.1", "Host: localhost", "Connection: close", *own)
    head = "\r\n".join((*lines, "Content-Type: application/json", coding)).encode("latin-1")
    return head + b"\r\n\r\n" + body + b"0\r\n" + trailer.encode() + b"\r\n"


def padded(size: int) -> bytes:
    """A good body of this number of bytes."""
    return BODY[:-1] + b" " * (size - len(BODY)) + b"}"


def head(size: int) -> bytes:
    """GET /version with a header block of this number of bytes, each line counted with its end."""
    lines = ("Host: localhost", "Connection: close", BEARER)
    rest = size - sum(len(line) + 2 for line in lines) - len("X-A: ") - 2
    return request_bytes("GET", "/version", headers=(BEARER, "X-A: " + "a" * rest))


def with_headers(count: int) -> bytes:
    own = 3  # Host, Connection, Authorization
    return request_bytes(
        "GET", "/version", headers=(BEARER, *(f"X-{number}: 1" for number in range(count - own)))
    )


def line(size: int) -> bytes:
    """A request line of this number of bytes, its end included."""
    rest = size - len("POST  HTTP/1.1\r\n") - len("/version?")
    return signed("POST", "/version?" + "a" * rest, b"{}")


def has_no_100(reply: Reply) -> bool:
    return b"100 Continue" not in reply.raw


def names_methods(reply: Reply) -> bool:
    return "POST" in reply.headers["allow"]


def asks_for_a_key(reply: Reply) -> bool:
    return reply.headers["www-authenticate"] == "Bearer"


def has_own_id(reply: Reply) -> bool:
    return len(reply.headers["x-request-id"]) == 32 and reply.raw.lower().count(b"x-request-id") == 1


def allows_no_origin(reply: Reply) -> bool:
    return not [name for name in reply.headers if name.startswith("access-control")]


def transport() -> list[Entry]:
    lengths = (("negative", "-1"), ("words", "two"), ("2^64", str(2**64)), ("hex", "0x10"), ("plus", "+2"))
    return [
        entry(1, "garbage", b"\x00\x01\x02garbage\r\n\r\n", BAD),
        entry(1, "TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64, BAD),
        entry(1, "lines without end", b"\r\n" * 50_000 + b"x", BAD, LARGE_HEAD),
        entry(2, "headers at the limit", head(MOST_HEAD), OK),
        entry(2, "headers above the limit", head(MOST_HEAD + 1), LARGE_HEAD),
        entry(2, "20 MB of headers", head(20_000_000), LARGE_HEAD, seconds=20.0),
        entry(3, "as many headers as allowed", with_headers(MOST_HEADERS), OK),
        entry(3, "one header more", with_headers(MOST_HEADERS + 1), LARGE_HEAD),
        entry(3, "100,000 headers", with_headers(100_000), LARGE_HEAD),
        entry(4, "a line at the limit", line(MOST_LINE), METHOD),
        entry(4, "a line above the limit", line(MOST_LINE + 1), LONG_LINE),
        entry(4, "a line of 1 MB", line(1_000_000), LONG_LINE),
        entry(5, "two lengths", sent(BODY, "Content-Length: 2", f"Content-Length: {len(BODY)}"), BAD),
        entry(6, "length and chunked", sent(BODY, "Content-Length: 2", "Transfer-Encoding: chunked"), BAD),
        entry(6, "chunked and length", sent(BODY, "Transfer-Encoding: chunked", "Content-Length: 2"), BAD),
        *(
            entry(6, f"coding {coding!r}", chunked([BODY], f"Transfer-Encoding: {coding}"), BAD)
            for coding in (
                "xchunked",
                "gzip, chunked",
                "chunked, chunked",
                "identity",
                "\x0bchunked",
                "chunked, x",
            )
        ),
        entry(6, "a space before the colon", chunked([BODY], "Transfer-Encoding : chunked"), BAD),
        *(entry(7, f"length: {name}", sent(BODY, f"Content-Length: {text}"), BAD) for name, text in lengths),
        entry(9, "body at the limit", sent(padded(MOST_BODY)), OK, seconds=5.0),
        entry(9, "body above the limit", sent(padded(MOST_BODY + 1)), LARGE_BODY),
        entry(9, "declared above the limit", sent(b"", f"Content-Length: {MOST_BODY + 1}"), LARGE_BODY),
        entry(10, "chunked above the limit", chunked([b" " * 65_536] * 40), LARGE_BODY, seconds=5.0),
        entry(
            11,
            "100 kB as chunks of one byte",
            chunked([b"%c" % byte for byte in padded(100_000)]),
            OK,
            seconds=20.0,
        ),
        entry(12, "bad chunk size", sent(b"zz\r\n{}\r\n0\r\n\r\n", "Transfer-Encoding: chunked"), BAD),
        entry(12, "chunk without an end", sent(b"2\r\n{}xx0\r\n\r\n", "Transfer-Encoding: chunked"), BAD),
        entry(12, "chunk size without end", sent(b"1" * 100_000, "Transfer-Encoding: chunked"), BAD),
        entry(12, "a key behind the body", chunked([BODY], trailer=f"{BEARER}\r\n", key=None), BAD_KEY),
        entry(12, "a Host behind the body", chunked([BODY], trailer="Host: evil.example\r\n"), OK),
        entry(12, "a length behind the body", chunked([BODY], trailer="Content-Length: 5\r\n"), BAD),
        entry(12, "50,000 lines behind the body", chunked([BODY], trailer="X: y\r\n" * 50_000), LARGE_HEAD),
        entry(
            12,
            "1 MB behind a chunk's size",
            sent(b"1;" + b"a" * 10**6, "Transfer-Encoding: chunked"),
            LARGE_HEAD,
        ),
        entry(12, "lines that end in LF", sent(BODY).replace(b"\r\n", b"\n"), BAD),
        entry(12, "a folded header", sent(BODY, "X-A: b\r\n c"), BAD),
        entry(12, "a bare CR", sent(BODY, "X-A: b\rc"), BAD),
        entry(12, "a line without a name", sent(BODY, ": x"), BAD),
        entry(22, "HTTP/0.9", b"GET /health\r\n\r\n", BAD, (505, "bad_version")),
        entry(22, "HTTP/3.7", b"GET /health HTTP/3.7\r\nHost: localhost\r\n\r\n", BAD, (505, "bad_version")),
        entry(
            23,
            "expects to send too much",
            sent(b"", f"Content-Length: {MOST_BODY + 1}", "Expect: 100-continue"),
            LARGE_BODY,
            check=has_no_100,
        ),
    ]


def content() -> list[Entry]:
    types = ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "")
    return [
        *(
            entry(13, name, sent(BODY, f"Content-Encoding: {name}"), MEDIA)
            for name in ("gzip", "br", "deflate, gzip")
        ),
        *(entry(14, f"type {name!r}", sent(BODY, f"Content-Type: {name}"), MEDIA) for name in types),
        entry(
            14,
            "no type",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            + f"{BEARER}\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
            + BODY,
            MEDIA,
        ),
        entry(15, "charset", sent(BODY, "Content-Type: application/json; charset=utf-16"), ENCODING),
        entry(15, "UTF-16", sent(BODY.decode().encode("utf-16")), ENCODING),
        entry(15, "UTF-16 without a mark", sent(BODY.decode().encode("utf-16-le")), (400, "invalid_json")),
        entry(16, "byte order mark", sent(b"\xef\xbb\xbf" + BODY), ENCODING),
        entry(17, "latin-1", sent(BODY.replace(b"hi", b"h\xe9")), ENCODING),
        entry(17, "overlong", sent(BODY.replace(b"hi", b"\xc0\xaf")), ENCODING),
        entry(17, "encoded surrogate", sent(BODY.replace(b"hi", b"\xed\xa0\x80")), ENCODING),
    ]


def addresses() -> list[Entry]:
    hosts = ("evil.example", "localhost/x", "localhost?x", "a@localhost", "localhost\\x", "", "localhost:1:2")
    paths = (
        *("//v1/models", "/v1/../v1/models", "/v1/%2e%2e/v1/models", "/V1/models", "/v1/models/"),
        *("/v1%2fmodels", "/v1/m%6fdels", "/./v1/models", "/v1/models;x"),
    )
    return [
        entry(
            18, "no Host", f"GET /v1/models HTTP/1.1\r\nConnection: close\r\n{BEARER}\r\n\r\n".encode(), HOST
        ),
        entry(18, "two Hosts", signed("GET", "/v1/models", None, "Host: localhost", "Host: localhost"), HOST),
        *(
            entry(18, f"Host {host!r}", signed("GET", "/v1/models", None, f"Host: {host}"), HOST)
            for host in hosts
        ),
        *(
            entry(
                18,
                f"Host {host!r} without a key",
                signed("GET", "/v1/models", None, f"Host: {host}", key=None),
                HOST,
            )
            for host in hosts
        ),
        *(entry(19, path, signed("GET", path, None), NO_ROUTE, (404, "model_not_found")) for path in paths),
        *(entry(19, f"{path} without a key", signed("GET", path, None, key=None), BAD_KEY) for path in paths),
        entry(20, "absolute target", signed("GET", "http://evil.example/v1/models", None), BAD),
        entry(20, "absolute target, own name", signed("GET", "http://localhost/v1/models", None), BAD),
        entry(20, "CONNECT", signed("CONNECT", "evil.example:80", None), BAD),
        entry(20, "CONNECT with a body", signed("CONNECT", "evil.example:80", b"{}", "Upgrade: h2c"), BAD),
        *(
            entry(21, method, signed(method, CHAT, None), METHOD, (405, ""), check=names_methods)
            for method in ("PUT", "DELETE", "TRACE", "PATCH", "GET", "HEAD", "FOO")
        ),
    ]


def headers() -> list[Entry]:
    ids = ("x" * 10_000, "a b", "\xe9moji", "\t", "")
    websocket = ("Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==")
    return [
        entry(24, "websocket", signed("GET", "/version", None, *websocket), OK),
        entry(24, "h2c", signed("GET", "/version", None, "Upgrade: h2c", "HTTP2-Settings: AAMA"), OK),
        entry(
            25, "many ranges", signed("GET", "/version", None, "Range: bytes=" + "0-1," * 3_000 + "2-3"), OK
        ),
        entry(
            25,
            "100,000 ranges",
            signed("GET", "/version", None, "Range: bytes=" + "0-1," * 100_000),
            LARGE_HEAD,
        ),
        *(
            entry(
                26,
                f"id {text!r:.20}",
                signed("GET", "/version", None, f"X-Request-Id: {text}"),
                OK,
                check=has_own_id,
            )
            for text in ids
        ),
        entry(
            26,
            "two ids",
            signed("GET", "/version", None, "X-Request-Id: a", "X-Request-Id: b"),
            OK,
            check=has_own_id,
        ),
        *(
            entry(27, name, request_bytes("GET", "/v1/models", headers=given), answer, check=asks_for_a_key)
            for name, given, answer in KEYS_27
        ),
        *(
            entry(28, name, request_bytes("GET", "/v1/models", headers=given), answer)
            for name, given, answer in KEYS_28
        ),
        entry(29, "disabled", signed("POST", CHAT, GOOD[CHAT], key="gone"), FORBIDDEN),
        *(
            entry(
                31,
                f"preflight of {path}",
                signed(
                    "OPTIONS",
                    path,
                    None,
                    "Origin: https://evil.example",
                    "Access-Control-Request-Method: POST",
                ),
                METHOD,
                NO_ROUTE,
                check=allows_no_origin,
            )
            for path in (CHAT, "/v1/models", "/nowhere", "/metrics", "/health")
        ),
        entry(
            31,
            "a page's request",
            signed("POST", COMPLETIONS, BODY, "Origin: https://evil.example"),
            OK,
            check=allows_no_origin,
        ),
    ]


ENTRIES = [*transport(), *content(), *addresses(), *headers()]
