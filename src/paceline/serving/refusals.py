"""Errors a request may be refused with, as they cross from the engine's process to the other."""

from __future__ import annotations

from paceline.errors import InvalidRequest, NeverFits, PacelineError, QueueFull
from paceline.serving.frames import Refusal

MAX_MESSAGE_CHARS = 512


def refusal_of(first: int, error: PacelineError) -> Refusal:
    if isinstance(error, NeverFits):
        kind = "never_fits"
    elif isinstance(error, QueueFull):
        kind = "queue_full"
    else:
        kind = "invalid"
    return Refusal(first, kind, str(error)[:MAX_MESSAGE_CHARS], getattr(error, "param", None))


def error_of(refusal: Refusal) -> PacelineError:
    if refusal.kind == "never_fits":
        return NeverFits(refusal.message, param=refusal.param)
    if refusal.kind == "queue_full":
        return QueueFull(refusal.message)
    return InvalidRequest(refusal.message, param=refusal.param)
