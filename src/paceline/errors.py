"""Every error a user can see, as one tree, and the wording that errors have in common.

Raised at the edge (configuration, files, admission) with a message that says what is wrong and what to do.
Inside the core, broken assumptions are `assert`; they are never part of this tree.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar


class PacelineError(Exception):
    """Base of all errors meant for users. `exit_code` is what a command exits with."""

    exit_code = 1


class InputError(PacelineError):
    """A file, flag or field given by the user is wrong."""

    exit_code = 2


class ConfigError(InputError):
    """Options that are out of range or contradict each other."""


class InvalidRequest(PacelineError):
    """A request that is wrong in itself; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NeverFits(InvalidRequest):
    """A request that could not run even if it were alone."""


class GrammarTooComplex(InvalidRequest):
    """A schema or grammar that is too large, too deep, or takes too long to compile; `param` names the field."""

    code = "grammar_too_complex"


class InvalidAdapter(InvalidRequest):
    """An adapter's folder that is incomplete, damaged, does not fit the model or is of a kind that is not computed."""

    code = "invalid_adapter"


class UnknownAdapter(InvalidRequest):
    """A request names an adapter that is not loaded, or not any more."""

    code = "model_not_found"


class UnsupportedModality(InvalidRequest):
    """Pictures, sound or files for a model that does not take them."""

    code = "unsupported_modality"


class InvalidImage(InvalidRequest):
    """A picture that cannot be decoded, is not what it says it is, or is too large."""

    code = "invalid_image"


class MediaNotAllowed(InvalidRequest):
    """A link to a picture that is not fetched; no connection was made to it."""

    code = "media_not_allowed"


class MediaFetchFailed(InvalidRequest):
    """A link to a picture whose host did not answer with one in time."""

    code = "media_fetch_failed"


class QueueFull(PacelineError):
    """The bounded queue has no place left; one is thought to come free after `retry_after_s`, if that is known."""

    retry_after_s: float | None = None

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class TreeFull(QueueFull):
    """A tree has as many branches or tokens as it may have; nothing was forked."""

    code = "tree_limit_exceeded"


class PinsFull(QueueFull):
    """A key, or all keys together, have as much pinned as may be; nothing was pinned."""

    code = "pin_limit_exceeded"


class DeadlineImpossible(InvalidRequest):
    """A request whose times this machine could not keep even if it were alone; `param` names the objective."""

    code = "deadline_impossible"


class DeadlineInfeasible(PacelineError):
    """A request whose times cannot be kept as things stand; it may be worth trying again after `retry_after_s`."""

    code = "deadline_infeasible"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class SleepRefused(PacelineError):
    """A model that cannot be put to sleep: it is pinned, it has requests under way, or its runner cannot."""

    code = "sleep_refused"


class UnknownRequest(PacelineError):
    """No live request has this id."""


class InvalidTransition(PacelineError):
    """The request's state does not allow what was asked."""


class EngineFailed(PacelineError):
    """The engine gave up after repeated failures; every request has been answered."""

    exit_code = 70


# -- wording: names that are not known, arguments that are not supported -----------------------------------

Hints = Mapping[str, str]  # what to do instead, by the name that is not supported
Kind = TypeVar("Kind", bound=type)
LONGEST_NAME = 64  # characters that are compared: a name from outside may have millions


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is not known: the known one that is most like it; empty without one."""
    close = difflib.get_close_matches(name[:LONGEST_NAME], list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def is_off(value: object) -> bool:
    """Whether an argument asks for nothing; scripts often pass such values along."""
    return value is None or value is False


def not_supported(name: str, hint: str) -> str:
    return f"{name} is not supported: {hint}"


def refuse(owner: str, given: Mapping[str, object], hints: Hints, known: Iterable[str]) -> None:
    """Raise for the first argument that asks for something: InvalidRequest with its hint, TypeError without one."""
    for name, value in given.items():
        if name not in hints:
            raise TypeError(f"{owner} has no argument {name}{did_you_mean(name, known)}")
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
