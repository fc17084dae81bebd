"""POST /v1/responses: answers and events in the shape of OpenAI's Responses API, for text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.errors import InvalidRequest
from paceline.llm.outputs import CompletionOutput
from paceline.server.api.fields import (
    Field,
    FieldTable,
    Flag,
    Group,
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
    model_field,
    serving_fields,
    tool_fields,
    without_effect,
)
from paceline.server.api.openai_requests import (
    ModelFacts,
    ParsedBody,
    Streaming,
    checked_messages,
    checked_model,
    checked_salt,
    conversation_sampling,
    extra_sampling_fields,
    read_price,
    without_idle_tools,
)
from paceline.server.api.openai_responses import with_receipt
from paceline.server.api.route import Route
from paceline.server.api.sse import responses_error_frame, stream_events
from paceline.server.call import Answer, Call, Events
from paceline.server.errors import UnsupportedParameter
from paceline.server.generate.generation import Delta, Generation, Usage
from paceline.server.generate.service import Service

# Bodies of POST /v1/responses, for text: an input, instructions, sampling.


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


_encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


class Response:
    """The body of one response, as it stands at any moment."""

    def __init__(self, call: Call, body: ParsedBody) -> None:
        self._given = call.body
        self._body = body
        self._created_s = int(time.time())
        self.id = f"resp_{call.id}"
        self.item_id = f"msg_{call.id}"

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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": self._given.get("user"),
        }

    def finished(self, output: CompletionOutput, text: str, usage: Usage) -> Json:
        is_cut = output.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        item = self.item(status, [part(text)])
        return self.shown(status, [item], usage, "max_output_tokens" if is_cut else None)

    def item(self, status: str, content: list[Json]) -> Json:
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


class ResponseEvents:
    """Events of one response, numbered, in the order of the API."""

    def __init__(self, generation: Generation, response: Response) -> None:
        self._generation = generation
        self._response = response
        self._has_begun = False
        self._text: list[str] = []
        self._output: CompletionOutput | None = None
        self.number = 0
        place = {"item_id": response.item_id, "output_index": 0, "content_index": 0}
        self._place = place
        self._before_text = b"%b,%b" % (
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"',
            _encode(place)[1:-1] + b',"logprobs":[],"delta":',
        )

    def write(self, deltas: list[Delta]) -> bytes:
        frames: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            self._begin(frames)
        for delta in deltas:
            if delta.text:
                self._text.append(delta.text)
                number = b',"sequence_number":%d}\n\n' % self.number
                self.number += 1
                frames += (self._before_text, _encode(delta.text), number)
            if delta.has_ended:
                self._output = delta.output
        return b"".join(frames)

    def end(self) -> bytes:
        assert self._output is not None
        text = "".join(self._text)
        body = self._response.finished(self._output, text, self._generation.usage)
        done = self._event("response.output_text.done", {**self._place, "text": text, "logprobs": []})
        closed = self._event("response.content_part.done", {**self._place, "part": part(text)})
        item = self._event("response.output_item.done", {"output_index": 0, "item": body["output"][0]})
        return done + closed + item + self._event(f"response.{body['status']}", {"response": body})

    def error_frame(self, error: BaseException) -> bytes:
        return responses_error_frame(error, self.number)

    def _begin(self, frames: list[bytes]) -> None:
        response = self._response
        body = response.shown("in_progress", [], None)
        item = response.item("in_progress", [])
        frames += (
            self._event("response.created", {"response": body}),
            self._event("response.in_progress", {"response": body}),
            self._event("response.output_item.added", {"output_index": 0, "item": item}),
            self._event("response.content_part.added", {**self._place, "part": part("")}),
        )

    def _event(self, name: str, fields: Json) -> bytes:
        data = _encode({"type": name, **fields, "sequence_number": self.number})
        self.number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class ResponsesRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self.table = responses_table(service.settings.limits)

    async def answer(self, call: Call) -> Answer | Events:
        service, settings = self._service, self._service.settings
        service.check_ready(call)
        body = parse_responses(
            self.table, call.body, service.facts, settings.limits, strict=settings.strict_fields
        )
        try:
            generation = await service.start(call, body)
        except InvalidRequest as error:
            if error.param == "messages":  # what a conversation is called elsewhere
                error.param = "input"
            raise
        headers = ignored_header(body.ignored)
        response = Response(call, body)
        if body.streaming.wanted:
            return stream_events(
                generation,
                lambda: ResponseEvents(generation, response),
                lambda writer: writer.error_frame,
                headers,
            )
        try:
            (output,) = (await generation.complete())[0].outputs
            answer = _encode(response.finished(output, output.text, generation.usage))
            generation.release()
        finally:
            generation.close()
        return Answer(body=answer, headers=generation.headers(headers))


def responses_routes(service: Service) -> list[Route]:
    route = ResponsesRoute(service)
    return [
        Route(
            methods=("POST",),
            path=RESPONSES,
            handler=route.answer,
            takes_body=True,
            is_generation=True,
            openapi=operation("Answer an input (Responses API)", route.table.schema(), streams=True),
        )
    ]


def part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> Json:
    body = {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_prompt + usage.num_output,
    }
    return with_receipt(body, usage)
