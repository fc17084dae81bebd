"""Entries 120: contexts that make no sense, and parts that name none."""

from __future__ import annotations

from typing import Any

from tests.e2e.catalogue.entry import (
    CHAT,
    CONTEXT_LENGTH,
    MESSAGES,
    OK,
    RESPONSES,
    VALUE,
    Entry,
    asking,
    entry,
)
from tests.e2e.catalogue.served import signed

CONTEXTS = "/v1/contexts"
NOT_FOUND = (404, "context_not_found")
NO_BLEND = (400, "blend_unavailable")


def turn(named: object) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": [{"type": "context", "context": named}, {"type": "text", "text": "hi"}]}
    ]


def creating(body: dict[str, Any], *answers: Any) -> Entry:
    return entry(120, f"{CONTEXTS} {str(body)[:80]}", signed("POST", CONTEXTS, body), *answers)


ENTRIES: list[Entry] = [
    *(
        creating(body, VALUE)
        for body in (
            {},
            {"text": ""},
            {"text": 5},
            {"text": ["x"]},
            {"text": "x", "ttl_s": 0},
            {"text": "x", "ttl_s": 1.5},
            {"text": "x", "ttl_s": 86_401},
            {"text": "x", "pin": 1},
            {"text": "x", "model": ["tiny"]},
            {"text": "x", "role": "assistant"},
            {"text": "x", "name": "n" * 129},
        )
    ),
    creating({"text": "x" * 1_000_000}, CONTEXT_LENGTH),
    creating({"text": "x", "model": "another"}, (404, "model_not_found")),
    *(
        entry(120, f"{method} of another key", signed(method, f"{CONTEXTS}/ctx_of_beta", {}), NOT_FOUND)
        for method in ("GET", "DELETE")
    ),
    *(asking(120, route, {"messages": turn("ctx_x")}, NOT_FOUND) for route in (CHAT, MESSAGES)),
    asking(120, RESPONSES, {"input": turn("ctx_x")}, NOT_FOUND),
    *(asking(120, CHAT, {"messages": turn(named)}, VALUE) for named in (None, 5, {"id": "x"}, ["ctx_x"])),
    asking(120, CHAT, {"messages": turn("x" * 100_000)}, NOT_FOUND),
    asking(120, CHAT, {"context_reuse": "blend"}, NO_BLEND),
    asking(120, CHAT, {"context_reuse": "exact"}, OK),
    asking(120, CHAT, {"context_reuse": "whatever"}, VALUE),
]
