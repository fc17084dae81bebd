"""Entries 70 to 82: conversations and tools, on every route that takes them."""

from __future__ import annotations

from typing import Any

from tests.e2e.catalogue.entry import (
    CHAT,
    CONTEXT_LENGTH,
    COUNT,
    MESSAGES,
    MODALITY,
    OK,
    RESPONSES,
    TOKENIZE,
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


def tools() -> list[Entry]:
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schemas: list[Any] = [
        {"$ref": "#"},
        {"type": "stsring"},
        {"type": "string", "pattern": "(a+)+$"},
        {"enum": ["x"] * 10_000},
    ]
    given: list[Any] = [
        *("x", {}, 5, [function], [function] * 129, [{"type": "function", "function": {"name": "a b"}}]),
        *([{"type": "function", "function": {"name": "f", "parameters": schema}}] for schema in schemas),
    ]
    return [
        *(
            asking(81, route, {"tools": value}, UNSUPPORTED)
            for route in (CHAT, MESSAGES, RESPONSES, COUNT)
            for value in given
        ),
        *(asking(81, route, {"tools": []}, OK) for route in (CHAT, MESSAGES, RESPONSES)),
        *(asking(81, route, {"tools": [function], "tool_choice": "none"}, OK) for route in (CHAT, RESPONSES)),
        *(asking(81, CHAT, {"tools": value, "tool_choice": "none"}, UNSUPPORTED) for value in NO_TOOLS),
        asking(81, MESSAGES, {"tools": [function], "tool_choice": {"type": "none"}}, OK),
        conversation(81, CHAT, [*calling("{}"), {"role": "tool", "tool_call_id": "c1", "content": "7"}], OK),
        asking(81, CHAT, {"functions": [function]}, UNSUPPORTED),
        *(conversation(81, CHAT, calling(value), VALUE, CONTEXT_LENGTH) for value in NO_ARGUMENTS),
        conversation(81, CHAT, calling('{"a": NaN}'), OK, VALUE),
        conversation(81, CHAT, calling({"a": "<|end|>"}), OK),
        *(conversation(81, CHAT, [{"role": "assistant", "tool_calls": value}], VALUE) for value in NO_CALLS),
        *asking_each(
            82,
            CHAT,
            "tool_choice",
            ["required", {"type": "function", "function": {"name": "x"}}, 5],
            UNSUPPORTED,
        ),
        asking(82, MESSAGES, {"tool_choice": {"type": "any"}}, UNSUPPORTED),
        *asking_each(82, CHAT, "tool_choice", ["none", "auto"], OK),
    ]


ENTRIES = [*shapes(), *modalities(), *counts(), *templates(), *tools()]
