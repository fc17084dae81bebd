"""Keyword arguments that are not known: refused with what to do instead, or with the name that was probably meant.

Owns the wording. Which names are refused, and why, is declared where they would be used.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from paceline.errors import InvalidRequest

Hints = Mapping[str, str]  # what to do instead, by the name that is not supported
Kind = TypeVar("Kind", bound=type)


def is_off(value: object) -> bool:
    """Whether an argument asks for nothing; scripts often pass such values along."""
    return value is None or value is False


def not_supported(name: str, hint: str) -> str:
    return f"{name} is not supported: {hint}"


def with_closest(message: str, name: str, known: Collection[str]) -> str:
    """A sentence that ends with a name, and the known one that is most like it."""
    close = difflib.get_close_matches(name, known, 1)
    return message + (f"; did you mean {close[0]}?" if close else "")


def refuse(owner: str, given: Mapping[str, object], hints: Hints, known: Collection[str]) -> None:
    """Raise for the first argument that asks for something: InvalidRequest with its hint, TypeError without one."""
    for name, value in given.items():
        if name not in hints:
            raise TypeError(with_closest(f"{owner} has no argument {name}", name, known))
        if not is_off(value):
            raise InvalidRequest(not_supported(name, hints[name]), param=name)


def refusing(hints: Hints) -> Callable[[Kind], Kind]:
    """For a dataclass: arguments that are not its fields are refused by name."""

    def decorate(kind: Kind) -> Kind:
        made = kind.__init__  # type: ignore[misc]
        known = frozenset(spec.name for spec in fields(kind))

        @functools.wraps(made)
        def init(self: Any, **given: Any) -> None:
            if not known.issuperset(given):
                others = {name: value for name, value in given.items() if name not in known}
                refuse(kind.__name__, others, hints, known)
                given = {name: value for name, value in given.items() if name in known}
            made(self, **given)

        kind.__init__ = init  # type: ignore[misc]
        return kind

    return decorate
