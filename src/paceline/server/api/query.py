"""The query of a GET that lists things: a few known parameters, each given once."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import parse_qsl

from paceline.errors import InvalidRequest

MAX_PARAMETERS = 16


def read_query(query: str, names: Iterable[str]) -> dict[str, str]:
    """The parameters by name; those that are empty count as not given, those nobody knows as well."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
    except ValueError:
        raise InvalidRequest("the query of the address cannot be read; write it as name=value&...") from None
    known = set(names)
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in known and name in found:
            raise InvalidRequest(f"{name} is given twice", param=name)
        if name in known:
            found[name] = value
    return {name: value for name, value in found.items() if value}


def whole_of(found: dict[str, str], name: str, *, default: int, low: int, high: int) -> int:
    text = found.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    if not is_number or not low <= int(text) <= high:
        raise InvalidRequest(f"{name} must be a whole number between {low} and {high}", param=name)
    return int(text)


def choice_of(found: dict[str, str], name: str, choices: tuple[str, ...]) -> str | None:
    text = found.get(name)
    if text is not None and text not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}", param=name)
    return text
