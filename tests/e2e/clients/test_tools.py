"""Tool loops with the official `openai` and `anthropic` clients against a live server with real grammars.

The model is random: what it says has no meaning, but where calls are required, each is valid by its schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.client_server import KEY, MODEL, ClientServer, client_server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}
FLAT = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA}
THEIRS = {"name": "weather", "description": "d", "input_schema": SCHEMA}
ASKED: list[Any] = [{"role": "user", "content": "weather?"}]
MOST = 400


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    with client_server(tmp_path_factory.mktemp("tools")) as running:
        running.wait_for(200)
        yield running


@pytest.fixture
def client(server: ClientServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as one:
        yield one


def checked(arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(arguments)
    jsonschema.validate(found, SCHEMA)
    return found


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_loop_of_chats(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(5):
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": MOST, "tools": [TOOL], "seed": seed}
        answer = client.chat.completions.create(
            messages=ASKED, tool_choice=choice, parallel_tool_calls=False, **asked
        ).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.tool_calls
        (call,) = answer.message.tool_calls
        assert call.type == "function" and call.function.name == "weather"
        checked(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        again = [*ASKED, answer.message.model_dump(exclude_none=True), result]
        told = client.chat.completions.create(
            messages=again, tool_choice="none", **{**asked, "max_tokens": 4}
        )
        assert told.choices[0].message.tool_calls is None


def test_streaming_helpers_of_the_openai_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=ASKED,
        tools=[{**TOOL, "function": {**TOOL["function"], "strict": True}}],  # type: ignore[dict-item]
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=MOST,
        seed=1,
    ) as stream:
        kinds = {event.type for event in stream}
        choice = stream.get_final_completion().choices[0]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    assert choice.message.tool_calls[0].function.parsed_arguments == checked(
        choice.message.tool_calls[0].function.arguments
    )


class Weather(BaseModel):
    sunny: bool
    degrees: int


def test_a_parsed_tool(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=ASKED,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=MOST,
        seed=2,
        logit_bias={str(4 + 1 + ord(digit) - 32): -20 for digit in "0123456789"},  # short numbers
    )
    calls = answer.choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Weather)


def test_a_loop_of_responses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": MOST, "tools": [FLAT]}
    answer = client.responses.create(input=ASKED, tool_choice="required", parallel_tool_calls=False, **asked)
    (call,) = answer.output
    assert call.type == "function_call" and answer.status == "completed"
    checked(call.arguments)
    again = [
        *ASKED,
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    told = client.responses.create(input=again, tool_choice="none", **{**asked, "max_output_tokens": 4})
    assert [item.type for item in told.output] == ["message"]
    with client.responses.stream(
        input=ASKED, tool_choice="required", parallel_tool_calls=False, **asked
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
    assert final.output[0].type == "function_call"
    checked(final.output[0].arguments)


def test_a_loop_of_messages(server: ClientServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": MOST, "tools": [THEIRS]}
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        answer = client.messages.create(messages=ASKED, tool_choice=choice, **asked)
        (use,) = answer.content
        assert answer.stop_reason == "tool_use" and use.type == "tool_use"
        jsonschema.validate(use.input, SCHEMA)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
        again = [
            *ASKED,
            {"role": "assistant", "content": [use.model_dump()]},
            {"role": "user", "content": [result]},
        ]
        told = client.messages.create(
            messages=again, tool_choice={"type": "none"}, **{**asked, "max_tokens": 4}
        )
        assert [block.type for block in told.content] == ["text"]
        named = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        with client.messages.stream(messages=ASKED, tool_choice=named, **asked) as stream:
            final = stream.get_final_message()
        (use,) = final.content
        assert use.type == "tool_use"
        jsonschema.validate(use.input, SCHEMA)
