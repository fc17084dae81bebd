"""POST /v1/messages and /v1/messages/count_tokens: answers and events in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from paceline.errors import InvalidRequest
from paceline.llm.outputs import CompletionOutput, RequestOutput
from paceline.models.files.sampling_defaults import chat_sampling
from paceline.server.api import structures
from paceline.server.api.fields import (
    FLAG,
    Field,
    FieldTable,
    ignored_header,
    list_of,
    number,
    only,
    shaped,
    stop_text,
    unsupported,
    whole,
    without_effect,
)
from paceline.server.api.generation_route import GenerationRoute
from paceline.server.api.limits import RequestLimits
from paceline.server.api.openai_fields import (
    LARGEST,
    messages_kind,
    metadata_kind,
    model_field,
    objective_fields,
    sampling_fields,
    service_level_fields,
    tool_fields,
)
from paceline.server.api.openai_requests import (
    ParsedBody,
    checked_messages,
    common_values,
    given_sampling,
    without_idle_tools,
)
from paceline.server.api.openai_responses import with_receipt
from paceline.server.api.route import ANTHROPIC_ERRORS, Route, described
from paceline.server.call import Answer, Call
from paceline.server.errors import UnsupportedModality, anthropic_body, problem_of
from paceline.server.generate.generation import Delta, Generation, Usage
from paceline.server.generate.service import INLINE_CHARS, Service, check_prompt

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SYSTEM_MUST = "a text or a list of text blocks"
ROLES = ("user", "assistant")


def messages_table(limits: RequestLimits) -> FieldTable:
    stops = list_of(stop_text(limits.stop_bytes), limits.stops)
    return FieldTable(
        MESSAGES,
        [
            *_conversation_fields(limits),
            Field("max_tokens", whole(1, limits.answer_tokens), "tokens of the answer", required=True),
            Field("stop_sequences", stops, "texts that end the answer"),
            Field("temperature", number(0, 2)),
            Field("top_p", number(0, 1, above=True)),
            Field("top_k", whole(-1, LARGEST)),
            Field("stream", FLAG, "send the answer as it is made"),
            *service_level_fields(),
            *sampling_fields(limits, "n", "temperature", "top_p", "top_k", "stop"),
            *objective_fields(),
            without_effect("metadata", metadata_kind(limits)),
        ],
    )


def _conversation_fields(limits: RequestLimits) -> list[Field]:
    return [
        model_field(),
        Field("messages", messages_kind(limits, minItems=1), required=True),
        Field(
            "system", shaped((str, list), SYSTEM_MUST), "instructions for the model, before the conversation"
        ),
        *tool_fields({"type": "none"}, {"type": "auto"}, '{"type": "none"}'),
        only("thinking", {"type": "disabled"}),
        only("mcp_servers", []),
        *structures.anthropic_fields(),
        *unsupported("container", "context_management"),
    ]


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

    def error_frame(self, error: BaseException) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_body(problem_of(error))


class MessagesRoute(GenerationRoute):
    """Conversations, answered or only counted."""

    def __init__(self, service: Service) -> None:
        limits = service.settings.limits
        super().__init__(service, messages_table(limits))
        self.count_table = FieldTable(COUNT, _conversation_fields(limits))

    def parse(self, given: Mapping[str, Any]) -> ParsedBody:
        return self._parsed(self.table, given)

    def _parsed(self, table: FieldTable, body: Mapping[str, Any]) -> ParsedBody:
        """A conversation; the last message of the assistant, if it is the last, is gone on with."""
        settings, facts = self.service.settings, self.service.facts
        read = table.read(without_idle_tools(body), strict=settings.strict_fields)
        given = read.fields
        messages = checked_messages(given["messages"], settings.limits, param="messages")
        turns = [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]
        goes_on = turns[-1]["role"] == "assistant"
        if "system" in given:
            turns.insert(0, {"role": "system", "content": _text(given["system"], "system")})
        common = common_values(read, facts)
        sampling = {**given_sampling(given), "stop": tuple(given.get("stop_sequences", ()))}
        return ParsedBody(
            sampling=chat_sampling(facts.generation, facts.max_model_len, **sampling),
            messages=turns,
            template={"add_generation_prompt": not goes_on, "continue_final_message": goes_on},
            **common,
        )

    def writer(self, call: Call, body: ParsedBody, generation: Generation) -> MessageEvents:
        return MessageEvents(generation, body, call.id)

    def whole(
        self, call: Call, body: ParsedBody, generation: Generation, outputs: list[RequestOutput]
    ) -> dict[str, Any]:
        (output,) = outputs[0].outputs
        content = [{"type": "text", "text": output.text}]
        return _message(call.id, body.model, content, output, generation.usage)

    async def count(self, call: Call) -> Answer:
        service = self.service
        body = self._parsed(self.count_table, call.body)
        size = check_prompt(body, service.facts.max_model_len, service.settings.limits)
        ids = await service.work(lambda: service.prompt_ids(body), inline=size <= INLINE_CHARS)
        return Answer(body=_encode({"input_tokens": len(ids)}), headers=ignored_header(body.ignored))


def anthropic_routes(service: Service) -> list[Route]:
    route = MessagesRoute(service)
    summary, count = "Answer a conversation (Anthropic)", "Count the tokens of a conversation"
    shape = ANTHROPIC_ERRORS
    return [
        described(
            "POST", MESSAGES, route.answer, summary, route.table, is_generation=True, error_shape=shape
        ),
        described("POST", COUNT, route.count, count, route.count_table, error_shape=shape),
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
