"""The fields of a request, declared once: what is checked, described, ignored and refused follows from the table.

A table knows one route. A field is used, or known to change nothing, or accepted only where it asks for what is done
anyway, or not supported. Every field that is not required may be null, which is the same as absent.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from paceline.server.api.kinds import ANYTHING, Kind, Schema, refuse
from paceline.server.failures import UnknownParameter, UnsupportedParameter

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
    """What a body gives: fields that are used, without nulls, and the names of those nobody knows."""

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
