"""Entries 104 to 106: routes that are not there, and those of tokens."""

from __future__ import annotations

from tests.e2e.catalogue.entry import (
    BAD_KEY,
    DETOKENIZE,
    NO_MODEL,
    OK,
    TOKENIZE,
    VALUE,
    Entry,
    asking,
    asking_each,
    entry,
)
from tests.e2e.catalogue.served import VOCAB_SIZE, signed
from tests.e2e.http_server import Reply

MOST_IDS = 262_144
MISSING = (
    *("/v1/files", "/v1/files/x", "/v1/audio/speech", "/v1/images/generations"),
    *("/v1/batches", "/v1/responses/resp_1", "/v1/messages/batches", "/v1/audio/transcriptions"),
)


def names_the_route(reply: Reply) -> bool:
    return "/v1/" in reply.json["error"]["message"]


ENTRIES: list[Entry] = [
    entry(104, "a body", signed("GET", "/v1/models", b'{"a": 1}'), OK),
    entry(104, "no JSON as a body", signed("GET", "/v1/models", b"\xff" * 1000), OK),
    entry(104, "a query", signed("GET", "/v1/models?x=1&x=2&%00&a[]=b#c", None), OK),
    entry(104, "unknown", signed("GET", "/v1/models/nothing", None), NO_MODEL),
    entry(104, "long", signed("GET", "/v1/models/" + "x" * 7_000, None), NO_MODEL),
    entry(104, "1 MB", signed("GET", "/v1/models/" + "x" * 1_000_000, None), (414, "uri_too_long")),
    *(
        entry(104, path, signed(method, path, body), (404, "unsupported_route"), check=names_the_route)
        for path in MISSING
        for method, body in (("GET", None), ("POST", b"{}"), ("POST", b"\xff no JSON"))
    ),
    entry(105, "/metrics without a key", signed("GET", "/metrics", None, key=None), BAD_KEY),
    entry(105, "/metrics", signed("GET", "/metrics", None), OK),
    entry(105, "HEAD /metrics", signed("HEAD", "/metrics", None), OK),
    *asking_each(106, TOKENIZE, "prompt", [None, 5, ["a"], {}], VALUE),
    asking(106, TOKENIZE, {"messages": []}, VALUE),
    *asking_each(106, TOKENIZE, "add_special_tokens", ["x", 1], VALUE),
    *asking_each(
        106,
        DETOKENIZE,
        "tokens",
        [[-1], [VOCAB_SIZE], [2**31], [2**63], [1.5], ["5"], [True], 5, None, {}, "x", [5] * (MOST_IDS + 1)],
        VALUE,
    ),
    asking(106, DETOKENIZE, {"tokens": [5] * 650_000}, VALUE),
    asking(106, DETOKENIZE, {"tokens": [5] * MOST_IDS}, OK),
    asking(106, DETOKENIZE, {"tokens": []}, OK),
]
