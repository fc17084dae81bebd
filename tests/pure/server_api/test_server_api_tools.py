"""Tools and reasoning in the three APIs: what the engine is asked for, and answers whole and as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from paceline.core.sampling import SamplingParams
from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.process.client import BranchUpdate
from paceline.text.tokenizer import Tokenizer
from tests.model_folder import VOCAB_SIZE, write_model
from tests.pure.server_api.api_helpers import EOS, Api, Script, chunks, ending, ids, says

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TURN = "{{ '<|start|>' + message['role'] + '\n' + (message['content'] or '') + '<|end|>\n' }}"
PLAIN = (
    f"{{% for message in messages %}}{TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
# Shows tools and calls, and reasons unless it is switched off.
HERMES = (
    "{% if tools %}<tool_call>{% for tool in tools %}{{ tool.function.name }};{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|start|>' + message.role + '\n' }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.id }}={{ call.function | tojson }}{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "time"}}
FLAT = {"type": "function", "name": "weather", "parameters": SCHEMA}
THEIRS = {"name": "weather", "input_schema": SCHEMA}
ASKED = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


@cache
def text_of(template: str) -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.from_folder(
            write_model(Path(folder), template=template), model_vocab_size=VOCAB_SIZE
        )


def tool_api(script: Script | None = None, template: str = HERMES, **settings: Any) -> Api:
    """A service with room for tools."""
    api = Api(script, text=text_of(template), **settings)
    api.client._info = replace(api.client._info, max_model_len=4096)
    return api


def said(*pieces: str) -> Script:
    return says(*pieces, reason="stop", with_eos=True)


def prompt_of(api: Api, number: int = 0) -> str:
    tokens = api.client.submitted[number]["tokens"]
    return text_of(HERMES).decode(tokens, skip_special_tokens=False)


def structure_of(api: Api) -> Structure | None:
    found: Structure | None = api.client.submitted[0]["sampling"].structured_outputs
    return found


def letters(text: str) -> list[str]:
    return list(text)


# ---------------------------------------------------------------- chat


def test_a_chat_that_calls() -> None:
    api = tool_api(said(THOUGHT, "I look.\n", CALL))
    found = api.ask(CHAT, {"messages": ASKED, "tools": [TOOL, OTHER]})
    choice = found["choices"][0]
    message, (call,) = choice["message"], choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == (
        "I look.\n",
        "Hm.",
        "Hm.",
    )
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert found["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": len("<think>\nHm.\n</think>") - 6
    }
    assert "<tool_call>weather;time;" in prompt_of(api)
    from openai.types.chat import ChatCompletion

    ChatCompletion.model_validate(found)


@pytest.mark.parametrize("cut", [letters, lambda text: [text], lambda text: re.split(r"(?<=[ {<])", text)])
def test_a_chat_that_calls_in_a_stream(cut: Any) -> None:
    """However the text is cut: reasoning, text, then calls with their arguments, then the reason."""
    body = {"messages": ASKED, "tools": [TOOL, OTHER], "stream_options": {"include_usage": True}}
    data = tool_api(said(*cut(THOUGHT + "I look. " + CALL + "\n" + TIME))).stream(CHAT, body)
    *found, usage = chunks(data)
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert [delta.get("reasoning") for delta in deltas] == [
        delta.get("reasoning_content") for delta in deltas
    ]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look. "
    kinds = [next(iter(delta), "") for delta in deltas[1:-1]]
    assert sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index) == kinds
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]["name"], call["type"]) for call in begun] == [
        (0, "weather", "function"),
        (1, "time", "function"),
    ]
    for index, arguments in enumerate(('{"city": "Paris"}', "{}")):
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert "".join(pieces) == arguments
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert usage["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT.rstrip()) - 6


def test_logprobs_and_branches_beside_calls() -> None:
    body = {"messages": ASKED, "tools": [TOOL], "n": 2, "logprobs": True, "top_logprobs": 1}
    api = tool_api(said("no #", CALL))
    found = api.ask(CHAT, body)
    assert [choice["message"]["content"] for choice in found["choices"]] == ["no 0", "no 1"]
    counts = [len(choice["logprobs"]["content"]) for choice in found["choices"]]
    streamed = chunks(tool_api(said("no #", CALL)).stream(CHAT, body))
    told = [0, 0]
    for chunk in streamed:
        choice = chunk["choices"][0]
        told[choice["index"]] += len((choice["logprobs"] or {}).get("content", ()))
    assert told == counts


def test_text_without_a_call_and_a_call_that_breaks_off() -> None:
    answer = tool_api(said("no <tool_call> here")).ask(CHAT, {"messages": ASKED, "tools": [TOOL]})
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("no <tool_call> here", "stop")
    assert "tool_calls" not in choice["message"] and "reasoning" not in choice["message"]
    cut = tool_api(says(CALL[:60], reason="length")).ask(CHAT, {"messages": ASKED, "tools": [TOOL]})
    choice = cut["choices"][0]
    assert choice["finish_reason"] == "length"
    assert (
        choice["message"]["tool_calls"][0]["function"]["arguments"] == CALL[:60].partition('arguments": ')[2]
    )


def test_without_tools_calls_are_text() -> None:
    given: list[dict[str, Any]] = [{}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": []}]
    for more in given:
        api = tool_api(said(CALL))
        assert api.ask(CHAT, {"messages": ASKED, **more})["choices"][0]["message"]["content"] == CALL
        assert structure_of(api) is None and "weather" not in prompt_of(api)


def test_reasoning_can_be_hidden_and_switched_off() -> None:
    body = {"messages": ASKED, "include_reasoning": False}
    message = tool_api(said(THOUGHT, "Two.")).ask(CHAT, body)["choices"][0]["message"]
    assert message["content"] == "Two." and "reasoning" not in message
    api = tool_api(said("Two."))
    api.ask(CHAT, {"messages": ASKED, "reasoning_effort": "none"})
    assert prompt_of(api).endswith("<think></think>") and structure_of(api) is None
    off = tool_api(said(THOUGHT + "Two."), reasoning_parser="none").ask(CHAT, {"messages": ASKED})
    assert off["choices"][0]["message"]["content"] == THOUGHT + "Two."


# ---------------------------------------------------------------- what the engine is asked for


def rules(**body: Any) -> Structure:
    api = tool_api()
    api.ask(CHAT, {"messages": ASKED, "tools": [TOOL, OTHER], **body})
    found = structure_of(api)
    assert found is not None and found.kind == "lark" and found.after == "</think>"
    return found


NAMED = {"type": "function", "function": {"name": "time"}}


def test_a_choice_of_tools_becomes_a_grammar() -> None:
    auto, required = rules(), rules(tool_choice="required")
    assert "until_marker" in auto.source and '"city"' not in auto.source
    assert "until_marker" not in required.source and '"city"' in required.source
    named = rules(tool_choice=NAMED)
    assert "weather" not in named.source and "until_marker" not in named.source
    among = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    allowed = rules(tool_choice=among)
    assert "weather" not in allowed.source and "until_marker" in allowed.source
    alone = rules(parallel_tool_calls=False)
    assert "{0,32}" in auto.source and "{0,32}" not in alone.source
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    assert '"city"' in rules(tools=[strict]).source and rules(tools=[strict]).strict


def test_a_schema_and_tools_go_together() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    assert "start: answer |" in rules(response_format=form).source


@pytest.mark.parametrize(
    ("body", "settings", "budget"),
    [
        ({"thinking_token_budget": 7}, {}, 7),
        ({"reasoning_effort": "low"}, {}, 1_024),
        ({"reasoning_effort": "low", "thinking_token_budget": 0}, {}, 0),
        ({"thinking_token_budget": 7}, {"max_thinking_tokens": 5}, 5),
        ({}, {"max_thinking_tokens": 5}, 5),
    ],
)
def test_budgets_of_reasoning(body: dict[str, Any], settings: dict[str, Any], budget: int) -> None:
    api = tool_api(**settings)
    api.ask(CHAT, {"messages": ASKED, **body})
    assert structure_of(api) == Structure(kind="text", after="</think>", within=budget)


def test_a_form_of_the_answer_holds_behind_reasoning() -> None:
    api = tool_api(said(THOUGHT, "{}"))
    api.ask(CHAT, {"messages": ASKED, "response_format": {"type": "json_object"}, "thinking_token_budget": 7})
    assert structure_of(api) == Structure(kind="json_object", after="</think>", within=7)


def test_a_model_without_reasoning_has_no_budget() -> None:
    api = tool_api(template=PLAIN)
    api.ask(CHAT, {"messages": ASKED, "reasoning_effort": "high", "thinking_token_budget": 5})
    assert structure_of(api) is None


# ---------------------------------------------------------------- templates that know no tools


def test_tools_are_written_into_the_system_message() -> None:
    api = tool_api(said(CALL), template=PLAIN)
    result = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, result, result]
    found = api.ask(CHAT, {"messages": messages, "tools": [TOOL]})
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    prompt = prompt_of(api)
    assert prompt.startswith("<|start|>system\nYou can call functions.")
    assert '{"name": "weather", "description": "tells it", "parameters"' in prompt
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|end|>' in prompt
    assert prompt.count("<tool_response>\nsunny\n</tool_response>") == 2 and "<|start|>tool" not in prompt
    own = tool_api(template=PLAIN)
    own.ask(CHAT, {"messages": [{"role": "system", "content": "Be brief."}, *ASKED], "tools": [TOOL]})
    assert prompt_of(own).startswith("<|start|>system\nBe brief.\n\nYou can call functions.")


def test_a_template_without_a_system_message_gets_tools_with_the_first_one() -> None:
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
    api = tool_api(template=refusing)
    api.ask(CHAT, {"messages": ASKED, "tools": [TOOL]})
    assert prompt_of(api).startswith("<|start|>user\nYou can call functions.")


def test_tools_can_be_switched_off() -> None:
    with pytest.raises(InvalidRequest, match="tool calls are switched off on this server"):
        tool_api(tool_call_parser="none").ask(CHAT, {"messages": ASKED, "tools": [TOOL]})


def test_markers_that_are_control_tokens_stay_in_the_text(tmp_path: Path) -> None:
    """A model whose markers of calls are special tokens, which text otherwise leaves out."""
    template = "{% set markers = '[TOOL_CALLS][ARGS]' %}" + HERMES
    folder = write_model(tmp_path, template=template)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    backend.save(str(folder / "tokenizer.json"))
    text = Tokenizer.from_folder(folder)
    begin, between = (text.control_tokens[name] for name in ("[TOOL_CALLS]", "[ARGS]"))

    def script(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
        tokens = [*ids("a"), 1, begin, *ids("weather"), between, *ids('{"city": "Paris"}'), EOS]
        update = BranchUpdate(branch=0, tokens=tokens, time_s=1.0, ending=ending("stop", len(tokens)))
        return [[update]]

    api = Api(script, text=text)
    body = {"messages": ASKED, "tools": [TOOL], "tool_choice": "required"}
    message = api.ask(CHAT, body)["choices"][0]["message"]
    assert message["content"] == "a", "other special tokens are left out"
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert len(call["id"]) == 9
    found = structure_of(api)
    assert found is not None and f"<[{begin}]>" in found.source and f"<[{between}]>" in found.source


# ---------------------------------------------------------------- Anthropic


def test_a_message_with_a_tool() -> None:
    api = tool_api(said(THOUGHT, CALL))
    found = api.ask(MESSAGES, {"max_tokens": 99, "messages": ASKED, "tools": [THEIRS]})
    thinking, use = found["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert found["stop_reason"] == "tool_use"
    from anthropic.types import Message

    Message.model_validate(found)


@pytest.mark.parametrize("cut", [letters, lambda text: [text]])
def test_a_message_with_tools_as_it_comes(cut: Any) -> None:
    body = {"max_tokens": 999, "messages": ASKED, "tools": [THEIRS]}
    data = tool_api(said(*cut(THOUGHT + "So: " + CALL + CALL))).stream(MESSAGES, body)
    found = [event for event in chunks(data) if event["type"] != "ping"]
    begun = [(event["index"], event["content_block"]["type"]) for event in found if "content_block" in event]
    assert begun == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use")]
    deltas: dict[int, str] = {}
    for event in found:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
            deltas[event["index"]] = deltas.get(event["index"], "") + delta[kind[delta["type"]]]
    assert deltas == {0: "Hm.", 1: "So: ", 2: '{"city": "Paris"}', 3: '{"city": "Paris"}'}
    order = [event["type"] for event in found if event["type"] != "content_block_delta"]
    assert order == [
        *("message_start", *["content_block_start", "content_block_stop"] * 4),
        *("message_delta", "message_stop"),
    ]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"


def test_results_sent_back_by_anthropic_clients() -> None:
    api = tool_api()
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}
    turns = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, use]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "c1", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    api.ask(
        MESSAGES, {"max_tokens": 9, "messages": turns, "tools": [THEIRS], "thinking": {"type": "disabled"}}
    )
    prompt = prompt_of(api)
    assert '<think>Hm.</think>c1={"name": "weather", "arguments": {"city": "Oslo"}}' in prompt
    results = "<|start|>tool\nsunny<|end|>\n<|start|>tool\nerror<|end|>\n"
    assert results + "<|start|>user\nand?<|end|>" in prompt
    assert prompt.endswith("<think></think>")


@pytest.mark.parametrize(
    ("choice", "is_free"),
    [({"type": "auto"}, True), ({"type": "any"}, False), ({"type": "tool", "name": "weather"}, False)],
)
def test_the_choice_of_anthropic_clients(choice: dict[str, Any], is_free: bool) -> None:
    api = tool_api()
    thinking = {"type": "enabled", "budget_tokens": 2_000}
    body = {
        "max_tokens": 9,
        "messages": ASKED,
        "tools": [THEIRS],
        "tool_choice": choice,
        "thinking": thinking,
    }
    api.ask(MESSAGES, body)
    found = structure_of(api)
    assert found is not None and ("until_marker" in found.source) is is_free
    assert (found.after, found.within) == ("</think>", 2_000)


# ---------------------------------------------------------------- Responses


def test_a_response_with_a_call() -> None:
    api = tool_api(said(THOUGHT, "So: ", CALL))
    found = api.ask(RESPONSES, {"input": "hi", "tools": [FLAT], "reasoning": {"effort": "low"}})
    reasoning, message, call = found["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "So: "
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        "weather",
        '{"city": "Paris"}',
    )
    assert (found["status"], found["tools"], found["reasoning"]["effort"]) == ("completed", [FLAT], "low")
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert structure_of(api) is not None and structure_of(api).within == 1_024  # type: ignore[union-attr]
    from openai.types.responses import Response

    Response.model_validate(found)


@pytest.mark.parametrize("cut", [letters, lambda text: [text]])
def test_a_response_with_calls_as_it_comes(cut: Any) -> None:
    data = tool_api(said(*cut(THOUGHT + "So: " + CALL))).stream(RESPONSES, {"input": "hi", "tools": [FLAT]})
    found = chunks(data)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert [kind for kind in kinds if not kind.endswith(".delta")] == [
        *("created", "in_progress"),
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ),
        *(
            "output_item.added",
            "content_part.added",
            "output_text.done",
            "content_part.done",
            "output_item.done",
        ),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    for stream, whole in (
        ("reasoning_text", "Hm."),
        ("output_text", "So: "),
        ("function_call_arguments", '{"city": "Paris"}'),
    ):
        pieces = [event["delta"] for event in found if event["type"] == f"response.{stream}.delta"]
        assert "".join(pieces) == whole
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert found[-1]["response"]["output"] == done
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    for event in found:
        TypeAdapter(ResponseStreamEvent).validate_python(event)


CUSTOM = {"type": "custom", "name": "run", "description": "runs code"}
RUN = '<tool_call>{"name": "run", "arguments": {"input": "print(\\"x\\")"}}</tool_call>'


def test_a_custom_tool_takes_a_text() -> None:
    found = tool_api(said(RUN)).ask(RESPONSES, {"input": "hi", "tools": [CUSTOM]})
    (item,) = found["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "run", 'print("x")')
    events = chunks(tool_api(said(*letters(RUN))).stream(RESPONSES, {"input": "hi", "tools": [CUSTOM]}))
    told = [(event["type"].removeprefix("response."), event) for event in events]
    deltas = [event["delta"] for kind, event in told if kind == "custom_tool_call_input.delta"]
    assert deltas == ['print("x")']
    assert [event["input"] for kind, event in told if kind == "custom_tool_call_input.done"] == ['print("x")']
    api = tool_api()
    form = {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}
    api.ask(RESPONSES, {"input": "hi", "tools": [{**CUSTOM, "format": form}]})
    found_rules = structure_of(api)
    assert found_rules is not None and "^(?:[a-z]+)$" in found_rules.source


def test_a_custom_tool_of_a_chat() -> None:
    body = {"messages": ASKED, "tools": [{"type": "custom", "custom": {"name": "run"}}, TOOL]}
    message = tool_api(said(RUN + CALL)).ask(CHAT, body)["choices"][0]["message"]
    custom, function = message["tool_calls"]
    assert custom["type"] == "custom" and custom["custom"] == {"name": "run", "input": 'print("x")'}
    assert function["type"] == "function" and json.loads(function["function"]["arguments"]) == {
        "city": "Paris"
    }
    events = chunks(tool_api(said(*letters(RUN + CALL))).stream(CHAT, body))
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    first = [call for call in calls if call["index"] == 0]
    assert [call["custom"] for call in first] == [{"name": "run", "input": ""}, {"input": 'print("x")'}]
    assert "".join(call["function"]["arguments"] for call in calls if call["index"]) == '{"city": "Paris"}'
    api = tool_api()
    answered = [message, {"role": "tool", "tool_call_id": custom["id"], "content": "x"}]
    api.ask(CHAT, {**body, "messages": [*ASKED, *answered]})
    assert f'{custom["id"]}={{"name": "run", "arguments": {{"input": "print(\\"x\\")"}}' in prompt_of(api)
    bad = {"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}
    with pytest.raises(InvalidRequest, match=r"tool_calls\[0\] must be an object with a custom"):
        api.ask(CHAT, {**body, "messages": [*ASKED, bad]})


def test_outputs_sent_back_by_responses_clients() -> None:
    api = tool_api()
    items = [
        *ASKED,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "x"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "5"},
    ]
    api.ask(RESPONSES, {"input": items, "tools": [FLAT, CUSTOM]})
    prompt = prompt_of(api)
    assert (
        '<think>Hm.</think>c1={"name": "weather", "arguments": {"city": "Oslo"}' in prompt
        and 'c2={"name": "run", "arguments": {"input": "x"}' in prompt
    )
    assert "<|start|>tool\nsunny<|end|>\n<|start|>tool\n5<|end|>" in prompt


def test_the_arguments_of_a_call_are_json() -> None:
    found = tool_api(said(CALL)).ask(CHAT, {"messages": ASKED, "tools": [TOOL]})
    arguments = found["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"city": "Paris"}
