"""POST /v1/messages and /v1/messages/count_tokens: answers and events in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from paceline.errors import InvalidRequest
from paceline.llm.outputs import CompletionOutput
from paceline.server.api.fields import (
    Field,
    FieldTable,
    Flag,
    Group,
    ListOf,
    MapOf,
    Number,
    Shaped,
    Text,
    Whole,
    ignored_header,
    operation,
)
from paceline.server.api.limits import RequestLimits
from paceline.server.api.openai_fields import (
    LARGEST,
    MESSAGE_SCHEMA,
    MESSAGES_MUST,
    model_field,
    price_field,
    tool_fields,
    urgency_fields,
    wish_fields,
)
from paceline.server.api.openai_requests import (
    ModelFacts,
    ParsedBody,
    Streaming,
    TemplateOptions,
    checked_messages,
    checked_model,
    conversation_sampling,
    ends_with_assistant,
    extra_sampling_fields,
    read_price,
    without_idle_tools,
)
from paceline.server.api.openai_responses import with_receipt
from paceline.server.api.route import ANTHROPIC_ERRORS, Route
from paceline.server.api.sse import anthropic_error_frame, stream_events
from paceline.server.call import Answer, Call, Events
from paceline.server.errors import UnsupportedModality
from paceline.server.generate.generation import Delta, Generation, Usage
from paceline.server.generate.service import INLINE_CHARS, Service, check_prompt

# Bodies of POST /v1/messages and /v1/messages/count_tokens (Anthropic's shape).


MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SYSTEM_MUST = "a text or a list of text blocks"
ROLES = ("user", "assistant")


def messages_table(limits: RequestLimits) -> FieldTable:
    stop = Text(1, max_bytes=limits.stop_bytes, no_nul=True)
    metadata = MapOf(Text(0, limits.metadata_chars), limits.metadata_entries)
    return FieldTable(
        MESSAGES,
        [
            *_conversation_fields(limits),
            Field(
                name="max_tokens",
                kind=Whole(1, limits.answer_tokens),
                help="tokens of the answer",
                required=True,
            ),
            Field(name="stop_sequences", kind=ListOf(stop, limits.stops), help="texts that end the answer"),
            Field(name="temperature", kind=Number(0, 2)),
            Field(name="top_p", kind=Number(0, 1, above=True)),
            Field(name="top_k", kind=Whole(-1, LARGEST)),
            Field(name="stream", kind=Flag(), help="send the answer as it is made"),
            *urgency_fields(),
            price_field(),
            *extra_sampling_fields(limits, "temperature", "top_p", "top_k", "stop"),
            *wish_fields(),
            Field(name="metadata", kind=metadata, group=Group.WITHOUT_EFFECT),
        ],
    )


def count_table(limits: RequestLimits) -> FieldTable:
    return FieldTable(COUNT, _conversation_fields(limits))


def _conversation_fields(limits: RequestLimits) -> list[Field]:
    described = {"type": "array", "items": MESSAGE_SCHEMA, "minItems": 1, "maxItems": limits.messages}
    return [
        model_field(),
        Field(name="messages", kind=Shaped((list,), MESSAGES_MUST, described), required=True),
        Field(name="system", kind=Shaped((str, list), SYSTEM_MUST), help="what the model is told first"),
        *tool_fields({"type": "none"}, {"type": "auto"}, '{"type": "none"}'),
        Field(name="thinking", group=Group.ONLY, only=({"type": "disabled"},)),
        Field(name="mcp_servers", group=Group.ONLY, only=([],)),
        Field(name="container", group=Group.UNSUPPORTED),
        Field(name="context_management", group=Group.UNSUPPORTED),
        Field(name="output_format", group=Group.UNSUPPORTED),
    ]


def parse_messages(
    table: FieldTable, body: Mapping[str, Any], facts: ModelFacts, limits: RequestLimits, *, strict: bool
) -> ParsedBody:
    """A conversation; the last message of the assistant, if it is the last, is gone on with."""
    read = table.read(without_idle_tools(body), strict=strict)
    given = read.fields
    messages = checked_messages(given["messages"], limits, param="messages")
    turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]
    goes_on = ends_with_assistant(turns)
    if "system" in given:
        turns.insert(0, {"role": "system", "content": _text(given["system"], "system")})
    stops = tuple(given.get("stop_sequences", ()))
    return ParsedBody(
        model=checked_model(given.get("model"), facts),
        sampling=conversation_sampling(given, facts, given.get("max_tokens"), stop=stops),
        messages=turns,
        template=TemplateOptions(add_generation_prompt=not goes_on, continue_final_message=goes_on),
        streaming=Streaming(wanted=given.get("stream", False)),
        priority=given.get("priority"),
        service_tier=given.get("service_tier"),
        max_price=read_price(given),
        ignored=read.ignored,
    )


def _turn(message: Any, place: str) -> dict[str, str]:
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise InvalidRequest(
            f"{place} must be an object with role (user or assistant) and content", param="messages"
        )
    return {"role": message["role"], "content": _text(message.get("content"), f"{place}.content")}


def _text(content: Any, place: str) -> str:
    param = place.partition("[")[0]
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{place} must be {SYSTEM_MUST}", param=param)
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if isinstance(kind, str) and kind != "text":
            message = f"{place} holds a block of type {kind!r:.40}; this server reads text only"
            raise UnsupportedModality(message, param=param)
        text = block.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{place} must be {SYSTEM_MUST}", param=param)
        texts.append(text)
    return "\n".join(texts)


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
