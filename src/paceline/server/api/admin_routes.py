"""/v1/admin/dial, policy, usage and traffic: steering the engine, what was used, and load to try. For admin keys.

A change is answered when the engine has made it, with how it stands then; it is an input of the run log and a decision
on record. What is asked for is checked here by name, and by the engine once more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from paceline.config.engine import LEAST_TARGET_MS, MOST_TARGET_MS, POLICIES
from paceline.core.dial import OFF, DialKind, DialSetting, DialStatus, chosen_setting, status_sentences
from paceline.errors import InvalidRequest
from paceline.process.client import PolicyChange, Steering
from paceline.server.api.fields import (
    FLAG,
    Field,
    FieldTable,
    choice,
    number,
    read_query,
    shaped,
    text,
    whole,
)
from paceline.server.api.generation_route import DONE
from paceline.server.api.openai_fields import CHAT
from paceline.server.api.route import Route, described
from paceline.server.billing.usage_report import read_by, read_time, read_usage
from paceline.server.call import Answer, Call, Download, Events, Handler
from paceline.server.errors import UnsupportedRoute, openai_body, openai_error_frame, problem_of
from paceline.server.generate.request_record import Observer
from paceline.server.generate.service import Service
from paceline.server.http.request_headers import new_id

DIAL_ROUTE, POLICY_ROUTE = "/v1/admin/dial", "/v1/admin/policy"
_TARGET = number(LEAST_TARGET_MS, MOST_TARGET_MS)
DIAL_FIELDS = FieldTable(
    DIAL_ROUTE,
    (
        Field("position", number(0.0, 1.0), "0 is least latency, 1 most throughput."),
        Field("itl_p99_ms", _TARGET, "Milliseconds between tokens to hold the p99 to."),
        Field("ttft_p99_ms", _TARGET, "Milliseconds to the first token to hold the p99 to."),
        Field("off", FLAG, "true: back to the limits of the start."),
    ),
)
_OPTIONS = shaped((dict,), "an object with options of the policy, such as ageing_s", {"type": "object"})
POLICY_FIELDS = FieldTable(
    POLICY_ROUTE,
    (
        Field("policy", choice(POLICIES), "The policy from now on.", required=True),
        Field("options", _OPTIONS, "Options of policies; those not named stay as they are."),
    ),
)


def admin_routes(service: Service) -> list[Route]:
    async def get_dial(call: Call) -> Answer:
        return _json(dial_values((await service.client.steer()).dial))

    async def put_dial(call: Call) -> Answer:
        return _json(dial_values((await service.client.steer(dial=read_dial(call.body))).dial))

    async def get_policy(call: Call) -> Answer:
        return _json(policy_values(await service.client.steer()))

    async def put_policy(call: Call) -> Answer:
        return _json(policy_values(await service.client.steer(policy=read_policy(call.body))))

    turned = "Turn the dial, or give it a target to hold"
    return [
        described("GET", DIAL_ROUTE, get_dial, "Where the dial stands", needs_admin=True),
        described("PUT", DIAL_ROUTE, put_dial, turned, DIAL_FIELDS, needs_admin=True),
        described("GET", POLICY_ROUTE, get_policy, "The scheduling policy", needs_admin=True),
        described(
            "PUT", POLICY_ROUTE, put_policy, "Change the scheduling policy", POLICY_FIELDS, needs_admin=True
        ),
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
        query = read_query(call.query, ("by", "since", "until"))
        by = read_by(query.get("by", "key"))
        since, until = (
            read_time(query[name], name) if name in query else None for name in ("since", "until")
        )
        # A ledger may be long: it is read beside the event loop.
        rows = await asyncio.get_running_loop().run_in_executor(
            None, read_usage, ledger.path, by, since, until
        )
        body = {"object": "usage", "by": by, "since_ms": since, "until_ms": until, "data": rows}
        return Answer(body=msgspec.json.encode(body))

    summary = "Sum up the ledger: by=key,class,model,day, since=24h, until=DATE"
    return [described("GET", USAGE, usage, summary, needs_admin=True)]


# POST /v1/admin/traffic: many conversations at once over one connection, for the live page. For admin keys.
#
# A browser opens six connections to a server at most, so that a page cannot send a batch. Each conversation is an
# ordinary call to the route of chat completions, made in the process, with the model's default sampling and a limit
# on the length of an answer. The stream holds the chunks of all of them as they come, each with the id of its answer.
# Closing the connection aborts what still runs.


TRAFFIC_ROUTE = "/v1/admin/traffic"
MOST_AT_ONCE = 256
SHORTEST, LONGEST = 48, 192  # answers, in tokens: the first one is not over before the last of 32 has begun
MOST_BEHIND = 1024  # pieces of the stream that wait for their reader before the answers wait for it
# Multiples of it, without their whole part, are spread evenly however many there are.
_SPREAD = (5**0.5 - 1) / 2
TRAFFIC_FIELDS = FieldTable(
    TRAFFIC_ROUTE,
    (
        Field("message", text(1, 20_000), "What is said in each conversation.", required=True),
        Field("count", whole(1, MOST_AT_ONCE), "Conversations at once; 8 if it is left out."),
    ),
)


def traffic_routes(service: Service, chat: Handler) -> list[Route]:
    """`chat` answers conversations."""

    async def send(call: Call) -> Answer | Events:
        given = TRAFFIC_FIELDS.read(call.body, strict=True).fields
        model = service.model.names[0]
        calls = [_call(call, model, given["message"], index) for index in range(given.get("count", 8))]
        return Events(frames=_all_frames(chat, calls, service.observer), error_frame=openai_error_frame)

    summary = "Send conversations to this server"
    return [
        described("POST", TRAFFIC_ROUTE, send, summary, TRAFFIC_FIELDS, needs_admin=True, is_generation=True)
    ]


def longest_answer(index: int) -> int:
    """Tokens of the answer with this index at most: each has another length, so that rows are left one by one."""
    return SHORTEST + round((LONGEST - SHORTEST) * ((index + 1) * _SPREAD % 1))


def _call(call: Call, model: str, message: str, index: int) -> Call:
    body: Mapping[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": message}],
        "max_tokens": longest_answer(index),
        "stream": True,
    }
    return Call(
        id=new_id(), route=CHAT, body=body, headers={}, caller=call.caller, received_s=time.monotonic()
    )


async def _all_frames(chat: Handler, calls: list[Call], log: Observer) -> AsyncGenerator[bytes, None]:
    """First the ids of all answers, then the chunks of each; when the reader leaves, all are ended."""
    ids = [f"chatcmpl-{call.id}" for call in calls]
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_BEHIND)
    tasks = [asyncio.create_task(_run(chat, call, pieces, log)) for call in calls]
    try:
        yield _frame({"ids": ids})
        left = len(tasks)
        while left:
            piece = await pieces.get()
            if piece is None:
                left -= 1
            else:
                yield piece
        yield DONE
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(chat: Handler, call: Call, pieces: asyncio.Queue[bytes | None], log: Observer) -> None:
    """One conversation into the stream of all; its error ends it alone."""
    status, code = 499, ""  # unless it ends in another way, it is cancelled
    try:
        await _pass_on(await chat(call), pieces)
        status = 200
    except Exception as error:
        problem = problem_of(error)
        status, code = problem.status, problem.code
        if problem.is_ours:
            log.call_failed(call, error)
        error_body = msgspec.json.decode(openai_body(problem))
        await pieces.put(_frame({"id": f"chatcmpl-{call.id}", **error_body}))
    finally:
        log.call_ended(call, status, code)
    await pieces.put(None)


async def _pass_on(answer: Answer | Events | Download, pieces: asyncio.Queue[bytes | None]) -> None:
    assert isinstance(answer, Events), "a stream was asked for"
    try:
        async for frames in answer.frames:
            if chunks := frames.replace(DONE, b""):
                await pieces.put(chunks)
    finally:
        await answer.frames.aclose()


def _frame(values: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(values)
