"""Signs of life from inside a step.

A runner beats between the parts of a step, from the thread that computes; the owner of the engine decides what to do
with it. A part that hangs gives no beat, so that silence still means that nothing moves.
"""

from __future__ import annotations

from collections.abc import Callable


class Pulse:
    """One runner's pulse. `on_beat` must be cheap and must not raise: it is called for every layer of every step."""

    __slots__ = ("on_beat",)

    def __init__(self) -> None:
        self.on_beat: Callable[[], None] | None = None

    def beat(self) -> None:
        if self.on_beat is not None:
            self.on_beat()
