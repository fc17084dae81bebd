"""Chat messages as a template sees them: checked, with plain values only.

Follows the OpenAI chat format. Unused fields are dropped, a list of text parts becomes one string, and the
arguments of a tool call become an object. Everything wrong is the request's fault and named by its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from paceline.errors import InvalidRequest, UnsupportedModality

# Templates write roles into their own markers (`<|` + role + `|>`), so a role is never free text.
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
INPUT = "input"  # the one argument of a custom tool, which takes a text
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_MESSAGES = 16_384
MAX_DEPTH = 32  # of tool definitions and arguments

Message = dict[str, object]


def normalize_messages(messages: object, *, takes_pictures: bool = False) -> list[Message]:
    """Messages for a template. Raises InvalidRequest that names the message and what is wrong with it.

    `takes_pictures`: a list of parts stays one, in which `{"type": "image"}` stands for a picture.
    """
    if not _is_list(messages) or not messages:
        raise InvalidRequest("messages must be a list with at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages are accepted", param="messages")
    return [_message(message, f"messages[{index}]", takes_pictures) for index, message in enumerate(messages)]


def normalize_tools(tools: object) -> list[object] | None:
    """Tool definitions for a template: JSON objects, passed on as they are."""
    if tools is None:
        return None
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest("tools must be a list of objects", param="tools")
    return [plain_json(tool, f"tools[{index}]", "tools") for index, tool in enumerate(tools)]


def plain_json(value: object, place: str, param: str, depth: int = 0) -> object:
    """A copy of JSON data made of exact JSON types, so that nothing with custom methods reaches a template."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{place} is nested deeper than {MAX_DEPTH} levels", param=param)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise InvalidRequest(f"{place} has a key that is not a string", param=param)
        return {key: plain_json(item, place, param, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item, place, param, depth + 1) for item in value]
    raise InvalidRequest(f"{place} holds a {type(value).__name__}, which is not JSON", param=param)


def _message(message: object, place: str, takes_pictures: bool) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{place} must be an object with role and content", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{place}.role must be one of {', '.join(ROLES)}", param="messages")
    found: Message = {"role": role}
    calls = message.get("tool_calls")
    if calls:
        found["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls")
    content = message.get("content")
    if takes_pictures and content and _is_list(content):
        found["content"] = [_shown(part, f"{place}.content[{at}]") for at, part in enumerate(content)]
    else:
        found["content"] = _content(content, f"{place}.content", may_be_absent=bool(calls))
    for field in ("name", "tool_call_id"):
        if message.get(field) is not None:
            found[field] = _text(message[field], f"{place}.{field}")
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        found["reasoning_content"] = _text(reasoning, f"{place}.reasoning_content")
    return found


def _content(content: object, place: str, *, may_be_absent: bool) -> str | None:
    if content is None and may_be_absent:
        return None
    if _is_list(content):
        return "\n".join(_part(part, f"{place}[{index}]") for index, part in enumerate(content))
    if isinstance(content, str):
        return str(content)
    raise InvalidRequest(f"{place} must be a string or a list of text parts", param="messages")


def _shown(part: object, place: str) -> dict[str, str]:
    """A part as templates of models with pictures know it."""
    if isinstance(part, Mapping) and part.get("type") == "image":
        return {"type": "image"}
    return {"type": "text", "text": _part(part, place)}


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in TEXT_PARTS:
        error = UnsupportedModality if isinstance(kind, str) else InvalidRequest
        raise error(f'{place} must be a part of type "text"; others are not supported', param="messages")
    return _text(part.get("text"), f"{place}.text")


def _tool_calls(calls: object, place: str) -> list[object]:
    if not _is_list(calls):
        raise InvalidRequest(f"{place} must be a list", param="messages")
    found: list[object] = []
    for index, call in enumerate(calls):
        kind = "custom" if isinstance(call, Mapping) and call.get("type") == "custom" else "function"
        called = call.get(kind) if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(called, Mapping):
            raise InvalidRequest(f"{place}[{index}] must be an object with a {kind}", param="messages")
        entry: dict[str, object] = {"type": "function"}
        if call.get("id") is not None:
            entry["id"] = _text(call["id"], f"{place}[{index}].id")
        name = _text(called.get("name"), f"{place}[{index}].{kind}.name")
        if kind == "custom":  # called with a text: templates know objects
            arguments: object = {INPUT: _text(called.get(INPUT), f"{place}[{index}].custom.input")}
        else:
            arguments = _arguments(called.get("arguments"), f"{place}[{index}].function.arguments")
        entry["function"] = {"name": name, "arguments": arguments}
        found.append(entry)
    return found


def _arguments(arguments: object, place: str) -> object:
    """An object; clients send it as the JSON text the model wrote."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{place} is not valid JSON", param="messages") from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{place} must be a JSON object", param="messages")
    return plain_json(arguments, place, "messages")


def _text(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{place} must be a string", param="messages")
    return str(value)


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
