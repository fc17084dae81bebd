"""POST /v1/messages and /v1/messages/count_tokens: answers and events in Anthropic's shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from paceline.llm.outputs import CompletionOutput
from paceline.server.api.anthropic_requests import (
    COUNT,
    MESSAGES,
    count_table,
    messages_table,
    parse_messages,
)
from paceline.server.api.describe import operation
from paceline.server.api.error_frames import anthropic_error_frame
from paceline.server.api.fields import ignored_header
from paceline.server.api.frames import stream_events
from paceline.server.api.openai_requests import ParsedBody
from paceline.server.api.openai_responses import with_receipt
from paceline.server.api.route import ANTHROPIC_ERRORS, Route
from paceline.server.call import Answer, Call, Events
from paceline.server.generation import Delta, Generation, Usage
from paceline.server.prompt_size import check_prompt
from paceline.server.service import INLINE_CHARS, Service

_encode = msgspec.json.Encoder().encode

_BEGIN = (
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    b'"content_block":{"type":"text","text":""}}\n\n'
    b'event: ping\ndata: {"type":"ping"}\n\n'
)
_BEFORE_TEXT = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)
_AFTER_TEXT = b"}}\n\n"
_END = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageEvents:
    """Events of one message, in the order of the API."""

    def __init__(self, generation: Generation, body: ParsedBody, id: str) -> None:
        self._generation = generation
        self._body = body
        self._id = id
        self._has_begun = False
        self._output: CompletionOutput | None = None

    def write(self, deltas: list[Delta]) -> bytes:
        frames: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            usage = replace(self._generation.usage, receipt=None)  # it belongs to the end
            message = _message(self._id, self._body.model, [], None, usage)
            frames += (_event("message_start", {"message": message}), _BEGIN)
        for delta in deltas:
            if delta.text:
                frames += (_BEFORE_TEXT, _encode(delta.text), _AFTER_TEXT)
            if delta.has_ended:
                self._output = delta.output
        return b"".join(frames)

    def end(self) -> bytes:
        delta = _stop_fields(self._output)
        usage = _usage(self._generation.usage)
        return _END + _event("message_delta", {"delta": delta, "usage": usage}) + _STOP


class MessageRoutes:
    """Both routes, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.table = messages_table(service.settings.limits)
        self.count_table = count_table(service.settings.limits)

    async def answer(self, call: Call) -> Answer | Events:
        service = self._service
        service.check_ready(call)
        settings = service.settings
        body = parse_messages(
            self.table, call.body, service.facts, settings.limits, strict=settings.strict_fields
        )
        generation = await service.start(call, body)
        headers = ignored_header(body.ignored)
        if body.streaming.wanted:
            return stream_events(
                generation,
                lambda: MessageEvents(generation, body, call.id),
                lambda _: anthropic_error_frame,
                headers,
            )
        try:
            (output,) = (await generation.complete())[0].outputs
            content = [{"type": "text", "text": output.text}]
            message = _encode(_message(call.id, body.model, content, output, generation.usage))
            generation.release()
        finally:
            generation.close()
        return Answer(body=message, headers=generation.headers(headers))

    async def count(self, call: Call) -> Answer | Events:
        service, settings = self._service, self._service.settings
        body = parse_messages(
            self.count_table, call.body, service.facts, settings.limits, strict=settings.strict_fields
        )
        size = check_prompt(body, service.facts.max_model_len, settings.limits)
        ids = await service.work(lambda: service.prompt_ids(body), inline=size <= INLINE_CHARS)
        return Answer(body=_encode({"input_tokens": len(ids)}), headers=ignored_header(body.ignored))


def anthropic_routes(service: Service) -> list[Route]:
    routes = MessageRoutes(service)
    return [
        Route(
            methods=("POST",),
            path=MESSAGES,
            handler=routes.answer,
            takes_body=True,
            is_generation=True,
            error_shape=ANTHROPIC_ERRORS,
            openapi=operation("Answer a conversation (Anthropic)", routes.table.schema(), streams=True),
        ),
        Route(
            methods=("POST",),
            path=COUNT,
            handler=routes.count,
            takes_body=True,
            error_shape=ANTHROPIC_ERRORS,
            openapi=operation("Count the tokens of a conversation", routes.count_table.schema()),
        ),
    ]


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))


def _message(
    id: str, model: str, content: list[Any], output: CompletionOutput | None, usage: Usage
) -> dict[str, Any]:
    return {
        "id": f"msg_{id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        **_stop_fields(output),
        "usage": _usage(usage),
    }


def _stop_fields(output: CompletionOutput | None) -> dict[str, Any]:
    if output is None:
        return {"stop_reason": None, "stop_sequence": None}
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    reason = "max_tokens" if output.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Cached tokens are not counted as input tokens in this API."""
    body = {
        "input_tokens": usage.num_prompt - usage.num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached,
        "output_tokens": usage.num_output,
    }
    return with_receipt(body, usage)
