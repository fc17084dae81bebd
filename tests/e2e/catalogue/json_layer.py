"""Entries 32 to 46: bodies that are no JSON object, or one that is read in two ways. On every route with a body."""

from __future__ import annotations

import json

from tests.e2e.catalogue.entry import (
    CHAT,
    COMPLETIONS,
    CONTEXT_LENGTH,
    GENERATING,
    GOOD,
    OK,
    VALUE,
    Answer,
    Entry,
    asking,
    asking_each,
    posting,
)

EMPTY, JSON, OBJECT, DEEP, NUMBER, DUPLICATE, UNICODE, KEYS, LONG_KEY = (
    (400, code)
    for code in (
        *("empty_body", "invalid_json", "not_an_object", "too_deep", "invalid_number", "duplicate_key"),
        *("invalid_unicode", "too_many_keys", "key_too_long"),
    )
)
MOST_DEPTH, MOST_KEYS, MOST_KEY_LENGTH, MOST_DIGITS = 32, 64, 256, 4_300

# Whatever the route: number, name, body, answer.
BODIES: list[tuple[int, str, bytes, Answer]] = [
    (32, "empty", b"", EMPTY),
    (32, "blanks", b" \r\n\t ", EMPTY),
    *((33, text, text.encode(), OBJECT) for text in ("null", "[]", '"x"', "5", "true", "[{}]")),
    (34, "trailing", b"{} x", JSON),
    (34, "two objects", b"{}{}", JSON),
    (34, "cut", b'{"a": ', JSON),
    (34, "comment", b"{/* */}", JSON),
    (34, "single quotes", b"{'a': 1}", JSON),
    (34, "trailing comma", b'{"a": 1,}', JSON),
    (34, "control character", b'{"a": "\x01"}', JSON),
    (35, "100,000 levels", b"[" * 100_000, DEEP),
    (35, "100,000 objects", b'{"a":' * 100_000, DEEP),
    *(
        (35, f"{levels} levels", b'{"a":' * levels + b"1" + b"}" * levels, DEEP)
        for levels in (MOST_DEPTH + 1, 100, 900)
    ),
    (35, "brackets in strings do not count", b'{"a": "' + b"[" * 40_000 + b'"}', VALUE),
    *(
        (36, text, b'{"temperature": %b}' % text.encode(), NUMBER)
        for text in ("NaN", "Infinity", "-Infinity", "1e999")
    ),
    (36, "nested", b'{"a": [[-1e400]]}', NUMBER),
    (37, "a digit too many", b'{"seed": ' + b"9" * (MOST_DIGITS + 1) + b"}", NUMBER),
    (37, "5,000 digits", b'{"seed": ' + b"9" * 5_000 + b"}", NUMBER),
    (37, "1 MB of digits", b'{"seed": ' + b"9" * 1_000_000 + b"}", NUMBER),
    (41, "duplicate", b'{"model": "tiny", "model": "x"}', DUPLICATE),
    (41, "nested duplicate", b'{"a": [{"b": 1, "b": 1}]}', DUPLICATE),
    (41, "spelled differently", b'{"model": "tiny", "mod\\u0065l": "x"}', DUPLICATE),
    *(
        (42, text, b'{"a": ["%b"]}' % text.encode(), UNICODE)
        for text in ("\\ud800", "\\udc00x", "\\uDBFF\\u0041")
    ),
    (42, "in a key", b'{"a": {"\\ud800": 1}}', UNICODE),
    (44, "65 keys", json.dumps({str(i): i for i in range(MOST_KEYS + 1)}).encode(), KEYS),
    (44, "100,000 keys", json.dumps({str(i): i for i in range(100_000)}).encode(), KEYS),
    (46, "long key", b'{"' + b"k" * (MOST_KEY_LENGTH + 1) + b'": 1}', LONG_KEY),
    (46, "1 MB key", b'{"' + b"k" * 1_000_000 + b'": 1}', LONG_KEY),
]


def limits() -> list[Entry]:
    """At the limit; what is above it is in the list for all routes."""
    deep = json.loads("[" * (MOST_DEPTH - 1) + "]" * (MOST_DEPTH - 1))
    keys = {f"x{number}": number for number in range(MOST_KEYS - len(GOOD[COMPLETIONS]))}
    return [
        asking(35, COMPLETIONS, {"x": deep}, OK),
        asking(37, COMPLETIONS, {"x": int("9" * MOST_DIGITS)}, OK),
        asking(37, COMPLETIONS, {"seed": int("9" * MOST_DIGITS)}, VALUE),
        asking(
            44,
            COMPLETIONS,
            keys,
            OK,
            check=lambda reply: "x0, x1" in reply.headers["x-paceline-ignored-fields"],
        ),
        asking(46, COMPLETIONS, {"k" * MOST_KEY_LENGTH: 1}, OK),
    ]


def coercions() -> list[Entry]:
    """Numbers, booleans and strings are not each other."""
    return [
        *asking_each(38, COMPLETIONS, "max_tokens", [-0.0, 3e0], VALUE),
        *asking_each(38, CHAT, "seed", [1.0, -0.5], VALUE),
        posting(38, "-0 is 0", COMPLETIONS, b'{"model":"tiny","prompt":"hi","max_tokens":2,"seed":-0}', OK),
        *asking_each(39, COMPLETIONS, "max_tokens", [False], VALUE),
        *asking_each(40, COMPLETIONS, "temperature", ["0.5", "", "x"], VALUE),
        *asking_each(40, CHAT, "stream", ["true", 1, 0], VALUE),
    ]


def texts() -> list[Entry]:
    """Texts that are odd, and are texts."""
    odd = (
        "a\0b",
        "\ufffe\uffff",
        "a" + "\u0301" * 50,
        "\u202eabc\u202c",
        "\U0001f600" * 3,
        "\x1b[2J",
        "\u2028",
    )
    return [
        *(asking(43, COMPLETIONS, {"prompt": text}, OK) for text in odd),
        *(asking(43, CHAT, {"messages": [{"role": "user", "content": text}]}, OK) for text in odd),
        asking(43, COMPLETIONS, {"prompt": "a" + "\u0301" * 300_000}, CONTEXT_LENGTH),
        *(
            asking(45, route, {"no_such_field": 1, "tempature": 2}, OK, check=_names_unknown)
            for route in GENERATING
        ),
    ]


def _names_unknown(reply: object) -> bool:
    headers: dict[str, str] = reply.headers  # type: ignore[attr-defined]
    return headers["x-paceline-ignored-fields"] == "no_such_field, tempature"


ENTRIES = [
    *(
        posting(number, name, route, body, answer)
        for route in GOOD
        for number, name, body, answer in BODIES
        if len(body) < 50_000 or route == CHAT
    ),
    *limits(),
    *coercions(),
    *texts(),
]
