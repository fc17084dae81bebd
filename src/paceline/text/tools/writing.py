"""Calls and tools as text for models whose chat template has no place for them.

The tools are described in the system message, with the form of a call by the model's row of the table; calls and
results of earlier turns become content of ordinary messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.text.messages import Message
from paceline.text.tools.formats import Shape, ToolFormat
from paceline.text.tools.use import ToolUse

RESULT_ROLES = ("tool", "function")


def written_calls(row: ToolFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls as a model of this family writes them."""
    texts = [_call(row, name, arguments) for name, arguments in calls]
    if row.is_shared:
        return f"{row.begin}{row.opens}{row.separator.join(texts)}{row.closes}{row.end}"
    return row.separator.join(f"{row.begin}{text}{row.end}" for text in texts)


def _call(row: ToolFormat, name: str, arguments: Mapping[str, Any]) -> str:
    if row.shape is Shape.JSON:
        return json.dumps({"name": name, row.arguments: arguments}, ensure_ascii=False)
    if row.shape is Shape.NAME_THEN_JSON:
        written = json.dumps(arguments, ensure_ascii=False)
        return f"{row.call_begin}{name}{row.between}{written}{row.call_end}"
    if row.shape is Shape.PYTHONIC:
        pairs = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
        return f"{name}({', '.join(pairs)})"
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<function={name}>\n{parameters}</function>"


def tool_instructions(row: ToolFormat, use: ToolUse) -> str:
    """What a model is told about its tools."""
    tools = "\n".join(json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in use.tools)
    example = written_calls(row, [("function_name", {"argument": "value"})])
    return (
        "You can call functions. They are, as JSON with a schema of their arguments:\n"
        f"<tools>\n{tools}\n</tools>\n"
        f"To call one, write exactly this with the function's own name and arguments:\n{example}"
    )


def with_instructions(messages: Sequence[Message], text: str, *, takes_system: bool) -> list[Message]:
    """The conversation with the text in its system message, or in its first one where there is no such role."""
    found = list(messages)
    first = found[0] if found else {}
    if first.get("role") in ("system", "developer") or not takes_system:
        content = first.get("content") or ""
        found[:1] = [{**first, "content": f"{content}\n\n{text}" if takes_system else f"{text}\n\n{content}"}]
        return found
    return [{"role": "system", "content": text}, *found]


def without_calls(messages: Sequence[Message], row: ToolFormat) -> list[Message]:
    """The conversation with calls and their results as content; results of one turn become one message."""
    found: list[Message] = []
    is_result = False
    for message in messages:
        was_result, is_result = is_result, message["role"] in RESULT_ROLES
        if is_result:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if was_result:
                found[-1]["content"] = f"{found[-1]['content']}\n{text}"
            else:
                found.append({"role": "user", "content": text})
        elif "tool_calls" in message:
            found.append({"role": message["role"], "content": _with_calls(message, row)})
        else:
            found.append(message)
    return found


def _with_calls(message: Message, row: ToolFormat) -> str:
    calls: Any = message["tool_calls"]
    pairs = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "\n".join(
        text for text in (message["content"], written_calls(row, pairs)) if isinstance(text, str)
    )
