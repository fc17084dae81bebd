"""The engines of a fleet as the live page and `paceline top` show them: how each stands, and requests that went on in
another one. With one engine there is nothing to tell."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paceline.process.client import EngineClient
from paceline.process.fleet.fleet import Fleet
from paceline.server.api.fleet_routes import engine_values
from paceline.server.generate.requests import MOST_REQUESTS, RecentRequests

MovedName = tuple[tuple[int, ...], str, str, int]
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


def num_moved(client: EngineClient) -> int:
    """Requests that went on in another engine since the start."""
    return client.ways.num_moved if isinstance(client, Fleet) else 0


def moved_names(client: EngineClient, recent: RecentRequests, count: int) -> list[MovedName]:
    """Of the newest that did: the numbers they have there, what they are called, and the number they came with."""
    if not isinstance(client, Fleet) or not count:
        return []
    known = {each.numbers[0]: each for each in recent.newest(MOST_REQUESTS) if each.numbers}
    moved = [(known[first], first, inner) for first, inner in client.ways.moved if first in known]
    return [
        (tuple(number + inner - first for number in each.numbers), each.id, each.words, first)
        for each, first, inner in moved[-count:]
    ]


def engines_of(client: EngineClient) -> Sequence[EngineClient]:
    """What can be watched: the one engine there is, or each of several."""
    return [member.engine for member in client.members] if isinstance(client, Fleet) else [client]
