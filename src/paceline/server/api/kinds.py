"""Kinds of JSON values that fields of requests have: each checks a value strictly and describes itself as a schema.

Nothing is converted: true is no number, 1.0 is no whole number and "0.5" is neither. A value that is wrong raises
InvalidRequest whose `param` is the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.errors import InvalidRequest

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
