"""/v1/admin/fleet: the engines behind this server, and taking one of them out of service. For admin keys."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from paceline.errors import InvalidRequest, InvalidTransition
from paceline.process.client import EngineClient, EngineState
from paceline.process.fleet.fleet import Fleet, Member
from paceline.server.api.fields import read_query
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call
from paceline.server.generate.service import Service

FLEET = "/v1/admin/fleet"
DRAIN_S, LONGEST_DRAIN_S = 30.0, 600.0


def fleet_routes(service: Service) -> list[Route]:
    async def show(call: Call) -> Answer:
        return _json(fleet_values(service.client))

    async def drain(call: Call) -> Answer:
        fleet, number = _several(service.client), _number(call)
        moved = await fleet.drain(number, _timeout_s(call))
        return _json({**engine_values(fleet.member(number)), "moved": moved})

    async def resume(call: Call) -> Answer:
        fleet, number = _several(service.client), _number(call)
        fleet.resume(number)
        return _json(engine_values(fleet.member(number)))

    drained = "Take an engine out of service: what it has ends, or goes on in another after timeout_s seconds"
    return [
        described("GET", FLEET, show, "The engines behind this server", needs_admin=True),
        described("POST", FLEET + "/{number}/drain", drain, drained, needs_admin=True),
        described(
            "POST",
            FLEET + "/{number}/resume",
            resume,
            "Give a drained engine requests again",
            needs_admin=True,
        ),
    ]


def fleet_values(client: EngineClient) -> dict[str, Any]:
    """A list of engines; a server of one has one."""
    if isinstance(client, Fleet):
        return {
            "object": "fleet",
            "engines": [engine_values(member) for member in client.members],
            "routed": client.routed,
            "failovers": client.failovers,
        }
    return {"object": "fleet", "engines": [_values(0, client)], "routed": {}, "failovers": {}}


def engine_values(member: Member) -> dict[str, Any]:
    values = _values(member.number, member.engine)
    if member.is_draining and values["state"] == EngineState.READY.value:
        values["state"] = "draining" if member.engine.num_open else "drained"
    info = member.info
    return {
        **values,
        "rows": 0 if info is None else info.max_num_seqs,
        "requests": member.engine.num_open,
        "pid": member.pid(),
        "restarts": member.num_restarts(),
    }


def _values(number: int, client: EngineClient) -> dict[str, Any]:
    stats = client.stats
    return {
        "number": number,
        "state": client.state.value,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": round(stats.blocks_used / stats.blocks_total, 4) if stats.blocks_total else 0.0,
        "heartbeat_age_s": round(client.heartbeat_age_s, 3),
    }


def _several(client: EngineClient) -> Fleet:
    if not isinstance(client, Fleet):
        raise InvalidTransition("this server has one engine; --replicas gives it several")
    return client


def _number(call: Call) -> int:
    text = call.path["number"]
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise InvalidRequest("an engine is named by its number", param="number")
    return int(text)


def _timeout_s(call: Call) -> float:
    given = read_query(call.query, ("timeout_s",)).get("timeout_s")
    try:
        seconds = DRAIN_S if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_DRAIN_S:
        raise InvalidRequest(f"timeout_s is a number from 0 to {LONGEST_DRAIN_S:g}", param="timeout_s")
    return seconds


def _json(values: Any) -> Answer:
    return Answer(body=msgspec.json.encode(values))
