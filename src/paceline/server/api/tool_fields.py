"""The fields about tools and reasoning, and what they say about reasoning; tools are read in `text.tools.reading`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidRequest
from paceline.server.api.fields import FLAG, Field, choice, shaped, whole
from paceline.server.api.limits import RequestLimits
from paceline.text.dialect import DEFAULT_THINKING, Thinking
from paceline.text.tools.use import MAX_TOOLS

# Tokens of reasoning for each effort; None: as many as the model likes.
EFFORTS: dict[str, int | None] = {
    "none": 0,
    "minimal": 256,
    "low": 1_024,
    "medium": 4_096,
    "high": 16_384,
    "xhigh": 65_536,
    "max": None,
}
_TOOLS = shaped(
    (list,), "a list of tools", {"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS}
)
Json = Mapping[str, Any]


def openai_tool_fields() -> list[Field]:
    """Fields of a conversation whose answer may call tools."""
    modes = {"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, {"type": "object"}]}
    chosen = shaped((str, dict), "a text or an object", modes)
    return [
        Field("tools", _TOOLS, f"functions that the model may call, at most {MAX_TOOLS}"),
        Field("tool_choice", chosen, "none, auto, required, or one function; default: auto"),
        Field("parallel_tool_calls", FLAG, "whether one answer may hold several calls (default)"),
    ]


def anthropic_tool_fields() -> list[Field]:
    """The same as Anthropic has them, and its field about reasoning."""
    modes = _with_type("auto", "any", "tool", "none", name="string", disable_parallel_tool_use="boolean")
    kinds = _with_type("enabled", "adaptive", "disabled", budget_tokens="integer")
    return [
        Field("tools", _TOOLS, f"tools that the model may use, at most {MAX_TOOLS}"),
        Field("tool_choice", shaped((dict,), "an object", modes), "auto, any, tool or none; default: auto"),
        Field("thinking", shaped((dict,), "an object", kinds), "a budget of reasoning, or none of it"),
    ]


def _with_type(*kinds: str, **others: str) -> dict[str, Any]:
    """The schema of an object that has one of these types."""
    parts: dict[str, Any] = {name: {"type": kind} for name, kind in others.items()}
    parts["type"] = {"type": "string", "enum": list(kinds)}
    return {"type": "object", "properties": parts, "required": ["type"]}


def reasoning_fields(limits: RequestLimits) -> list[Field]:
    tokens = ", ".join(f"{name} {EFFORTS[name] or 'no limit'}" for name in ("low", "medium", "high", "max"))
    return [
        Field("reasoning_effort", choice(tuple(EFFORTS)), f"a budget of reasoning in tokens: {tokens}"),
        Field("thinking_token_budget", whole(0, limits.answer_tokens), "most tokens of reasoning"),
        Field("include_reasoning", FLAG, "whether the answer has its reasoning (default)"),
    ]


def read_thinking(given: Json) -> Thinking:
    """What chat and Responses say about reasoning."""
    effort = given.get("reasoning_effort")
    if effort is None and "thinking_token_budget" not in given and given.get("include_reasoning", True):
        return DEFAULT_THINKING
    budget = given.get("thinking_token_budget", None if effort is None else EFFORTS[effort])
    return Thinking(
        wanted=None if effort is None else effort != "none",
        budget=budget,
        hidden=not given.get("include_reasoning", True),
    )


def read_anthropic_thinking(given: Json) -> Thinking:
    """Anthropic's `thinking`."""
    value = given.get("thinking")
    if value is None:
        return DEFAULT_THINKING
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind == "disabled":
        return Thinking(wanted=False)
    is_budget = type(budget) is int and budget >= 1
    if kind not in ("enabled", "adaptive") or not (is_budget or (budget is None and kind == "adaptive")):
        message = 'thinking takes {"type": "enabled", "budget_tokens": N}, {"type": "adaptive"} or {"type": "disabled"}'
        raise InvalidRequest(message, param="thinking")
    return Thinking(wanted=True, budget=budget)
