"""Entries 70 to 82: conversations and tools, on every route that takes them."""

from __future__ import annotations

from typing import Any

from tests.e2e.catalogue.entry import (
    CHAT,
    COMPLETIONS,
    CONTEXT_LENGTH,
    COUNT,
    MESSAGES,
    MODALITY,
    OK,
    RESPONSES,
    TOKENIZE,
    TOO_COMPLEX,
    UNSUPPORTED,
    VALUE,
    Answer,
    Entry,
    asking,
    asking_each,
)
from tests.e2e.http_server import Reply

MOST_MESSAGES, MOST_NAME = 1_024, 256
CONVERSATIONS = {
    CHAT: "messages",
    MESSAGES: "messages",
    COUNT: "messages",
    RESPONSES: "input",
    TOKENIZE: "messages",
}

MISSING: tuple[Any, ...] = (..., None)
NO_LISTS: tuple[Any, ...] = ([], {}, 5, True)
NO_TURNS: tuple[Any, ...] = (
    *([123], [{}], [{"role": 1}], [None], ["x"], [[]]),
    [{"role": "boss", "content": "x"}],
)
NO_CONTENTS: tuple[Any, ...] = (
    *(5, True, {}, 1.5, [5], [None]),
    *([{"type": "text"}], [{"text": "x"}], [{"type": "text", "text": 5}]),
)
NO_ARGUMENTS: tuple[Any, ...] = (
    *('{"a": "\\ud800"}', "{", "[]", "5", 5, [], None),
    *('{"a":' * 33 + "1" + "}" * 33, "9" * 5000),
)
NO_TOOLS: tuple[Any, ...] = ("x", {}, 5)
NO_CALLS: tuple[Any, ...] = (5, [5], [{}], {}, [])


def conversation(number: int, route: str, turns: Any, *answers: Answer, **more: Any) -> Entry:
    changes = {CONVERSATIONS[route]: turns}
    return asking(number, route, changes | ({"prompt": ...} if route == TOKENIZE else {}), *answers, **more)


def on_all(number: int, turns: Any, *answers: Answer) -> list[Entry]:
    return [conversation(number, route, turns, *answers) for route in CONVERSATIONS]


def user(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content, **more}]


def calling(arguments: Any, **more: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}
    return [*user("hi"), {"role": "assistant", "tool_calls": [call]}]


def has_fixed_words(reply: Reply) -> bool:
    return b"words of the template" not in reply.body


def shapes() -> list[Entry]:
    return [
        *(entry for turns in NO_LISTS for entry in on_all(70, turns, VALUE)),
        *(
            conversation(70, route, turns, VALUE)
            for route in (CHAT, MESSAGES, COUNT)
            for turns in (*MISSING, "x")
        ),
        *(entry for turns in NO_TURNS for entry in on_all(71, turns, VALUE)),
        *(entry for content in NO_CONTENTS for entry in on_all(72, user(content), VALUE)),
        conversation(70, RESPONSES, None, VALUE),
        conversation(71, MESSAGES, [{"role": "system", "content": "x"}], VALUE),
        *asking_each(72, MESSAGES, "system", [5, []], VALUE),
        asking(72, RESPONSES, {"instructions": 5}, VALUE),
        *on_all(73, user(None), VALUE),
        *on_all(74, user([]), VALUE),
        *on_all(74, user([{"type": 5, "text": "x"}]), VALUE),
    ]


def modalities() -> list[Entry]:
    address = "http://127.0.0.1:9/x.png"
    parts = (
        {"type": "image_url", "image_url": {"url": address}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "../../etc/passwd"}},
        {"type": "image", "source": {"type": "url", "url": address}},
        {"type": "x" * 100_000},
    )
    return [
        *(
            entry
            for part in parts
            for entry in on_all(75, user([{"type": "text", "text": "hi"}, part]), MODALITY)
        ),
        *(conversation(75, route, user(f"![x]({address})"), OK) for route in CONVERSATIONS),
    ]


def counts() -> list[Entry]:
    short = [{"role": "user", "content": "x"}]
    return [
        # As many as allowed are more than this model's context holds, which is another refusal.
        *on_all(76, short * MOST_MESSAGES, CONTEXT_LENGTH),
        *on_all(76, short * (MOST_MESSAGES + 1), VALUE),
        *on_all(76, short * 50_000, VALUE),
        *(conversation(76, route, user("x", name="y" * MOST_NAME), OK) for route in (CHAT, TOKENIZE)),
        *(
            conversation(76, route, user("x", **{field: "y" * size}), VALUE)
            for route in (CHAT, TOKENIZE)
            for field in ("name", "tool_call_id")
            for size in (MOST_NAME + 1, 1_000_000)
        ),
        conversation(76, CHAT, user("x", name=5), VALUE),
        conversation(76, CHAT, [*user("x"), {"role": "tool", "tool_call_id": "<|end|>", "content": "y"}], OK),
        conversation(77, CHAT, [{"role": "system", "content": "x"}], OK),
        conversation(77, CHAT, [*user("x"), {"role": "assistant", "content": "a"}] * 2, OK),
        conversation(77, MESSAGES, [*user("x"), {"role": "assistant", "content": "a"}], OK),
        asking(
            77,
            CHAT,
            {"messages": user("x"), "continue_final_message": True, "add_generation_prompt": True},
            VALUE,
        ),
        asking(77, CHAT, {"messages": calling("{}"), "continue_final_message": True}, VALUE),
    ]


def templates() -> list[Entry]:
    syntax = "{{ 7*7 }}{% for x in range(9) %}y{% endfor %}{# z #}"
    return [
        *(
            conversation(78, route, user("please raise"), VALUE, check=has_fixed_words)
            for route in CONVERSATIONS
        ),
        asking(79, CHAT, {"chat_template": "{{ 7*7 }}"}, UNSUPPORTED),
        asking(79, CHAT, {"documents": [{"text": "x"}]}, UNSUPPORTED),
        *asking_each(
            79,
            CHAT,
            "chat_template_kwargs",
            [
                {"x": 1},
                {"x": "y"},
                {"messages": True},
                {"__class__": True},
                {"x": {}},
                [],
                "x",
                {"a" * 65: True},
            ],
            VALUE,
        ),
        *asking_each(79, CHAT, "chat_template_kwargs", [{"enable_thinking": False}, {}], OK),
        asking(79, CHAT, {"chat_template_kwargs": {f"x{i}": True for i in range(16)}}, OK),
        asking(79, CHAT, {"chat_template_kwargs": {f"x{i}": True for i in range(17)}}, VALUE),
        *asking_each(79, CHAT, "add_generation_prompt", ["yes", 1, {}], VALUE),
        asking(79, CHAT, {"add_generation_prompt": False}, OK),
        conversation(80, CHAT, user(syntax), OK),
        conversation(
            80, TOKENIZE, user(syntax), OK, check=lambda reply: reply.json["count"] == 19 + len(syntax)
        ),
        *(
            conversation(80, CHAT, [{"role": role, "content": "x"}], VALUE)
            for role in ("{{ 7 }}", "system|>", "")
        ),
    ]


def tool_for(route: str, name: Any = "f", schema: Any = None, **more: Any) -> dict[str, Any]:
    """A tool as the API of this route spells it."""
    given = {"type": "object"} if schema is None else schema
    if route in (MESSAGES, COUNT):
        return {"name": name, "input_schema": given, **more}
    inner = {"name": name, "parameters": given, **more}
    return {"type": "function", "function": inner} if route == CHAT else {"type": "function", **inner}


def tools() -> list[Entry]:
    routes = (CHAT, MESSAGES, RESPONSES, COUNT)
    no_lists: list[Any] = ["x", {}, 5, [5]]
    deep: Any = 1
    for _ in range(40):
        deep = {"a": deep}
    wrong = [
        *(("a b",), ("",), (5,), ("x" * 129,), ("f\n",), ('f"}',)),  # names
        *(("f", {"type": "array"}), ("f", 5), ("f", [1])),
    ]
    schemas: list[Any] = [
        {"$ref": "#"},
        {"properties": {"a": {"type": "stsring"}}},
        {"properties": {"a": {"type": "string", "pattern": "(a+)+$"}}},
        {"properties": {"a": {"enum": ["x"] * 1_000, "anyOf": 5, "type": [{}]}}},
    ]
    return [
        *(asking(81, route, {"tools": value}, VALUE) for route in routes for value in no_lists),
        *(asking(81, route, {"tools": [tool_for(route, *bad)]}, VALUE) for route in routes for bad in wrong),
        # Over a socket, the JSON is too deep before its fields are looked at.
        *(
            asking(
                81, route, {"tools": [tool_for(route, "f", {"properties": deep})]}, VALUE, (400, "too_deep")
            )
            for route in routes
        ),
        *(asking(81, route, {"tools": [tool_for(route, strict=5)]}, VALUE) for route in routes),
        *(asking(81, route, {"tools": [tool_for(route, description=5)]}, VALUE) for route in routes),
        *(asking(81, route, {"tools": [tool_for(route)] * 2}, VALUE) for route in routes),
        *(
            asking(81, route, {"tools": [tool_for(route, f"f{index}") for index in range(129)]}, TOO_COMPLEX)
            for route in routes
        ),
        *(asking(81, route, {"tools": [{"type": "web_search"}]}, UNSUPPORTED) for route in routes),
        # What a tool takes matters only where its schema is followed.
        *(
            asking(81, route, {"tools": [tool_for(route, "f", schema)]}, OK, CONTEXT_LENGTH)
            for route in routes
            for schema in schemas
        ),
        *(asking(81, route, {"tools": [tool_for(route)]}, OK) for route in routes),
        *(asking(81, route, {"tools": []}, OK) for route in (CHAT, MESSAGES, RESPONSES)),
        *(
            asking(81, route, {"tools": [tool_for(route)], "tool_choice": "none"}, OK)
            for route in (CHAT, RESPONSES)
        ),
        *(asking(81, CHAT, {"tools": value, "tool_choice": "none"}, VALUE) for value in NO_TOOLS),
        asking(81, MESSAGES, {"tools": [tool_for(MESSAGES)], "tool_choice": {"type": "none"}}, OK),
        asking(81, COMPLETIONS, {"tools": [tool_for(CHAT)]}, UNSUPPORTED),
        conversation(81, CHAT, [*calling("{}"), {"role": "tool", "tool_call_id": "c1", "content": "7"}], OK),
        asking(81, CHAT, {"functions": [tool_for(CHAT)]}, UNSUPPORTED),
        *(conversation(81, CHAT, calling(value), VALUE, CONTEXT_LENGTH) for value in NO_ARGUMENTS),
        conversation(81, CHAT, calling('{"a": NaN}'), OK, VALUE),
        conversation(81, CHAT, calling({"a": "<|end|>"}), OK),
        *(conversation(81, CHAT, [{"role": "assistant", "tool_calls": value}], VALUE) for value in NO_CALLS),
        *choices(),
        *reasoning(),
        *blocks(),
    ]


def choices() -> list[Entry]:
    named = {"type": "function", "function": {"name": "x"}}
    return [
        # A call is asked for and there is no tool, or another one.
        *asking_each(
            82, CHAT, "tool_choice", ["required", "any", named, 5, {}, {"type": "allowed_tools"}], VALUE
        ),
        *(
            asking(82, CHAT, {"tools": [tool_for(CHAT)], "tool_choice": value}, VALUE)
            for value in (named, "f")
        ),
        *asking_each(
            82, MESSAGES, "tool_choice", [{"type": "any"}, {"type": "tool", "name": "x"}, "auto"], VALUE
        ),
        *asking_each(82, RESPONSES, "tool_choice", ["required", {"type": "function", "name": "x"}], VALUE),
        asking(82, CHAT, {"tools": [tool_for(CHAT)], "parallel_tool_calls": "no"}, VALUE),
        asking(82, CHAT, {"tools": [tool_for(CHAT)], "tool_choice": "required"}, OK),
        *asking_each(82, CHAT, "tool_choice", ["none", "auto"], OK),
    ]


def reasoning() -> list[Entry]:
    """Budgets of reasoning; a model without it takes them and has no use for them."""
    return [
        *asking_each(82, CHAT, "reasoning_effort", ["most", 5, ""], VALUE),
        *asking_each(82, CHAT, "reasoning_effort", ["none", "low", "high"], OK),
        *asking_each(82, CHAT, "thinking_token_budget", [-1, 1.5, "x", 10**9], VALUE),
        *asking_each(82, CHAT, "thinking_token_budget", [0, 100], OK),
        *asking_each(82, CHAT, "include_reasoning", [5], VALUE),
        *asking_each(82, RESPONSES, "reasoning", [{"effort": "most"}, 5, {"effort": []}], VALUE),
        *asking_each(82, RESPONSES, "reasoning", [{}, {"effort": "low"}], OK),
        *asking_each(
            82,
            MESSAGES,
            "thinking",
            [5, {}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": -1}, {"type": "x"}],
            VALUE,
        ),
        *asking_each(
            82, MESSAGES, "thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 5}], OK
        ),
    ]


def blocks() -> list[Entry]:
    """Calls and their results as the other two APIs send them back."""
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
    wrong_uses = ({**use, "input": "x"}, {**use, "id": 5}, {**use, "name": None})
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "7"}
    wrong_calls = (
        {**call, "arguments": "{"},
        {**call, "arguments": 5},
        {**call, "name": 5},
        {**call, "call_id": 5},
    )
    return [
        conversation(
            82, MESSAGES, [*user("x"), {"role": "assistant", "content": [use]}, *user([result])], OK
        ),
        *(
            conversation(
                82, MESSAGES, [*user("x"), {"role": "assistant", "content": [bad]}, *user("y")], VALUE
            )
            for bad in wrong_uses
        ),
        conversation(82, MESSAGES, user([{**result, "tool_use_id": 5}]), VALUE),
        conversation(82, MESSAGES, user([{**result, "content": [{"type": "image"}]}]), MODALITY),
        conversation(82, MESSAGES, user([use]), MODALITY),
        conversation(82, RESPONSES, [*user("x"), call, output], OK),
        *(conversation(82, RESPONSES, [*user("x"), bad, output], VALUE) for bad in wrong_calls),
        conversation(82, RESPONSES, [*user("x"), call, {**output, "output": 5}], VALUE),
        conversation(82, RESPONSES, [{"type": "reasoning", "content": 5}, *user("x")], VALUE),
        conversation(82, RESPONSES, [{"type": "reasoning"}], VALUE),
        conversation(82, RESPONSES, [{"type": "web_search_call"}], UNSUPPORTED),
    ]


ENTRIES = [*shapes(), *modalities(), *counts(), *templates(), *tools()]
