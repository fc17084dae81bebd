"""Bodies of POST /v1/messages and /v1/messages/count_tokens (Anthropic's shape)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.api.conversation import (
    checked_messages,
    conversation_sampling,
    ends_with_assistant,
    extra_sampling_fields,
)
from paceline.server.api.fields import Field, FieldTable, Group
from paceline.server.api.kinds import Flag, ListOf, MapOf, Number, Shaped, Text, Whole
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
    checked_model,
    read_price,
    without_idle_tools,
)
from paceline.server.failures import UnsupportedModality
from paceline.server.limits import RequestLimits

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
