"""How one of the models of an engine stands: computing, asleep, on its way back, or lost; what can sleep; and signs of
life from inside a step."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from paceline.core.plan import Runner

# Levels of sleep. On a CPU the first gives back KV and working memory and keeps the weights.
WEIGHTS_KEPT, WEIGHTS_DROPPED = 1, 2
# How many levels of KV lose their memory with a runner, from the device down.
DEVICE_LOST, HOST_LOST, ALL_LOST = 1, 2, 3


class Standing(StrEnum):
    AWAKE = "awake"
    ASLEEP = "asleep"
    WAKING = "waking"
    FAILED = "failed"  # it could not be woken; no request is taken for it


class Sleeper(Protocol):
    """Memory of a model that can be let go of and brought back."""

    on_gpu: bool  # weights may take a while to leave
    levels_lost: int  # of its KV

    def let_go(self, level: int) -> None:
        """Drop the runner, of which no caller has any use now, and at the second level the weights."""
        ...

    def open(self) -> Runner:
        """A runner that holds nothing yet. Any thread may call it. Raises what loading raises."""
        ...


class Pulse:
    """One runner's signs of life. It beats between the parts of a step, from the thread that computes; the owner of the
    engine decides what to do with it. A part that hangs gives no beat, so that silence still means that nothing moves.
    `on_beat` must be cheap and must not raise: it is called for every layer of every step."""

    __slots__ = ("on_beat", "on_lost")

    def __init__(self) -> None:
        self.on_beat: Callable[[], None] | None = None
        # No step can be computed any more, and one under way may hang: why. Called by any thread.
        self.on_lost: Callable[[str], None] | None = None

    def beat(self) -> None:
        if self.on_beat is not None:
            self.on_beat()
