"""Tools as text for models whose template has no place for them, and how answers are read."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.text.answer import AnswerForm, AnswerReader
from paceline.text.dialect import tool_instructions, with_instructions, without_calls, written_calls
from paceline.text.reasoning import REASONING, Reasoned
from paceline.text.tools.formats import FORMATS, ToolFormat
from paceline.text.tools.scanner import CallArguments, CallBegin, CallEnd, Said
from paceline.text.tools.use import Tool, ToolUse
from tests.pure.text.test_text_tools import cuts
from tests.pure.text.tool_fixtures import PARIS, SCHEMAS, TIME, calls_of, row_of, scanned

HERMES = row_of("hermes")


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_calls_are_written_as_they_are_read(row: ToolFormat) -> None:
    for calls in ([PARIS], [PARIS, TIME], [TIME, PARIS, PARIS]):
        text = written_calls(row, calls)
        assert calls_of(scanned(row.name, [text])) == calls, text


def test_a_model_is_told_about_its_tools() -> None:
    tools = tuple(Tool(name=name, parameters=schema) for name, schema in SCHEMAS.items())
    text = tool_instructions(HERMES, ToolUse(tools=tools, callable_names=frozenset(SCHEMAS)))
    assert '"name": "weather"' in text and '"name": "get.time"' in text
    assert '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>' in text


def test_earlier_calls_become_content() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "weather", "arguments": {"city": "a"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "So:", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "tool", "content": "2", "tool_call_id": "d"},
        {"role": "user", "content": "and?"},
    ]
    assert without_calls(messages, HERMES) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "So:\n" + written_calls(HERMES, [("weather", {"city": "a"})])},
        {
            "role": "user",
            "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
        },
        {"role": "user", "content": "and?"},
    ]
    assert messages[1]["tool_calls"], "what a caller gave is left as it is"


def test_instructions_go_into_the_system_message() -> None:
    user: dict[str, object] = {"role": "user", "content": "hi"}
    assert with_instructions([user], "T", takes_system=True) == [{"role": "system", "content": "T"}, user]
    system: dict[str, object] = {"role": "system", "content": "S"}
    assert with_instructions([system, user], "T", takes_system=True)[0]["content"] == "S\n\nT"
    assert with_instructions([user], "T", takes_system=False) == [{"role": "user", "content": "T\n\nhi"}]


def test_an_answer_has_all_three_parts_under_every_cut() -> None:
    text = "<think>Hm <tool_call>.</think>\n\nSo: " + written_calls(HERMES, [PARIS])
    form = AnswerForm(tools=HERMES, schemas=SCHEMAS, reasoning=REASONING[0])
    for pieces in [[text], *cuts(text, "answer")]:
        reader = AnswerReader(form)
        found = [event for piece in pieces for event in reader.push(piece)] + reader.flush()
        assert "".join(event.text for event in found if isinstance(event, Reasoned)) == "Hm <tool_call>."
        assert "".join(event.text for event in found if isinstance(event, Said)) == "So: "
        assert [event.name for event in found if isinstance(event, CallBegin)] == ["weather"]
        arguments = [event.text for event in found if isinstance(event, CallArguments)]
        assert "".join(arguments) == '{"city": "Paris", "days": 3}'
        assert found[-1] == CallEnd(0, True)
