"""POST /v1/responses: answers and events in the shape of OpenAI's Responses API, for text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.errors import InvalidRequest
from paceline.llm.outputs import CompletionOutput, RequestOutput
from paceline.models.files.sampling_defaults import chat_sampling
from paceline.server.api import structures
from paceline.server.api.fields import (
    Field,
    FieldTable,
    only,
    shaped,
    text,
    unsupported,
    whole,
    without_effect,
)
from paceline.server.api.generation_route import GenerationRoute, PartsWriter
from paceline.server.api.openai_fields import (
    EFFORTS,
    LARGEST,
    MESSAGE_SCHEMA,
    client_fields,
    model_field,
    openai_tool_fields,
    read_thinking,
    reasoning_fields,
    sampling_fields,
    serving_fields,
)
from paceline.server.api.openai_requests import (
    ParsedBody,
    checked_messages,
    common_values,
    given_sampling,
    without_idle_tools,
)
from paceline.server.api.openai_responses import prompt_details, with_receipt
from paceline.server.api.route import RequestLimits, Route, described
from paceline.server.call import Call
from paceline.server.errors import UnsupportedParameter, problem_of
from paceline.server.generate.generation import Generation, Usage
from paceline.server.generate.service import Service
from paceline.text.answer import AnswerEvent
from paceline.text.messages import INPUT
from paceline.text.reasoning import Reasoned
from paceline.text.tools.reading import read_openai_tools
from paceline.text.tools.scanner import CallArguments, CallBegin, CallEnd, Said
from paceline.text.tools.use import text_input

RESPONSES = "/v1/responses"
INPUT_MUST = "a text or a list of messages"
CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
RESULTS = ("function_call_output", "custom_tool_call_output")
EFFORT_SCHEMA = {"type": "object", "properties": {"effort": {"type": "string", "enum": list(EFFORTS)}}}


def responses_table(limits: RequestLimits) -> FieldTable:
    described = {"anyOf": [{"type": "string"}, {"type": "array", "items": MESSAGE_SCHEMA}]}
    return FieldTable(
        RESPONSES,
        [
            model_field(),
            Field("input", shaped((str, list), INPUT_MUST, described), required=True),
            Field("instructions", text(), "instructions for the model, before the conversation"),
            Field("max_output_tokens", whole(1, limits.answer_tokens), "default: all that fit"),
            *sampling_fields(limits, "n"),
            *(field for field in serving_fields(limits) if field.name != "stream_options"),
            *client_fields(limits),
            without_effect("stream_options", shaped((dict,), "an object")),
            without_effect("max_tool_calls", whole(0, LARGEST)),
            *structures.responses_fields(),
            *openai_tool_fields(),
            only("include", []),
            only("truncation", "disabled"),
            only("background", False),
            only("top_logprobs", 0),
            Field("reasoning", shaped((dict,), "an object", EFFORT_SCHEMA), "effort: a budget of reasoning"),
            *(field for field in reasoning_fields(limits) if field.name != "reasoning_effort"),
            *unsupported("prompt", "conversation", "previous_response_id"),
        ],
    )


def _turns(items: list[Any]) -> list[dict[str, Any]]:
    """Items as messages: what a former answer of this API looks like is one too, with its calls and its reasoning."""
    turns: list[dict[str, Any]] = []
    reasoning = ""
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise InvalidRequest(f"{place} must be an object with role and content", param="input")
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise InvalidRequest(f"{place}.type must be a text", param="input")
        if kind == "reasoning":
            reasoning = _reasoning_text(item, place)
            continue
        if kind in CALLS:
            last = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
            if last is None:
                last = {"role": "assistant", "content": None}
                turns.append(last)
            last.setdefault("tool_calls", []).append(_former_call(item, place))
        elif kind in RESULTS:
            turns.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        elif kind == "message":
            turns.append({"role": item.get("role"), "content": item.get("content")})
        else:
            message = f"{place} is of type {kind!r:.40}, which is not supported; send messages, calls and their outputs"
            raise UnsupportedParameter(message, param="input")
        if reasoning and turns[-1]["role"] == "assistant":
            turns[-1]["reasoning_content"] = reasoning
        reasoning = ""
    if not turns:
        raise InvalidRequest(f"input must be {INPUT_MUST}", param="input")
    return turns


def _former_call(item: Mapping[str, Any], place: str) -> Json:
    name, given = item.get("name"), item.get(CALLS[item["type"]])
    if not isinstance(name, str) or not isinstance(given, str):
        raise InvalidRequest(f"{place} must have a name and {CALLS[item['type']]}, both texts", param="input")
    arguments = given if item["type"] == "function_call" else {INPUT: given}
    return {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _reasoning_text(item: Mapping[str, Any], place: str) -> str:
    parts = item.get("content") or ()
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Mapping) for part in parts):
        raise InvalidRequest(f"{place}.content must be a list of reasoning texts", param="input")
    return "".join(part["text"] for part in parts if isinstance(part.get("text"), str))


_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


class Response:
    """The body of one response, as it stands at any moment."""

    def __init__(self, call: Call, body: ParsedBody) -> None:
        self._given = call.body
        self._body = body
        self._created_s = int(time.time() - (time.monotonic() - call.received_s))
        self.id = f"resp_{call.id}"
        self._number = call.id

    def shown(self, status: str, output: list[Json], usage: Usage | None, reason: str | None = None) -> Json:
        sampling = self._body.sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": self._given.get("instructions"),
            "max_output_tokens": self._given.get("max_output_tokens"),
            "metadata": self._given.get("metadata") or {},
            "model": self._body.model,
            "output": output,
            "parallel_tool_calls": self._given.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None, **(self._given.get("reasoning") or {})},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | (self._given.get("text") or {}),
            "tool_choice": self._given.get("tool_choice") or "auto",
            "tools": self._given.get("tools") or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": self._given.get("user"),
        }

    def finished(self, output: CompletionOutput, items: list[Json], usage: Usage) -> Json:
        is_cut = output.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        if items:
            items[-1]["status"] = status
        return self.shown(status, items, usage, "max_output_tokens" if is_cut else None)

    def items(self, output: CompletionOutput) -> list[Json]:
        """The items of a whole answer."""
        found: list[Json] = []
        if output.reasoning:
            found.append(self.item("reasoning", 0, output.reasoning))
        if output.text or not (found or output.tool_calls):
            found.append(self.item("message", len(found), output.text))
        for call in output.tool_calls:
            begun = CallBegin(0, call.id, call.name)
            found.append(self.call_item(begun, len(found), call.arguments))
        return found

    def item(self, kind: str, number: int, text: str | None, status: str = "completed") -> Json:
        """A message or reasoning; without a text it has only begun."""
        base = f"{'rs' if kind == 'reasoning' else 'msg'}_{self._number}"
        made: Json = {"id": base if number == 0 else f"{base}_{number}", "type": kind, "status": status}
        content = [] if text is None else [part_of(kind, text)]
        if kind == "reasoning":
            return {**made, "summary": [], "content": content}
        return {**made, "role": "assistant", "content": content}

    def call_item(self, call: CallBegin, number: int, given: str, status: str = "completed") -> Json:
        tools = self._body.tools
        kind = "custom_tool_call" if tools is not None and tools.is_custom(call.name) else "function_call"
        made = {"id": f"{'ctc' if kind == 'custom_tool_call' else 'fc'}_{self._number}_{number}"}
        if kind == "custom_tool_call":
            given = text_input(given)
        return {
            **made,
            "type": kind,
            "status": status,
            "call_id": call.id,
            "name": call.name,
            CALLS[kind]: given,
        }


class ResponseEvents(PartsWriter):
    """Events of one response, numbered, in the order of the API: its items, one after the other."""

    def __init__(self, generation: Generation, response: Response) -> None:
        super().__init__(generation)
        self._response = response
        self._number = 0
        self._items: list[Json] = []  # those that are complete
        self._open: _OpenItem | None = None

    def end(self) -> bytes:
        assert self._output is not None
        frames: list[bytes] = []
        if self._open is None and not self._items:  # an answer without content has an empty text
            self._continue("message", "", frames)
        status = "incomplete" if self._output.finish_reason == "length" else "completed"
        self._close(frames, status)
        body = self._response.finished(self._output, self._items, self._generation.usage)
        frames.append(self._event(f"response.{body['status']}", {"response": body}))
        return b"".join(frames)

    def error_frame(self, error: BaseException) -> bytes:
        problem = problem_of(error)
        fields = {"code": problem.code, "message": problem.message, "param": problem.param}
        event = {"type": "error", "sequence_number": self._number, **fields}
        return b"event: error\ndata: %b\n\n" % _encode(event)

    def _write_head(self, frames: list[bytes]) -> None:
        body = self._response.shown("in_progress", [], None)
        frames.append(self._event("response.created", {"response": body}))
        frames.append(self._event("response.in_progress", {"response": body}))

    def _write_part(self, part: AnswerEvent, frames: list[bytes]) -> None:
        match part:
            case Said(text):
                self._continue("message", text, frames)
            case Reasoned(text):
                self._continue("reasoning", text, frames)
            case CallBegin():
                self._close(frames)
                item = self._response.call_item(part, len(self._items), "", "in_progress")
                self._begin(item, frames, part)
            case CallArguments(_, text) if self._open is not None:
                self._open.texts.append(text)
                if self._open.item["type"] == "function_call":
                    frames.append(self._delta(self._open, text))
            case CallEnd():
                self._close(frames)

    def _continue(self, kind: str, text: str, frames: list[bytes]) -> None:
        """More of the open item, or a new one."""
        if self._open is None or self._open.item["type"] != kind:
            self._close(frames)
            opened = self._begin(
                self._response.item(kind, len(self._items), None, "in_progress"), frames, None
            )
            frames.append(
                self._event("response.content_part.added", {**opened.place, "part": part_of(kind, "")})
            )
        if text and self._open is not None:
            self._open.texts.append(text)
            frames.append(self._delta(self._open, text))

    def _begin(self, item: Json, frames: list[bytes], call: CallBegin | None) -> _OpenItem:
        self._open = _OpenItem(item, len(self._items), call)
        added = {"output_index": len(self._items), "item": item}
        frames.append(self._event("response.output_item.added", added))
        return self._open

    def _delta(self, opened: _OpenItem, text: str) -> bytes:
        data = opened.before + _encode(text) + b',"sequence_number":%d}\n\n' % self._number
        self._number += 1
        return data

    def _close(self, frames: list[bytes], status: str = "completed") -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        text, kind, number = "".join(opened.texts), opened.item["type"], len(self._items)
        if opened.call is not None:
            item = self._response.call_item(opened.call, number, text, status)
            given = item[CALLS[kind]]
            if kind == "custom_tool_call" and given:
                frames.append(self._delta(opened, given))
            frames.append(self._event(f"response.{opened.stream}.done", {**opened.place, CALLS[kind]: given}))
        else:
            item = self._response.item(kind, number, text, status)
            shown = part_of(kind, text)
            done = {**opened.place, "text": text, **({"logprobs": []} if kind == "message" else {})}
            frames.append(self._event(f"response.{opened.stream}.done", done))
            frames.append(self._event("response.content_part.done", {**opened.place, "part": shown}))
        self._items.append(item)
        frames.append(self._event("response.output_item.done", {"output_index": number, "item": item}))

    def _event(self, name: str, fields: Json) -> bytes:
        data = _encode({"type": name, **fields, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


# What the events with the content of an item are called.
_STREAMS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}


class _OpenItem:
    """An item that is being written."""

    def __init__(self, item: Json, number: int, call: CallBegin | None) -> None:
        kind = item["type"]
        self.item = item
        self.call = call
        self.texts: list[str] = []
        self.stream = _STREAMS[kind]
        self.place: Json = {"item_id": item["id"], "output_index": number}
        if call is None:
            self.place["content_index"] = 0
        name = f"response.{self.stream}.delta".encode()
        more = b',"logprobs":[]' if kind == "message" else b""
        self.before = b'event: %b\ndata: {"type":"%b",%b%b,"delta":' % (
            *(name, name, _encode(self.place)[1:-1], more),
        )


class ResponsesRoute(GenerationRoute):
    def __init__(self, service: Service) -> None:
        super().__init__(service, responses_table(service.settings.limits))

    def parse(self, given: Mapping[str, Any]) -> ParsedBody:
        settings, facts = self.service.settings, self.service.facts
        read = self.table.read(without_idle_tools(given), strict=settings.strict_fields)
        given = read.fields
        source = given["input"]
        turns: list[Any]
        if isinstance(source, str):
            turns = [{"role": "user", "content": source}]
        else:
            items = checked_messages(source, settings.limits, param="input")
            turns = _turns(items)
        if "instructions" in given:
            turns.insert(0, {"role": "system", "content": given["instructions"]})
        common, sampling = common_values(read, facts), given_sampling(given)
        if "max_output_tokens" in given:
            sampling["max_tokens"] = given["max_output_tokens"]
        return ParsedBody(
            sampling=chat_sampling(facts.generation, facts.max_model_len, **sampling),
            messages=turns,
            template={"use": read_openai_tools(given), "thinking": read_thinking(_with_effort(given))},
            **common,
        )

    async def start(self, call: Call, body: ParsedBody) -> Generation:
        try:
            return await super().start(call, body)
        except InvalidRequest as error:
            if error.param == "messages":  # what a conversation is called elsewhere
                error.param = "input"
            raise

    def writer(self, call: Call, body: ParsedBody, generation: Generation) -> ResponseEvents:
        return ResponseEvents(generation, Response(call, body))

    def whole(
        self, call: Call, body: ParsedBody, generation: Generation, outputs: list[RequestOutput]
    ) -> dict[str, Any]:
        (output,) = outputs[0].outputs
        response = Response(call, body)
        return response.finished(output, response.items(output), generation.usage)


def responses_routes(service: Service) -> list[Route]:
    route = ResponsesRoute(service)
    summary = "Answer an input (Responses API)"
    return [described("POST", RESPONSES, route.answer, summary, route.table, is_generation=True)]


def _with_effort(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Responses puts the effort into an object."""
    effort = (given.get("reasoning") or {}).get("effort")
    if effort is None:
        return given
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise InvalidRequest(f"reasoning.effort must be one of {', '.join(EFFORTS)}", param="reasoning")
    return {**given, "reasoning_effort": effort}


def part_of(kind: str, text: str) -> Json:
    """The content of a message or of reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Json:
    body = {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0}
        | prompt_details(usage),
        "output_tokens": usage.num_output,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning or 0},
        "total_tokens": usage.num_prompt + usage.num_output,
    }
    return with_receipt(body, usage)
