"""The engines of a fleet as the live page and `paceline top` show them: how each stands, and requests that went on in
another one. With one engine there is nothing to tell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paceline.process.client import EngineClient
from paceline.process.fleet import Fleet
from paceline.server.api.fleet_routes import engine_values

SHOWN_S = 60.0  # that a failover is told


def fleet_values(client: EngineClient) -> dict[str, Any]:
    """Read by the page (engines.js) and by `paceline top`."""
    if not isinstance(client, Fleet):
        return {}
    now_s = time.monotonic()
    passages = [each for each in client.ways.passages if now_s - each.time_s < SHOWN_S]
    return {
        "engines": [
            {**engine_values(member), "output_tokens": client.output_tokens[member.number]}
            for member in client.members
        ],
        "passages": [
            (round(now_s - each.time_s, 2), each.source, each.target, each.requests, each.tokens)
            for each in passages
        ],
    }


def engines_of(client: EngineClient) -> Sequence[EngineClient]:
    """What can be watched: the one engine there is, or each of several."""
    return [member.engine for member in client.members] if isinstance(client, Fleet) else [client]
