"""Chat messages: what is accepted, what it becomes, and how a mistake is named."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.text.messages import MAX_MESSAGES, normalize_messages, normalize_tools


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert normalize_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "a\nb\nc"}
    ]


def test_fields_nobody_reads_are_dropped() -> None:
    message = {"role": "user", "content": "x", "name": "ann", "weight": 3, "audio": None}
    assert normalize_messages([message]) == [{"role": "user", "content": "x", "name": "ann"}]


def test_tool_calls_have_arguments_as_objects() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": [1, "x"]}'}}]
    (message,) = normalize_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    function = {"name": "find", "arguments": {"q": [1, "x"]}}
    assert message == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "id": "c1", "function": function}],
    }


def test_reasoning_goes_by_one_name() -> None:
    (message,) = normalize_messages([{"role": "assistant", "content": "x", "reasoning": "y"}])
    assert message["reasoning_content"] == "y"


def call(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "a list"),
        ("text", "a list"),
        ([], "at least one"),
        ([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "at most"),
        (["text"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role must be one of"),
        ([{"role": "endoftext", "content": "x"}], r"role must be one of"),
        ([{"role": ["user"], "content": "x"}], r"role must be one of"),
        ([{"role": "user"}], r"content must be a string"),
        ([{"role": "user", "content": 1}], r"content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\].*type .text."),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            r"content\[0\]\.text must be a string",
        ),
        ([{"role": "user", "content": "x", "name": 1}], r"name must be a string"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "must be a list"),
        ([{"role": "assistant", "tool_calls": [1]}], "with a function"),
        ([call("{")], "not valid JSON"),
        ([call("[" * 100_000)], "not valid JSON"),
        ([call("[1]")], "must be a JSON object"),
        ([call({"a": object()})], "holds a object"),
    ],
)
def test_mistakes_are_named_by_their_place(messages: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        normalize_messages(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("tools", "problem"), [({}, "a list"), ([1], "a list"), ([{1: 2}], "key"), ([{"a": {1}}], "set")]
)
def test_tools_are_json_objects(tools: object, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        normalize_tools(tools)


def test_deep_data_is_refused() -> None:
    deep: object = 1
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested deeper"):
        normalize_tools([{"a": deep}])
