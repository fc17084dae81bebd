"""Bodies of POST /v1/responses, for text: an input, instructions, sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.api.conversation import checked_messages, conversation_sampling, extra_sampling_fields
from paceline.server.api.fields import Field, FieldTable, Group
from paceline.server.api.kinds import Flag, Shaped, Text, Whole
from paceline.server.api.openai_fields import (
    LARGEST,
    MESSAGE_SCHEMA,
    model_field,
    serving_fields,
    tool_fields,
    without_effect,
)
from paceline.server.api.openai_requests import (
    ModelFacts,
    ParsedBody,
    Streaming,
    checked_model,
    checked_salt,
    read_price,
    without_idle_tools,
)
from paceline.server.failures import UnsupportedParameter
from paceline.server.limits import RequestLimits

RESPONSES = "/v1/responses"
INPUT_MUST = "a text or a list of messages"
TEXT_ONLY: tuple[object, ...] = (
    {"format": {"type": "text"}},
    {},
    {"format": {"type": "text"}, "verbosity": "medium"},
)


def responses_table(limits: RequestLimits) -> FieldTable:
    described = {"anyOf": [{"type": "string"}, {"type": "array", "items": MESSAGE_SCHEMA}]}
    served = [field for field in serving_fields(limits) if field.name != "stream_options"]
    return FieldTable(
        RESPONSES,
        [
            model_field(),
            Field(name="input", kind=Shaped((str, list), INPUT_MUST, described), required=True),
            Field(name="instructions", kind=Text(), help="what the model is told first"),
            Field(
                name="max_output_tokens", kind=Whole(1, limits.answer_tokens), help="default: all that fit"
            ),
            *extra_sampling_fields(limits),
            *served,
            *without_effect(limits),
            Field(name="stream_options", kind=Shaped((dict,), "an object"), group=Group.WITHOUT_EFFECT),
            Field(name="parallel_tool_calls", kind=Flag(), group=Group.WITHOUT_EFFECT),
            Field(name="max_tool_calls", kind=Whole(0, LARGEST), group=Group.WITHOUT_EFFECT),
            Field(name="text", group=Group.ONLY, only=TEXT_ONLY),
            *tool_fields("none", "auto", '"none"'),
            Field(name="include", group=Group.ONLY, only=([],)),
            Field(name="truncation", group=Group.ONLY, only=("disabled",)),
            Field(name="background", group=Group.ONLY, only=(False,)),
            Field(name="top_logprobs", group=Group.ONLY, only=(0,)),
            Field(name="reasoning", group=Group.ONLY, only=({}, {"effort": "none"})),
            *(Field(name=name, group=Group.UNSUPPORTED) for name in ("prompt", "conversation")),
            Field(name="previous_response_id", group=Group.UNSUPPORTED),
        ],
    )


def parse_responses(
    table: FieldTable, body: Mapping[str, Any], facts: ModelFacts, limits: RequestLimits, *, strict: bool
) -> ParsedBody:
    read = table.read(without_idle_tools(body), strict=strict)
    given = read.fields
    source = given["input"]
    turns: list[Any]
    if isinstance(source, str):
        turns = [{"role": "user", "content": source}]
    else:
        items = checked_messages(source, limits, param="input")
        turns = [_turn(item, f"input[{index}]") for index, item in enumerate(items)]
    if "instructions" in given:
        turns.insert(0, {"role": "system", "content": given["instructions"]})
    return ParsedBody(
        model=checked_model(given.get("model"), facts),
        sampling=conversation_sampling(given, facts, given.get("max_output_tokens")),
        messages=turns,
        streaming=Streaming(wanted=given.get("stream", False)),
        priority=given.get("priority"),
        service_tier=given.get("service_tier"),
        max_price=read_price(given),
        cache_salt=checked_salt(given.get("cache_salt", "")),
        ignored=read.ignored,
    )


def _turn(item: Any, place: str) -> dict[str, Any]:
    """A message; what a former answer of this API looks like is one too."""
    if not isinstance(item, Mapping):
        raise InvalidRequest(f"{place} must be an object with role and content", param="input")
    kind = item.get("type", "message")
    if kind != "message":
        message = f"{place} is of type {kind!r:.40}, which is not supported; send messages"
        raise UnsupportedParameter(message, param="input")
    return {"role": item.get("role"), "content": item.get("content")}
