"""POST /v1/messages and /v1/messages/count_tokens: answers and events in Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from paceline.core.parameters import Pin
from paceline.errors import InvalidRequest, UnsupportedModality
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
from paceline.server.api.generation_route import GenerationRoute, PartsWriter, read_body
from paceline.server.api.openai_fields import (
    LARGEST,
    anthropic_tool_fields,
    context_reuse_field,
    messages_kind,
    metadata_kind,
    model_field,
    objective_fields,
    read_anthropic_thinking,
    sampling_fields,
    service_level_fields,
)
from paceline.server.api.openai_requests import (
    ParsedBody,
    checked_messages,
    common_values,
    given_sampling,
    without_idle_tools,
)
from paceline.server.api.openai_responses import with_receipt
from paceline.server.api.route import ANTHROPIC_ERRORS, RequestLimits, Route, described
from paceline.server.call import Answer, Call
from paceline.server.errors import anthropic_body, problem_of
from paceline.server.generate.generation import Generation, Usage
from paceline.server.generate.prompt_size import takes
from paceline.server.generate.service import Service
from paceline.text.answer import AnswerEvent
from paceline.text.reasoning import Reasoned
from paceline.text.tools.reading import read_anthropic_tools
from paceline.text.tools.scanner import CallArguments, CallBegin, CallEnd, Said

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SYSTEM_MUST = "a text or a list of text blocks"
ROLES = ("user", "assistant")
TTLS = {"5m": 300, "1h": 3600}  # of `cache_control`, in seconds
CALL_BLOCKS = ("tool_use", "thinking", "redacted_thinking")


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
        Field(
            "cache_control",
            shaped((dict,), "an object with type and ttl"),
            "the prompt is pinned in the cache for a ttl of 5m or 1h, as far as the key's part of it goes",
        ),
        context_reuse_field(),
        *anthropic_tool_fields(),
        only("mcp_servers", []),
        *structures.anthropic_fields(),
        *unsupported("container", "context_management"),
    ]


def _cache_seconds(given: Mapping[str, Any]) -> int | None:
    """The longest time that any `cache_control` of a body asks for; None: there is none. The whole prompt is kept."""
    marked: list[Any] = [given, *_listed(given.get("system")), *_listed(given.get("tools"))]
    for message in given["messages"]:
        content = message.get("content") if isinstance(message, Mapping) else None
        marked += _listed(content)
    found = [
        each["cache_control"] for each in marked if isinstance(each, Mapping) and each.get("cache_control")
    ]
    seconds = []
    for control in found:
        kind, ttl = (
            (control.get("type"), control.get("ttl", "5m")) if isinstance(control, Mapping) else (None, None)
        )
        if kind != "ephemeral" or not isinstance(ttl, str) or ttl not in TTLS:
            raise InvalidRequest(
                f"cache_control takes the type ephemeral and a ttl of {' or '.join(TTLS)}, not {control!r:.80}",
                param="cache_control",
            )
        seconds.append(TTLS[ttl])
    return max(seconds, default=None)


def _listed(blocks: Any) -> list[Any]:
    return blocks if isinstance(blocks, list) else []


def _turns(message: Any, place: str, sees: bool) -> list[dict[str, Any]]:
    """One message as a chat template knows it; results of tools become messages before its text."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        raise InvalidRequest(
            f"{place} must be an object with role (user or assistant) and content", param="messages"
        )
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, f"{place}.content")}]
    own = CALL_BLOCKS if role == "assistant" else ("tool_result",)
    texts, results = [], []
    turn: dict[str, Any] = {"role": role}
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in own:
            texts.append(block)
        elif kind == "tool_result":
            results.append(_result(block, f"{place}.content[{index}]", sees))
        elif kind == "tool_use":
            turn.setdefault("tool_calls", []).append(_call(block, f"{place}.content[{index}]"))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
    if texts or not content:
        turn["content"] = _text(texts, f"{place}.content", sees=sees and role == "user")
    elif not results:
        turn["content"] = None if "tool_calls" in turn else ""
    return [*results, turn] if "content" in turn else results


def _result(block: Mapping[str, Any], place: str, sees: bool) -> dict[str, Any]:
    content = block.get("content", "")
    if not isinstance(block.get("tool_use_id"), str):
        raise InvalidRequest(f"{place}.tool_use_id must be a text", param="messages")
    nothing = "error" if block.get("is_error") is True else ""  # a model is to know that it failed
    text = nothing if content in ("", [], None) else _text(content, f"{place}.content", sees=sees)
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text}


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(block.get("id"), str) or not isinstance(block.get("name"), str):
        raise InvalidRequest(f"{place} must have an id and a name", param="messages")
    if not isinstance(block.get("input"), Mapping):
        raise InvalidRequest(f"{place}.input must be an object", param="messages")
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _text(content: Any, place: str, *, sees: bool = False) -> Any:
    """A text; `sees`: or the blocks, where there are pictures among them."""
    param = place.partition("[")[0]
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"{place} must be {SYSTEM_MUST}", param=param)
    texts = []
    has_picture = False
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if sees and kind == "image":
            has_picture = True
            continue
        if isinstance(kind, str) and kind != "text":
            message = f"{place} holds a block of type {kind!r:.40}; {takes(sees)}"
            raise UnsupportedModality(message, param=param)
        text = block.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(f"{place} must be {SYSTEM_MUST}", param=param)
        texts.append(text)
    return list(content) if has_picture else "\n".join(texts)


_encode = msgspec.json.Encoder().encode

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
# How the API names the content of each kind of block in its deltas.
_DELTAS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_DELTA_TYPES = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class MessageEvents(PartsWriter):
    """Events of one message, in the order of the API: its blocks, one after the other."""

    def __init__(self, generation: Generation, body: ParsedBody, id: str) -> None:
        super().__init__(generation)
        self._body = body
        self._id = id
        self._kind = ""  # of the block that is open
        self._index = -1  # of that block
        self._before = b""  # what stands before the content of its deltas

    def end(self) -> bytes:
        frames: list[bytes] = []
        if self._index < 0:  # an answer without content has an empty text
            self._continue({"type": "text", "text": ""}, "", frames)
        self._close(frames)
        delta = _stop_fields(self._output)
        usage = _usage(self._generation.usage)
        frames += (_event("message_delta", {"delta": delta, "usage": usage}), _STOP)
        return b"".join(frames)

    def error_frame(self, error: BaseException) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_body(problem_of(error))

    def _write_head(self, frames: list[bytes]) -> None:
        usage = replace(self._generation.usage, receipt=None)  # it belongs to the end
        message = _message(self._id, self._body.model, [], None, usage)
        frames.append(_event("message_start", {"message": message}))

    def _write_part(self, part: AnswerEvent, frames: list[bytes]) -> None:
        match part:
            case Said(text):
                self._continue({"type": "text", "text": ""}, text, frames)
            case Reasoned(text):
                self._continue({"type": "thinking", "thinking": "", "signature": ""}, text, frames)
            case CallBegin(_, id, name):
                self._close(frames)
                self._continue({"type": "tool_use", "id": id, "name": name, "input": {}}, "", frames)
            case CallArguments(_, text):
                frames += (self._before, _encode(text), b"}}\n\n")
            case CallEnd():
                self._close(frames)

    def _continue(self, block: dict[str, Any], text: str, frames: list[bytes]) -> None:
        """More of the open block, or a new one."""
        kind = block["type"]
        if kind != self._kind:
            self._close(frames)
            self._index += 1
            self._kind = kind
            frames.append(_event("content_block_start", {"index": self._index, "content_block": block}))
            if self._index == 0:
                frames.append(_PING)
            self._before = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"%b","%b":'
            ) % (self._index, _DELTA_TYPES[kind].encode(), _DELTAS[kind].encode())
        if text:
            frames += (self._before, _encode(text), b"}}\n\n")

    def _close(self, frames: list[bytes]) -> None:
        if self._kind:
            frames.append(_event("content_block_stop", {"index": self._index}))
            self._kind = ""


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
        sees = self.service.model.pictures is not None
        turns = [
            turn for index, each in enumerate(messages) for turn in _turns(each, f"messages[{index}]", sees)
        ]
        goes_on = turns[-1]["role"] == "assistant" and "tool_calls" not in turns[-1]
        if "system" in given:
            turns.insert(0, {"role": "system", "content": _text(given["system"], "system")})
        common = common_values(read, facts)
        sampling = {**given_sampling(given), "stop": tuple(given.get("stop_sequences", ()))}
        if (seconds := _cache_seconds(given)) is not None:
            sampling["pin"] = Pin(ttl_s=seconds)
        return ParsedBody(
            sampling=chat_sampling(facts.generation, facts.max_model_len, **sampling),
            messages=turns,
            template={
                "add_generation_prompt": not goes_on,
                "continue_final_message": goes_on,
                "use": read_anthropic_tools(given),
                "thinking": read_anthropic_thinking(given),
            },
            **common,
        )

    def writer(self, call: Call, body: ParsedBody, generation: Generation) -> MessageEvents:
        return MessageEvents(generation, body, call.id)

    def whole(
        self, call: Call, body: ParsedBody, generation: Generation, outputs: list[RequestOutput]
    ) -> dict[str, Any]:
        (output,) = outputs[0].outputs
        return _message(call.id, body.model, _blocks(output), output, generation.usage)

    async def count(self, call: Call) -> Answer:
        service = self.service
        body = read_body(service, call, lambda given: self._parsed(self.count_table, given))
        size = service.check_prompt(body)
        async with service.with_pictures(call, body) as seen:
            ids = await service.work(lambda: service.prompt_ids(seen), inline=service.is_short(seen, size))
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


def _blocks(output: CompletionOutput) -> list[dict[str, Any]]:
    """The content of a whole answer. A call that broke off has no input that could be told."""
    found: list[dict[str, Any]] = []
    if output.reasoning:
        found.append({"type": "thinking", "thinking": output.reasoning, "signature": ""})
    if output.text or not (found or output.tool_calls):
        found.append({"type": "text", "text": output.text})
    for call in output.tool_calls:
        given = json.loads(call.arguments) if call.is_complete else {}
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return found


def _stop_fields(output: CompletionOutput | None) -> dict[str, Any]:
    if output is None:
        return {"stop_reason": None, "stop_sequence": None}
    if isinstance(output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
    reason = "max_tokens" if output.finish_reason == "length" else "end_turn"
    if output.tool_calls and output.finish_reason == "stop":
        reason = "tool_use"
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
