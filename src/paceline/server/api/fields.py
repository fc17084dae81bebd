"""The fields of a request, declared once: what is checked, described, ignored and refused follows from the table.

A table knows one route. A field is used, or known to change nothing, or accepted only where it asks for what is done
anyway, or not supported. Every field that is not required may be null, which is the same as absent.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol
from urllib.parse import parse_qsl

from paceline.errors import InvalidRequest
from paceline.server.errors import UnknownParameter, UnsupportedParameter

# Kinds of JSON values that fields of requests have: each checks a value strictly and describes itself as a schema.
#
# Nothing is converted: true is no number, 1.0 is no whole number and "0.5" is neither. A value that is wrong raises
# InvalidRequest whose `param` is the field.


Schema = dict[str, Any]


class Kind(Protocol):
    """What a field's value has to be."""

    @property
    def must(self) -> str:
        """The second half of "<field> must be ..."."""

    def check(self, value: Any, name: str) -> None:
        """Raises InvalidRequest when the value is wrong."""

    def schema(self) -> Schema: ...


def refuse(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", param=name)


@dataclass(frozen=True, slots=True)
class Flag:
    @property
    def must(self) -> str:
        return "true or false"

    def check(self, value: Any, name: str) -> None:
        if type(value) is not bool:
            raise refuse(name, f"must be {self.must}")

    def schema(self) -> Schema:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in a range."""

    low: int
    high: int

    @property
    def must(self) -> str:
        return f"a whole number between {self.low} and {self.high}"

    def check(self, value: Any, name: str) -> None:
        if type(value) is not int or not self.low <= value <= self.high:
            raise refuse(name, f"must be {self.must}")

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number in a range; `above` leaves the low end out."""

    low: float
    high: float
    above: bool = False

    @property
    def must(self) -> str:
        if self.above:
            return f"a number above {self.low:g} and at most {self.high:g}"
        return f"a number between {self.low:g} and {self.high:g}"

    def check(self, value: Any, name: str) -> None:
        if type(value) not in (int, float) or not self.low <= value <= self.high:
            raise refuse(name, f"must be {self.must}")
        if (self.above and value == self.low) or (type(value) is float and not math.isfinite(value)):
            raise refuse(name, f"must be {self.must}")

    def schema(self) -> Schema:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}


@dataclass(frozen=True, slots=True)
class Text:
    """A text of so many characters; `max_bytes` counts its UTF-8."""

    min_chars: int = 0
    max_chars: int | None = None
    max_bytes: int | None = None
    no_nul: bool = False

    @property
    def must(self) -> str:
        if self.max_chars is not None:
            return f"a text of {self.min_chars} to {self.max_chars} characters"
        if self.max_bytes is not None:
            return f"a text of {self.min_chars} to {self.max_bytes} bytes"
        return "a text that is not empty" if self.min_chars else "a text"

    def check(self, value: Any, name: str) -> None:
        if type(value) is not str or len(value) < self.min_chars:
            raise refuse(name, f"must be {self.must}")
        if self.max_chars is not None and len(value) > self.max_chars:
            raise refuse(name, f"must be {self.must}")
        if self.max_bytes is not None and (
            len(value) > self.max_bytes or len(value.encode(errors="replace")) > self.max_bytes
        ):
            raise refuse(name, f"must be {self.must}")
        if self.no_nul and "\0" in value:
            raise refuse(name, "must not hold a NUL character")

    def schema(self) -> Schema:
        schema: Schema = {"type": "string"}
        if self.min_chars:
            schema["minLength"] = self.min_chars
        if (longest := self.max_chars or self.max_bytes) is not None:
            schema["maxLength"] = longest
        return schema


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of values of one kind."""

    part: Kind
    max_items: int
    min_items: int = 0

    @property
    def must(self) -> str:
        return f"a list of {self.min_items} to {self.max_items} entries, each {self.part.must}"

    def check(self, value: Any, name: str) -> None:
        if type(value) is not list or not self.min_items <= len(value) <= self.max_items:
            raise refuse(name, f"must be {self.must}")
        for part in value:
            self.part.check(part, name)

    def schema(self) -> Schema:
        return {
            "type": "array",
            "items": self.part.schema(),
            "minItems": self.min_items,
            "maxItems": self.max_items,
        }


@dataclass(frozen=True, slots=True)
class OneOrMany:
    """A text, or a list of such."""

    one: Text
    many: ListOf
    must: str

    def check(self, value: Any, name: str) -> None:
        if type(value) not in (str, list):
            raise refuse(name, f"must be {self.must}")
        (self.many if type(value) is list else self.one).check(value, name)

    def schema(self) -> Schema:
        return {"anyOf": [self.one.schema(), self.many.schema()]}


@dataclass(frozen=True, slots=True)
class MapOf:
    """An object with free keys, some of them null. `message` replaces the sentence for whatever is wrong in it."""

    part: Kind
    max_entries: int
    max_key_chars: int = 64
    message: str | None = None

    @property
    def must(self) -> str:
        return f"an object of at most {self.max_entries} entries, each {self.part.must}"

    def check(self, value: Any, name: str) -> None:
        if not isinstance(value, Mapping) or any(len(key) > self.max_key_chars for key in value):
            raise refuse(name, self.message or f"must be {self.must}")
        if len(value) > self.max_entries:
            raise refuse(name, f"takes at most {self.max_entries} entries, not {len(value)}")
        for part in value.values():
            try:
                if part is not None:
                    self.part.check(part, name)
            except InvalidRequest:
                raise refuse(name, self.message or f"must be {self.must}") from None

    def schema(self) -> Schema:
        return {
            "type": "object",
            "additionalProperties": self.part.schema(),
            "maxProperties": self.max_entries,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few texts."""

    values: tuple[str, ...]

    @property
    def must(self) -> str:
        return "one of " + ", ".join(self.values)

    def check(self, value: Any, name: str) -> None:
        if type(value) is not str or value not in self.values:
            raise refuse(name, f"must be {self.must}")

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True, slots=True)
class Shaped:
    """A value whose parts are checked elsewhere: only its JSON type is looked at here."""

    types: tuple[type, ...]
    must: str
    described: Schema | None = None

    def check(self, value: Any, name: str) -> None:
        if type(value) not in self.types:
            raise refuse(name, f"must be {self.must}")

    def schema(self) -> Schema:
        return dict(self.described or {})


ANYTHING = Shaped((str, int, float, bool, list, dict), "a JSON value")


MAX_NAMED = 16  # unknown fields named in a header
MAX_NAME_CHARS = 64
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class Group(Enum):
    USED = "used"
    WITHOUT_EFFECT = "without effect"
    ONLY = "only these values"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a body."""

    name: str
    kind: Kind = ANYTHING
    help: str = ""
    group: Group = Group.USED
    only: tuple[object, ...] = ()  # the values a field of the group ONLY may have
    required: bool = False
    instead: str = "leave it out"  # what to do where a value of the group ONLY is refused

    def schema(self) -> Schema:
        described: Schema = {"enum": [*self.only, None]} if self.group is Group.ONLY else self.kind.schema()
        if not self.required and self.group is not Group.ONLY:
            described = {"anyOf": [described, {"type": "null"}]}
        notes = {Group.WITHOUT_EFFECT: "Accepted; has no effect.", Group.ONLY: "Other values are refused."}
        text = " ".join(part for part in (self.help, notes.get(self.group, "")) if part)
        return described | ({"description": text} if text else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a body gives: fields that are used, without nulls, and the names of unknown ones."""

    fields: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


class FieldTable:
    """All fields of one route."""

    def __init__(self, route: str, fields: Iterable[Field]) -> None:
        self.route = route
        self._fields = {field.name: field for field in fields}
        self._required = [field for field in self._fields.values() if field.required]

    def read(self, body: Mapping[str, Any], *, strict: bool) -> Given:
        """Check a body. Unknown fields are refused when `strict`, else named in the result."""
        used: dict[str, Any] = {}
        ignored: list[str] = []
        for name, value in body.items():
            if value is None:
                continue
            field = self._fields.get(name)
            if field is None:
                if strict:
                    raise self._unknown(name)
                ignored.append(name)
            elif self._is_used(field, value):
                used[name] = value
        for field in self._required:
            if field.name not in used:
                raise refuse(field.name, f"must be {field.kind.must}")
        return Given(fields=used, ignored=tuple(ignored))

    def schema(self) -> Schema:
        """The JSON schema of the body."""
        shown = [field for field in self._fields.values() if field.group is not Group.UNSUPPORTED]
        return {
            "type": "object",
            "properties": {field.name: field.schema() for field in shown},
            "required": [field.name for field in self._required],
        }

    def _is_used(self, field: Field, value: Any) -> bool:
        if field.group is Group.UNSUPPORTED:
            raise UnsupportedParameter(f"{field.name} is not supported by {self.route}", param=field.name)
        if field.group is Group.ONLY:
            if not any(type(value) is type(known) and value == known for known in field.only):
                message = f"{field.name} is not supported; {field.instead}"
                raise UnsupportedParameter(message, param=field.name)
            return False
        field.kind.check(value, field.name)
        return field.group is Group.USED

    def _unknown(self, name: str) -> UnknownParameter:
        close = difflib.get_close_matches(name[:MAX_NAME_CHARS], self._fields, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        return UnknownParameter(f"{name!r:.100} is not a field of {self.route}{hint}", param=name[:100])


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Names of ignored fields as a header; such as cannot stand in one are left out."""
    shown = [name for name in names if len(name) <= MAX_NAME_CHARS and _HEADER_NAME.fullmatch(name)]
    return {"x-paceline-ignored-fields": ", ".join(shown[:MAX_NAMED])} if shown else {}


# Operation objects of OpenAPI, out of the tables of fields.


ERROR: dict[str, Any] = {
    "description": "The error object of the OpenAI API, or of the Anthropic API on its routes.",
    "content": {"application/json": {"schema": {"type": "object"}}},
}


def operation(
    summary: str,
    schema: Mapping[str, Any] | None = None,
    *,
    streams: bool = False,
    parameters: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What a route takes and gives, as far as tools want to know."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}, "default": ERROR},
    }
    if schema is not None:
        body = {"required": True, "content": {"application/json": {"schema": dict(schema)}}}
        described["requestBody"] = body
    if parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    return described


# The query of a GET that lists things: a few known parameters, each given once.


MAX_PARAMETERS = 16


def read_query(query: str, names: Iterable[str]) -> dict[str, str]:
    """The parameters by name; those that are empty count as not given, unknown ones as well."""
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
