"""A change of a live request by its owner, and what became of it. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ChangeOutcome(Enum):
    CHANGED = "changed"
    ENDED = "ended"  # there is no live request of that number
    BUSY = "busy"  # it cannot be paused at this moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is to be different from now on; None leaves it as it is."""

    priority: int | None = None
    until_s: float | None = (
        None  # when it ends at the latest, on the engine's clock; infinity for no deadline
    )
    paused: bool | None = None
