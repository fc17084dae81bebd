"""Probes: is the process alive, does it take work, are steps being made. Answered from memory, without the engine.

Health means that tokens can move: a loaded model, a heartbeat that is not old, a queue with room, no shutdown under
way. A probe never waits and never makes the engine do anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

import msgspec

from paceline.process.client import EngineClient, EngineState
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call
from paceline.server.errors import Refusal

# Where the server stands: starting, serving or draining, and what its engine says of itself.
#
# One value that health routes, `AsgiApp` and the lifecycle share. Reading it costs nothing and asks no other part.


class Phase(Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class ServerStatus:
    """Written by the lifecycle only."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.phase = Phase.STARTING
        self.is_full: Callable[[], bool] = lambda: False  # whether the queue is full
        self.hindrance: Callable[[], str] = lambda: ""  # in one word, what else keeps work out

    @property
    def word(self) -> str:
        """The state in one word, for people and probes."""
        if self.phase is not Phase.SERVING:
            return str(self.phase.value)
        state = self.client.state
        if state is not EngineState.READY:
            return str(state.value)
        return self.hindrance() or ("full" if self.is_full() else str(state.value))

    @property
    def is_ready(self) -> bool:
        return self.word == "ready"

    def refusal(self) -> Refusal | None:
        """Why no new work is taken, if so. A full queue is not said here: it answers for itself."""
        codes = {Phase.DRAINING: "shutting_down", Phase.STARTING: "starting"}
        return None if self.phase is Phase.SERVING else Refusal(codes[self.phase])


PUBLIC = frozenset(("/health", "/health/live", "/health/ready", "/health/deep", "/ping"))


def health_routes(status: ServerStatus) -> list[Route]:
    async def live(call: Call) -> Answer:
        return _answer(200, {"status": "alive"})

    async def ready(call: Call) -> Answer:
        return _answer(200 if status.is_ready else 503, {"status": status.word})

    async def deep(call: Call) -> Answer:
        client = status.client
        stats = client.stats
        facts = {
            "status": status.word,
            "engine": client.state.value,
            "heartbeat_age_s": round(client.heartbeat_age_s, 3),
            "steps": stats.steps,
            "running": stats.running,
            "waiting": stats.waiting,
            "failed_steps": stats.counters.failed_steps,
            "violations": stats.violations,
        }
        return _answer(200 if status.is_ready else 503, facts)

    routes = (
        ("/health", ready, "Whether requests are taken"),
        ("/health/ready", ready, "The same as /health"),
        ("/health/live", live, "Whether the process runs"),
        ("/health/deep", deep, "The engine's heartbeat and counters"),
        ("/ping", ready, "The same as /health, for SageMaker"),
    )
    responses = {"200": {"description": "yes"}, "503": {"description": "not now"}}
    return [
        Route(
            methods=("GET",),
            path=path,
            handler=handler,
            openapi={"summary": summary, "security": [], "responses": responses},
        )
        for path, handler, summary in routes
    ]


def _answer(status: int, facts: Mapping[str, object]) -> Answer:
    headers = {"cache-control": "no-store"} | ({"retry-after": "1"} if status == 503 else {})
    return Answer(body=msgspec.json.encode(facts), status=status, headers=headers)
