"""Where the server stands: starting, serving or draining, and what its engine says of itself.

One value that health routes, the door and the lifecycle share. Reading it costs nothing and asks nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from paceline.server.errors import Refusal
from paceline.serving.client import EngineClient, EngineState


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class ServerStatus:
    """Written by the lifecycle only."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.phase = Phase.STARTING
        self.is_full: Callable[[], bool] = lambda: False  # whether the queue takes nobody
        self.hindrance: Callable[[], str] = lambda: ""  # in one word, what else keeps work out

    @property
    def word(self) -> str:
        """The state in one word, for people and probes."""
        if self.phase is Phase.DRAINING:
            return "draining"
        if self.phase is Phase.STARTING:
            return "starting"
        state = self.client.state
        if state is not EngineState.READY:
            return str(state.value)
        return self.hindrance() or ("full" if self.is_full() else str(state.value))

    @property
    def is_ready(self) -> bool:
        return self.word == "ready"

    def refusal(self) -> Refusal | None:
        """Why no new work is taken, if so. A full queue is not said here: it answers for itself."""
        if self.phase is Phase.DRAINING:
            return Refusal("shutting_down")
        if self.phase is Phase.STARTING:
            return Refusal("starting")
        return None
