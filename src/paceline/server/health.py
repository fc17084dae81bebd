"""Probes: is the process alive, does it take work, are steps being made. Answered from memory, without the engine.

Health means that tokens can move: a loaded model, a heartbeat that is not old, a queue with room, no shutdown under
way. A probe never waits and never makes the engine do anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.server.api.route import Route
from paceline.server.call import Answer, Call
from paceline.server.status import ServerStatus

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
            "failed_steps": stats.failed_steps,
            "violations": stats.violations,
        }
        return _answer(200 if status.is_ready else 503, facts)

    handlers = {
        "/health": ready,
        "/health/ready": ready,
        "/health/live": live,
        "/health/deep": deep,
        "/ping": ready,
    }
    summaries = {
        "/health": "Whether requests are taken",
        "/health/ready": "The same as /health",
        "/health/live": "Whether the process runs",
        "/health/deep": "The engine's heartbeat and counters",
        "/ping": "The same as /health, for SageMaker",
    }
    return [
        Route(
            methods=("GET",),
            path=path,
            handler=handler,
            takes_body=False,
            openapi={
                "summary": summaries[path],
                "tags": ["health"],
                "security": [],
                "responses": {"200": {"description": "yes"}, "503": {"description": "not now"}},
            },
        )
        for path, handler in handlers.items()
    ]


def _answer(status: int, facts: Mapping[str, object]) -> Answer:
    headers = {"cache-control": "no-store"} | ({"retry-after": "1"} if status == 503 else {})
    return Answer(body=msgspec.json.encode(facts), status=status, headers=headers)
