"""Which tools a request brings and what it says about calling them: one value, however an API spells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.text.messages import INPUT

MAX_TOOLS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function a model may call. A custom tool takes one text: it is called with an object that holds it."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any]  # a JSON schema of an object
    strict: bool = False  # its arguments follow the schema whenever it is called
    is_custom: bool = False

    def for_template(self) -> dict[str, Any]:
        """In OpenAI's shape, which chat templates are written for."""
        parameters = {**self.parameters, "properties": self.parameters.get("properties", {})}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request and how they may be called."""

    tools: tuple[Tool, ...]  # all that the model is shown
    callable_names: frozenset[str]  # those it may call now
    is_required: bool = False  # the answer consists of calls
    is_parallel: bool = True  # several calls in one answer

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.callable_names)

    @property
    def follows_schemas(self) -> bool:
        """Whether arguments of some call follow their schema, and not only JSON."""
        return self.is_required or any(tool.strict for tool in self.callable_tools)

    def is_custom(self, name: str) -> bool:
        return any(tool.is_custom for tool in self.tools if tool.name == name)


def text_input(arguments: str) -> str:
    """What a custom tool was called with."""
    try:
        given = json.loads(arguments or "{}").get(INPUT, "")
    except ValueError:  # the answer broke off inside
        return ""
    return given if isinstance(given, str) else ""
