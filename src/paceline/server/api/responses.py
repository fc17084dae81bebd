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
from paceline.server.api.generation_route import GenerationRoute
from paceline.server.api.limits import RequestLimits
from paceline.server.api.openai_fields import (
    LARGEST,
    MESSAGE_SCHEMA,
    client_fields,
    model_field,
    sampling_fields,
    serving_fields,
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
from paceline.server.api.route import Route, described
from paceline.server.call import Call
from paceline.server.errors import UnsupportedParameter, problem_of
from paceline.server.generate.generation import Delta, Generation, Usage
from paceline.server.generate.service import Service

RESPONSES = "/v1/responses"
INPUT_MUST = "a text or a list of messages"


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
            *tool_fields("none", "auto", '"none"'),
            only("include", []),
            only("truncation", "disabled"),
            only("background", False),
            only("top_logprobs", 0),
            only("reasoning", {}, {"effort": "none"}),
            *unsupported("prompt", "conversation", "previous_response_id"),
        ],
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
        self._created_s = int(time.time() - (time.monotonic() - call.received_s))
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
            "text": {"format": {"type": "text"}} | (self._given.get("text") or {}),
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
        self._number = 0
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
                number = b',"sequence_number":%d}\n\n' % self._number
                self._number += 1
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
        problem = problem_of(error)
        fields = {"code": problem.code, "message": problem.message, "param": problem.param}
        event = {"type": "error", "sequence_number": self._number, **fields}
        return b"event: error\ndata: %b\n\n" % _encode(event)

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
        data = _encode({"type": name, **fields, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


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
            turns = [_turn(item, f"input[{index}]") for index, item in enumerate(items)]
        if "instructions" in given:
            turns.insert(0, {"role": "system", "content": given["instructions"]})
        common, sampling = common_values(read, facts), given_sampling(given)
        if "max_output_tokens" in given:
            sampling["max_tokens"] = given["max_output_tokens"]
        return ParsedBody(
            sampling=chat_sampling(facts.generation, facts.max_model_len, **sampling),
            messages=turns,
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
        return Response(call, body).finished(output, output.text, generation.usage)


def responses_routes(service: Service) -> list[Route]:
    route = ResponsesRoute(service)
    summary = "Answer an input (Responses API)"
    return [described("POST", RESPONSES, route.answer, summary, route.table, is_generation=True)]


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
