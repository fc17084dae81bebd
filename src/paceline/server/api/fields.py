"""The fields of a request, declared once: what is checked, described, ignored and refused follows from the table.

A table knows one route. A field is used, or known to change nothing, or accepted only where it asks for what is done
anyway, or not supported. Every field that is not required may be null, which is the same as absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl

from paceline.errors import InvalidRequest, did_you_mean
from paceline.server.errors import UnknownParameter, UnsupportedParameter

Schema = dict[str, Any]
MAX_NAMED = 16  # unknown fields named in a header
MAX_NAME_CHARS = 64
_HEADER_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field's value has to be. Nothing is converted: true is no number, 1.0 is no whole number."""

    expected: str  # the second half of "<field> must be ..."
    schema: Schema
    # What is wrong with a value, the second half of "<field> ..."; "" for a good one.
    fault: Callable[[Any], str]

    def check(self, value: Any, name: str) -> None:
        """Raises InvalidRequest whose `param` is the field."""
        if fault := self.fault(value):
            raise InvalidRequest(f"{name} {fault}", param=name)


def kind(expected: str, schema: Schema, accepts: Callable[[Any], bool]) -> Kind:
    return Kind(expected, schema, lambda value: "" if accepts(value) else f"must be {expected}")


FLAG = kind("true or false", {"type": "boolean"}, lambda value: type(value) is bool)


def whole(low: int, high: int) -> Kind:
    """A whole number in a range."""
    schema = {"type": "integer", "minimum": low, "maximum": high}
    expected = f"a whole number between {low} and {high}"
    return kind(expected, schema, lambda value: type(value) is int and low <= value <= high)


def number(low: float, high: float, *, above: bool = False) -> Kind:
    """A finite number in a range; `above` leaves the low end out."""
    expected = (
        f"a number above {low:g} and at most {high:g}" if above else f"a number between {low:g} and {high:g}"
    )
    schema = {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}

    def accepts(value: Any) -> bool:
        return type(value) in (int, float) and low <= value <= high and not (above and value == low)

    return kind(expected, schema, accepts)


def text(min_chars: int = 0, max_chars: int | None = None) -> Kind:
    """A text of this number of characters."""
    schema: Schema = {"type": "string"} | ({"minLength": min_chars} if min_chars else {})
    expected = "a text that is not empty" if min_chars else "a text"
    if max_chars is not None:
        schema["maxLength"] = max_chars
        expected = f"a text of {min_chars} to {max_chars} characters"

    def accepts(value: Any) -> bool:
        return (
            type(value) is str and min_chars <= len(value) and (max_chars is None or len(value) <= max_chars)
        )

    return kind(expected, schema, accepts)


def stop_text(max_bytes: int) -> Kind:
    """A text that ends an answer; its size is that of its UTF-8."""
    expected = f"a text of 1 to {max_bytes} bytes"

    def fault(value: Any) -> str:
        if type(value) is not str or not 1 <= len(value) <= max_bytes:
            return f"must be {expected}"
        if len(value.encode(errors="replace")) > max_bytes:
            return f"must be {expected}"
        return "must not hold a NUL character" if "\0" in value else ""

    return Kind(expected, {"type": "string", "minLength": 1, "maxLength": max_bytes}, fault)


def list_of(part: Kind, max_items: int, min_items: int = 0) -> Kind:
    expected = f"a list of {min_items} to {max_items} entries, each {part.expected}"
    schema = {"type": "array", "items": part.schema, "minItems": min_items, "maxItems": max_items}

    def fault(value: Any) -> str:
        if type(value) is not list or not min_items <= len(value) <= max_items:
            return f"must be {expected}"
        return next(filter(None, map(part.fault, value)), "")

    return Kind(expected, schema, fault)


def one_or_many(one: Kind, max_items: int, expected: str) -> Kind:
    """A text, or a list of such."""
    many = list_of(one, max_items)

    def fault(value: Any) -> str:
        if type(value) not in (str, list):
            return f"must be {expected}"
        return (many if type(value) is list else one).fault(value)

    return Kind(expected, {"anyOf": [one.schema, many.schema]}, fault)


def map_of(part: Kind, max_entries: int, max_key_chars: int = 64, message: str | None = None) -> Kind:
    """An object with free keys, some of them null. `message` replaces the sentence for whatever is wrong in it."""
    expected = f"an object of at most {max_entries} entries, each {part.expected}"
    schema = {"type": "object", "additionalProperties": part.schema, "maxProperties": max_entries}

    def fault(value: Any) -> str:
        wrong = message or f"must be {expected}"
        if not isinstance(value, Mapping) or any(len(key) > max_key_chars for key in value):
            return wrong
        if len(value) > max_entries:
            return f"takes at most {max_entries} entries, not {len(value)}"
        return wrong if any(each is not None and part.fault(each) for each in value.values()) else ""

    return Kind(expected, schema, fault)


def choice(values: tuple[str, ...]) -> Kind:
    """One of a few texts."""
    schema = {"type": "string", "enum": list(values)}
    return kind("one of " + ", ".join(values), schema, lambda value: type(value) is str and value in values)


def shaped(types: tuple[type, ...], expected: str, schema: Schema | None = None) -> Kind:
    """A value whose parts are checked elsewhere: only its JSON type is looked at here."""
    return kind(expected, schema or {}, lambda value: type(value) in types)


ANYTHING = shaped((str, int, float, bool, list, dict), "a JSON value")


class FieldGroup(Enum):
    USED = "used"
    WITHOUT_EFFECT = "without effect"
    ONLY = "only these values"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body."""

    name: str
    kind: Kind = ANYTHING
    help: str = ""
    _: KW_ONLY
    required: bool = False
    group: FieldGroup = FieldGroup.USED
    only: tuple[object, ...] = ()  # the values a field of the group ONLY may have
    instead: str = "leave it out"  # what to do where a value of the group ONLY is refused

    def schema(self) -> Schema:
        described: Schema = (
            {"enum": [*self.only, None]} if self.group is FieldGroup.ONLY else dict(self.kind.schema)
        )
        if not self.required and self.group is not FieldGroup.ONLY:
            described = {"anyOf": [described, {"type": "null"}]}
        notes = {
            FieldGroup.WITHOUT_EFFECT: "Accepted; has no effect.",
            FieldGroup.ONLY: "Other values are refused.",
        }
        text = " ".join(part for part in (self.help, notes.get(self.group, "")) if part)
        return described | ({"description": text} if text else {})


def only(name: str, *values: object, instead: str = "leave it out") -> Field:
    """A field that may only ask for what is done anyway."""
    return Field(name, group=FieldGroup.ONLY, only=values, instead=instead)


def without_effect(name: str, kind: Kind = ANYTHING) -> Field:
    """A field that is accepted and changes nothing."""
    return Field(name, kind, group=FieldGroup.WITHOUT_EFFECT)


def unsupported(*names: str) -> list[Field]:
    return [Field(name, group=FieldGroup.UNSUPPORTED) for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFields:
    """What a body gives: fields that are used, without nulls, and the names of unknown ones."""

    fields: Mapping[str, Any]
    ignored: tuple[str, ...] = ()


class FieldTable:
    """All fields of one route."""

    def __init__(self, route: str, fields: Iterable[Field]) -> None:
        self.route = route
        self._fields = {field.name: field for field in fields}
        self._required = [field for field in self._fields.values() if field.required]

    def read(self, body: Mapping[str, Any], *, strict: bool) -> GivenFields:
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
                raise InvalidRequest(f"{field.name} must be {field.kind.expected}", param=field.name)
        return GivenFields(fields=used, ignored=tuple(ignored))

    def schema(self) -> Schema:
        """The JSON schema of the body."""
        shown = [field for field in self._fields.values() if field.group is not FieldGroup.UNSUPPORTED]
        return {
            "type": "object",
            "properties": {field.name: field.schema() for field in shown},
            "required": [field.name for field in self._required],
        }

    def _is_used(self, field: Field, value: Any) -> bool:
        if field.group is FieldGroup.UNSUPPORTED:
            raise UnsupportedParameter(f"{field.name} is not supported by {self.route}", param=field.name)
        if field.group is FieldGroup.ONLY:
            if not any(type(value) is type(known) and value == known for known in field.only):
                message = f"{field.name} is not supported; {field.instead}"
                raise UnsupportedParameter(message, param=field.name)
            return False
        field.kind.check(value, field.name)
        return field.group is FieldGroup.USED

    def _unknown(self, name: str) -> UnknownParameter:
        hint = did_you_mean(name, self._fields)
        return UnknownParameter(f"{name!r:.100} is not a field of {self.route}{hint}", param=name[:100])


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Names of ignored fields as a header; such as cannot stand in one are left out."""
    shown = [name for name in names if len(name) <= MAX_NAME_CHARS and _HEADER_NAME.fullmatch(name)]
    return {"x-paceline-ignored-fields": ", ".join(shown[:MAX_NAMED])} if shown else {}


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
