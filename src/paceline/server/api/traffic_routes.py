"""POST /v1/admin/traffic: many conversations at once over one connection, for the live page. For admin keys.

A browser opens six connections to a server at most, so that a page cannot send a batch. Each conversation is
an ordinary call to the route of chat completions, made in the process, with the model's default sampling and a limit on
the length of an answer. The stream holds the chunks of all of them as they come, each with the id of its answer.
Closing the connection aborts what still runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from paceline.server.api.fields import Field, FieldTable, text, whole
from paceline.server.api.generation_route import DONE
from paceline.server.api.openai_fields import CHAT
from paceline.server.api.route import Route, described
from paceline.server.call import Answer, Call, Download, Events, Handler
from paceline.server.errors import openai_body, openai_error_frame, problem_of
from paceline.server.generate.request_record import Observer
from paceline.server.generate.service import Service
from paceline.server.http.request_headers import new_id

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
