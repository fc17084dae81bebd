"""Tools and reasoning through `LLM`: a tiny random model, and SmolLM2 where it is on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline import LLM, SamplingParams
from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.llm.outputs import RequestOutput
from tests.cases import first
from tests.model_folder import write_model
from tests.torch.gguf_reference import smollm2_path
from tests.torch.llm_helpers import OPTIONS

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "units": {"enum": ["C", "F"]},
    },
    "required": ["city", "units"],
    "additionalProperties": False,
}
SEARCH: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 1},
        "exact": {"type": "boolean"},
    },
    "required": ["query", "tags"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "search": SEARCH}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does it", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
QUESTIONS = (
    "What is the weather in Paris?",
    "Search for flights to Oslo.",
    "Is it warm in Rome?",
    "Find llamas.",
)
SMOLLM2 = smollm2_path()


def checked_calls(outputs: list[RequestOutput]) -> set[str]:
    """The names that were called; every answer is calls and every call is valid."""
    names = set()
    for output in outputs:
        (answer,) = output.outputs
        assert answer.tool_calls and not answer.text and answer.finish_reason == "stop", answer
        for call in answer.tool_calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            names.add(call.name)
    return names


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM2 is None or not SMOLLM2.exists(), reason="SmolLM2 is not on this machine")
@pytest.mark.parametrize("number", first(1, [8, 100]))
def test_calls_of_smollm2_are_valid(number: int) -> None:
    llm = LLM(str(SMOLLM2), max_model_len=2048)
    chats = [[{"role": "user", "content": QUESTIONS[index % 4]}] for index in range(number)]
    params = [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=1_500) for index in range(len(chats))
    ]
    required = llm.chat(chats, params, tools=TOOLS, tool_choice="required", use_tqdm=False)
    assert checked_calls(required) == set(SCHEMAS)
    named = {"type": "function", "function": {"name": "get_weather"}}
    chosen = llm.chat(chats, params, tools=TOOLS, tool_choice=named, use_tqdm=False)
    assert checked_calls(chosen) == {"get_weather"}


def test_a_budget_of_reasoning_is_kept_to_the_token(tmp_path: Path) -> None:
    """A model that reasons unless told otherwise: its reasoning ends at the budget, and the form holds behind it."""
    template = (
        "{% for message in messages %}{{ '<|start|>' + message['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\n<think>' }}{% else %}</think>{% endif %}"
    )
    folder = write_model(tmp_path, template=template, max_position_embeddings=512)
    llm = LLM(str(folder), **OPTIONS)
    read = llm._front.read_chat
    for budget in (0, 1, 7, 20):
        from paceline.text.dialect import Thinking

        asked = SamplingParams(
            max_tokens=60, temperature=1, seed=1, structured_outputs=Structure.named("regex", "[ab]{3}")
        )
        prepared = read([{"role": "user", "content": "x"}], asked, thinking=Thinking(budget=budget))
        (answer,) = llm._run([prepared], None, use_tqdm=False)[0].outputs
        marker = len("</think>")
        assert answer.num_reasoning_tokens == budget + marker, answer
        assert answer.text.strip("ab") == "" and len(answer.text) == 3
        assert len(answer.token_ids) == budget + marker + 3


def test_tools_that_are_wrong_are_refused(tmp_path: Path) -> None:
    llm = LLM(str(write_model(tmp_path)), **OPTIONS)
    with pytest.raises(InvalidRequest, match="tool_choice asks for a call"):
        llm.chat([{"role": "user", "content": "x"}], tool_choice="required")
    broken = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}},
    }
    with pytest.raises(InvalidRequest, match="the parameters of the tool f: .*strin") as refused:
        llm.chat([{"role": "user", "content": "x"}], tools=[broken], tool_choice="required")
    assert refused.value.param == "tools"
