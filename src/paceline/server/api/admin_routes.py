"""/v1/admin/dial, /v1/admin/policy and /v1/admin/usage: steering the engine, and what was used. For admin keys.

A change is answered when the engine has made it, with how it stands then; it is an input of the run log and a decision
on record. What is asked for is checked here by name, and by the engine once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.config.engine import LEAST_TARGET_MS, MOST_TARGET_MS, POLICIES
from paceline.core.dial import OFF, DialKind, DialSetting, DialStatus, chosen_setting, status_sentences
from paceline.errors import InvalidRequest
from paceline.process.client import PolicyChange, Steering
from paceline.server.api.fields import Choice, Field, FieldTable, Flag, Number, Shaped, operation, read_query
from paceline.server.api.route import Route
from paceline.server.billing.usage_report import read_by, read_time, read_usage
from paceline.server.call import Answer, Call, Events
from paceline.server.errors import UnsupportedRoute
from paceline.server.generate.service import Service

DIAL_ROUTE, POLICY_ROUTE = "/v1/admin/dial", "/v1/admin/policy"
_TARGET = Number(LEAST_TARGET_MS, MOST_TARGET_MS)
DIAL_FIELDS = FieldTable(
    DIAL_ROUTE,
    (
        Field(name="position", kind=Number(0.0, 1.0), help="0 is least latency, 1 most throughput."),
        Field(name="itl_p99_ms", kind=_TARGET, help="Milliseconds between tokens to hold the p99 to."),
        Field(name="ttft_p99_ms", kind=_TARGET, help="Milliseconds to the first token to hold the p99 to."),
        Field(name="off", kind=Flag(), help="true: back to the limits of the start."),
    ),
)
_OPTIONS = Shaped((dict,), "an object with options of the policy, such as ageing_s", {"type": "object"})
POLICY_FIELDS = FieldTable(
    POLICY_ROUTE,
    (
        Field(name="policy", kind=Choice(POLICIES), required=True, help="Who goes first from now on."),
        Field(name="options", kind=_OPTIONS, help="Options of policies; those not named stay as they are."),
    ),
)


def admin_routes(service: Service) -> list[Route]:
    async def steered(dial: DialSetting | None = None, policy: PolicyChange | None = None) -> Steering:
        return await service.client.steer(dial=dial, policy=policy)

    async def get_dial(call: Call) -> Answer:
        return _json(dial_values((await steered()).dial))

    async def put_dial(call: Call) -> Answer:
        return _json(dial_values((await steered(dial=read_dial(call.body))).dial))

    async def get_policy(call: Call) -> Answer:
        return _json(policy_values(await steered()))

    async def put_policy(call: Call) -> Answer:
        return _json(policy_values(await steered(policy=read_policy(call.body))))

    shown = (("GET", DIAL_ROUTE, get_dial, "Where the dial stands", None),)
    turned = (("PUT", DIAL_ROUTE, put_dial, "Turn the dial, or give it a target to hold", DIAL_FIELDS),)
    named = (("GET", POLICY_ROUTE, get_policy, "Who goes first", None),)
    changed = (("PUT", POLICY_ROUTE, put_policy, "Change who goes first", POLICY_FIELDS),)
    return [
        Route(
            methods=(method,),
            path=path,
            handler=handler,
            takes_body=fields is not None,
            openapi=operation(summary, None if fields is None else fields.schema()),
            needs_admin=True,
        )
        for method, path, handler, summary, fields in (*shown, *turned, *named, *changed)
    ]


def read_dial(body: Mapping[str, Any]) -> DialSetting:
    """The one thing a body asks for."""
    given = DIAL_FIELDS.read(body, strict=True).fields
    setting = chosen_setting(given.get("position"), given.get("itl_p99_ms"), given.get("ttft_p99_ms"))
    if "off" in given:
        if not given["off"]:
            raise InvalidRequest("off must be true, or left out", param="off")
        if setting is not None:
            raise InvalidRequest("off excludes the other fields: give one of them", param="off")
        return OFF
    if setting is None:
        raise InvalidRequest(
            "say what the dial is to be: position, itl_p99_ms, ttft_p99_ms or off", param="position"
        )
    return setting


def read_policy(body: Mapping[str, Any]) -> PolicyChange:
    given = POLICY_FIELDS.read(body, strict=True).fields
    options = given.get("options", {})
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise InvalidRequest(f"options: {name[:64]} must be a number or a text", param="options")
    return PolicyChange(name=given["policy"], options=options)


def dial_values(status: DialStatus) -> dict[str, Any]:
    """A status for JSON."""
    return {
        "object": "dial",
        "setting": None
        if status.setting.kind is DialKind.OFF
        else {status.setting.kind.value: status.setting.value},
        "state": status.word.value,
        "reason": status.reason or None,
        "position": status.position,
        "seen": {"itl_p99_ms": status.itl_p99_ms, "ttft_p99_ms": status.ttft_p99_ms},
        "limits": {
            "step_target_ms": status.step_target_ms,
            "max_step_tokens": status.max_step_tokens,
            "max_prompt_tokens": status.max_prompt_tokens,
            "prompt_share": status.prompt_share,
            "max_rows": status.max_rows,
        },
        "moves": status.moves,
        "reversals": status.reversals,
        "sentences": status_sentences(status),
    }


def policy_values(steering: Steering) -> dict[str, Any]:
    return {"object": "policy", "policy": steering.policy, "options": dict(steering.policy_options)}


def _json(values: Mapping[str, Any]) -> Answer:
    return Answer(body=msgspec.json.encode(values), headers={"cache-control": "no-store"})


# GET /v1/admin/usage: what was used and billed, summed from the ledger, for admin keys.


USAGE = "/v1/admin/usage"


def usage_routes(service: Service) -> list[Route]:
    async def usage(call: Call) -> Answer | Events:
        ledger = service.billing.ledger
        if ledger is None:
            raise UnsupportedRoute("this server keeps no ledger; start it with --ledger FILE")
        asked = read_query(call.query, ("by", "since", "until"))
        by = read_by(asked.get("by", "key"))
        since, until = (
            read_time(asked[name], name) if name in asked else None for name in ("since", "until")
        )
        # A ledger may be long: it is read beside the event loop.
        rows = await asyncio.get_running_loop().run_in_executor(
            None, read_usage, ledger.path, by, since, until
        )
        body = {"object": "usage", "by": by, "since_ms": since, "until_ms": until, "data": rows}
        return Answer(body=msgspec.json.encode(body))

    return [
        Route(
            methods=("GET",),
            path=USAGE,
            handler=usage,
            takes_body=False,
            needs_admin=True,
            openapi=operation("Sum up the ledger: by=key,class,model,day, since=24h, until=DATE"),
        )
    ]
