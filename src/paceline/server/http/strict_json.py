"""A request body as one JSON object, read more strictly than the standard library does.

Refused: anything but UTF-8, a byte order mark, duplicate keys, NaN and infinities, halves of surrogate pairs, deep
nesting, too many or too long keys, endless numbers. Ordinary bodies cost one pass of the C parser.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from typing import Any, NoReturn

from paceline.server.errors import Refusal

MAX_DEPTH = 32
MAX_KEYS = 64  # of the outermost object
MAX_KEY_LENGTH = 256

# Strings are skipped whole; possessive, so that no input makes the search go back over what it has read.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[\]{}]', re.DOTALL)
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_object(data: bytes) -> dict[str, Any]:
    """The object a body holds; raises `Refusal` for whatever is wrong with it."""
    if not data.strip():
        raise Refusal("empty_body")
    if data.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Refusal("invalid_encoding")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal("invalid_encoding") from None
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_depth(data)
    value = _parse(text)
    if not isinstance(value, dict):
        raise Refusal("not_an_object")
    if len(value) > MAX_KEYS:
        raise Refusal("too_many_keys")
    if _ESCAPED_SURROGATE.search(data):
        _check_surrogates(value)
    return value


def _parse(text: str) -> Any:
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite
        )
    except json.JSONDecodeError as error:
        raise Refusal(
            "invalid_json", f"The request body is not valid JSON (line {error.lineno}, column {error.colno})."
        ) from None
    except RecursionError:
        raise Refusal("too_deep") from None
    except ValueError:  # the interpreter's own limit on the digits of an integer
        raise Refusal("invalid_number") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refusal("duplicate_key")
    if found and max(map(len, found)) > MAX_KEY_LENGTH:
        raise Refusal("key_too_long")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise Refusal("invalid_number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise Refusal("invalid_number")
    return value


def _check_depth(data: bytes) -> None:
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(data):
        first = data[match.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise Refusal("too_deep")
        elif first in b"]}":
            depth -= 1


def _check_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Refusal("invalid_unicode") from None
