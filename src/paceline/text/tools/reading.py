"""Tools and the choice between them, as the APIs spell them, into one value.

Chat nests a function in its tool, Responses writes it flat, Anthropic calls its schema `input_schema`. Everything wrong
is an InvalidRequest that names its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import GrammarTooComplex, InvalidRequest
from paceline.text.messages import INPUT, plain_json
from paceline.text.tools.use import MAX_TOOLS, Tool, ToolUse

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
NAME_MUST = "1 to 128 letters, digits, dots, dashes and underscores"
Json = Mapping[str, Any]


class UnsupportedTool(InvalidRequest):
    """A tool that is no function."""

    code = "unsupported_parameter"


def read_openai_tools(given: Json) -> ToolUse | None:
    """Tools of chat and Responses; None where there are none to call."""
    wanted = given.get("tool_choice", "auto")
    tools = _tools(given.get("tools") or (), _openai_tool)
    if isinstance(wanted, str):
        if wanted not in ("none", "auto", "required"):
            raise _refused_choice(wanted)
        mode, names = wanted, None
    elif wanted.get("type") == "allowed_tools":
        inner = wanted.get("allowed_tools", wanted)  # Responses writes it flat
        inner = inner if isinstance(inner, Mapping) else {}
        mode, listed = inner.get("mode", "auto"), inner.get("tools")
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            message = "tool_choice.allowed_tools takes a mode (auto or required) and a list of tools"
            raise InvalidRequest(message, param="tool_choice")
        names = [_chosen_name(each) for each in listed]
    else:  # this call, and no other
        return _use(tools, "required", [_chosen_name(wanted)], is_parallel=False)
    return _use(tools, mode, names, is_parallel=given.get("parallel_tool_calls", True))


def read_anthropic_tools(given: Json) -> ToolUse | None:
    tools = _tools(given.get("tools") or (), _anthropic_tool)
    wanted = given.get("tool_choice", {"type": "auto"})
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    modes = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in modes:
        raise InvalidRequest('tool_choice.type must be "auto", "any", "tool" or "none"', param="tool_choice")
    alone = wanted.get("disable_parallel_tool_use", False)
    if type(alone) is not bool:
        raise InvalidRequest(
            "tool_choice.disable_parallel_tool_use must be true or false", param="tool_choice"
        )
    names = [_chosen_name(wanted)] if kind == "tool" else None
    return _use(tools, modes[kind], names, is_parallel=names is None and not alone)


def _use(
    tools: tuple[Tool, ...], mode: str, names: Sequence[str] | None, *, is_parallel: bool
) -> ToolUse | None:
    known = {tool.name for tool in tools}
    if not tools and mode == "required":
        message = "tool_choice asks for a call, but the request has no tools; send tools or leave it out"
        raise InvalidRequest(message, param="tool_choice")
    for name in names or ():
        if name not in known:
            message = f"tool_choice names {name!r:.140}, which is none of the tools"
            raise InvalidRequest(message, param="tool_choice")
    if not tools or mode == "none":
        return None
    return ToolUse(
        tools=tools,
        callable_names=frozenset(known if names is None else names),
        is_required=mode == "required",
        is_parallel=is_parallel,
    )


def _chosen_name(value: Any) -> str:
    """The name in a choice: `{"type": "function", "function": {"name": ...}}`, or flat."""
    if isinstance(value, Mapping):
        inner = value.get("function", value.get("custom", value))
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if isinstance(name, str):
            return name
    raise _refused_choice(value)


def _refused_choice(value: Any) -> InvalidRequest:
    message = f'tool_choice must be "none", "auto", "required" or an object that names a function, not {value!r:.60}'
    return InvalidRequest(message, param="tool_choice")


def _tools(listed: Sequence[Any], read: Any) -> tuple[Tool, ...]:
    if len(listed) > MAX_TOOLS:
        raise GrammarTooComplex(f"tools takes at most {MAX_TOOLS} entries, not {len(listed)}", param="tools")
    found: list[Tool] = []
    for index, value in enumerate(listed):
        place = f"tools[{index}]"
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{place} must be an object", param="tools")
        found.append(read(value, place))
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools has two of the name {twice}; each needs its own", param="tools")
    return tuple(found)


def _openai_tool(value: Json, place: str) -> Tool:
    kind = value.get("type", "function")
    if kind not in ("function", "custom"):
        message = f"{place} is of type {kind!r:.40}, which is not supported; send functions"
        raise UnsupportedTool(message, param="tools")
    inner = value.get(kind, value)  # Responses writes it flat
    if not isinstance(inner, Mapping):
        raise InvalidRequest(f"{place}.{kind} must be an object", param="tools")
    if kind == "custom":
        return _custom_tool(inner, place)
    return _tool(inner, inner.get("parameters"), place)


def _anthropic_tool(value: Json, place: str) -> Tool:
    if value.get("type") not in (None, "custom"):
        message = f"{place} is of type {value['type']!r:.40}, which is not supported; send tools with an input_schema"
        raise UnsupportedTool(message, param="tools")
    if not isinstance(value.get("input_schema"), Mapping):
        raise InvalidRequest(f"{place}.input_schema must be a JSON schema of an object", param="tools")
    return _tool(value, value["input_schema"], place)


def _custom_tool(value: Json, place: str) -> Tool:
    """A tool that takes a text, with a pattern for it or without."""
    form = value.get("format") or {"type": "text"}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "grammar"):
        raise InvalidRequest(f"{place}.format must be of type text or grammar", param="tools")
    taken: dict[str, Any] = {"type": "string"}
    if form["type"] == "grammar":
        inner = form.get("grammar", form)
        inner = inner if isinstance(inner, Mapping) else {}
        if inner.get("syntax") != "regex":
            message = f"{place}.format takes a grammar of syntax regex; others are not supported"
            raise UnsupportedTool(message, param="tools")
        taken["pattern"] = f"^(?:{_text(inner.get('definition'), f'{place}.format.definition')})$"
    schema = {
        "type": "object",
        "properties": {INPUT: taken},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return _tool({**value, "strict": "pattern" in taken}, schema, place, is_custom=True)


def _tool(value: Json, schema: Any, place: str, *, is_custom: bool = False) -> Tool:
    name, strict = value.get("name"), value.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"the name of {place} must be {NAME_MUST}", param="tools")
    description = value.get("description")
    if description is not None:
        description = _text(description, f"{place}.description")
    if schema is not None and not isinstance(schema, Mapping):
        raise InvalidRequest(f"the parameters of {place} must be a JSON schema of an object", param="tools")
    if strict is not None and type(strict) is not bool:
        raise InvalidRequest(f"{place}.strict must be true or false", param="tools")
    if schema is None:
        schema = {"type": "object", "properties": {}}  # a function without arguments
    plain: Any = plain_json(schema, f"the parameters of {place}", "tools")
    if plain.setdefault("type", "object") != "object":
        raise InvalidRequest(f"the parameters of {place} must be of type object", param="tools")
    return Tool(
        name=name, description=description or "", parameters=plain, strict=bool(strict), is_custom=is_custom
    )


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{place} must be a text", param="tools")
    return value
