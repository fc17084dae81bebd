"""Errors a request may be refused with, as they cross from the engine's process to the other."""

from __future__ import annotations

from paceline.errors import (
    DeadlineImpossible,
    DeadlineInfeasible,
    InvalidRequest,
    NeverFits,
    PacelineError,
    QueueFull,
)
from paceline.serving.frames import Refusal

MAX_MESSAGE_CHARS = 512
# The first that fits an error is its kind; what fits none is invalid.
KINDS: dict[str, type[PacelineError]] = {
    "never_fits": NeverFits,
    "deadline_impossible": DeadlineImpossible,
    "deadline_infeasible": DeadlineInfeasible,
    "queue_full": QueueFull,
}


def refusal_of(first: int, error: PacelineError, place_s: float | None = None) -> Refusal:
    """`place_s`: until there is a place again, where that is what is missing."""
    kind = next((name for name, known in KINDS.items() if isinstance(error, known)), "invalid")
    message, param = str(error)[:MAX_MESSAGE_CHARS], getattr(error, "param", None)
    return Refusal(first, kind, message, param, getattr(error, "retry_after_s", place_s))


def error_of(refusal: Refusal) -> PacelineError:
    if refusal.kind == "never_fits":
        return NeverFits(refusal.message, param=refusal.param)
    if refusal.kind == "deadline_impossible":
        return DeadlineImpossible(refusal.message, param=refusal.param)
    if refusal.kind == "deadline_infeasible":
        retry_after_s = refusal.retry_after_s or 0.0
        return DeadlineInfeasible(refusal.message, param=refusal.param, retry_after_s=retry_after_s)
    if refusal.kind == "queue_full":
        return QueueFull(refusal.message, retry_after_s=refusal.retry_after_s)
    return InvalidRequest(refusal.message, param=refusal.param)
