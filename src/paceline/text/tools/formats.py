"""How families of models write tool calls: one row each. The scanner and the grammar writer know nothing else of them.

A row says what stands around the calls and what a call looks like. White space at the edges of these texts is what a
model is asked to write; a reader accepts any. A further family with one of these shapes is a further row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial

from paceline.errors import ConfigError

AUTO, NONE = "auto", "none"  # of the options: by the chat template; not at all


class Shape(Enum):
    """What one call looks like."""

    JSON = "an object with the name and the arguments"
    NAME_THEN_JSON = "the name, then an object of arguments"
    PYTHONIC = "a Python call with keyword arguments"
    XML = "a tag with the name, and a tag for each parameter"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """begin opens (call_begin name between arguments call_end) separator (...) closes end."""

    name: str
    aliases: tuple[str, ...] = ()  # other names of vLLM's --tool-call-parser
    tells: tuple[str, ...] = ()  # a chat template that has all of these is of this family
    shape: Shape = Shape.JSON
    begin: str = ""
    end: str = ""
    is_bare: bool = False  # an answer that is nothing but calls may leave `begin` and `end` out
    opens: str = ""
    closes: str = ""
    separator: str = "\n"
    is_shared: bool = False  # one `begin` and `end` for all calls, not for each
    arguments: str = "arguments"  # the key of them, in an object
    call_begin: str = ""
    between: str = ""
    call_end: str = ""
    id_chars: int = 0  # ids of calls are this number of letters and digits; 0: as OpenAI writes them

    @property
    def marker(self) -> str:
        """What tells a reader that calls begin."""
        return self.begin.strip()

    @property
    def first(self) -> str:
        """The first character of calls without their markers."""
        return self.opens or "{"

    def texts(self) -> Iterator[str]:
        """Everything around names and arguments."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, str) and each.name not in ("name", "arguments"):
                yield value


_TAGGED = partial(ToolFormat, begin="<tool_call>\n", end="\n</tool_call>")
_LISTED = partial(ToolFormat, opens="[", closes="]", separator=", ", is_shared=True)
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_WITH_NAMES = partial(
    ToolFormat, shape=Shape.NAME_THEN_JSON, begin=_DEEPSEEK, end="<｜tool▁calls▁end｜>", is_shared=True
)

# The first row that fits a template is taken, so a row stands before those that ask for less.
FORMATS = (
    _TAGGED(
        name="qwen3_coder",
        aliases=("qwen3_xml",),
        tells=("<tool_call>", "<function="),
        shape=Shape.XML,
    ),
    _WITH_NAMES(
        name="deepseek_v3",
        tells=(_DEEPSEEK, "```json"),
        call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        between="\n```json\n",
        call_end="\n```<｜tool▁call▁end｜>",
    ),
    _WITH_NAMES(
        name="deepseek_v31",
        aliases=("deepseek_v32",),
        tells=(_DEEPSEEK,),
        call_begin="<｜tool▁call▁begin｜>",
        between="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        separator="",
    ),
    ToolFormat(
        name="mistral_args",
        aliases=("mistral",),
        tells=("[TOOL_CALLS]", "[ARGS]"),
        shape=Shape.NAME_THEN_JSON,
        begin="[TOOL_CALLS]",
        between="[ARGS]",
        separator="",
        id_chars=9,
    ),
    _LISTED(
        name="mistral",
        tells=("[TOOL_CALLS]",),
        begin="[TOOL_CALLS]",
        id_chars=9,
    ),
    _LISTED(
        name="granite",
        tells=("<|tool_call|>",),
        begin="<|tool_call|>",
    ),
    _TAGGED(
        name="hermes",
        aliases=("qwen", "granite4"),
        tells=("<tool_call>",),
    ),
    _LISTED(
        name="llama4_pythonic",
        tells=("<|python_start|>",),
        shape=Shape.PYTHONIC,
        begin="<|python_start|>",
        end="<|python_end|>",
        is_bare=True,
    ),
    ToolFormat(
        name="llama3_json",
        aliases=("llama4_json",),
        tells=("<|python_tag|>",),
        begin="<|python_tag|>",
        is_bare=True,
        separator="; ",
        is_shared=True,
        arguments="parameters",
    ),
    _LISTED(
        name="pythonic",
        tells=("func_name1(",),  # as these models are told to write calls
        shape=Shape.PYTHONIC,
        is_bare=True,
    ),
    _LISTED(
        name="phi4_mini_json",
        tells=("functools",),
        begin="functools",
    ),
    _LISTED(
        name="phi4_mini_json",
        tells=("<|tool|>",),
        begin="functools",
    ),
    # For every other model: the tools and this form are written into the system message.
    _TAGGED(
        name="generic",
    ),
)


def format_names() -> tuple[str, ...]:
    """Every name of a format that `--tool-call-parser` takes."""
    return tuple(dict.fromkeys(name for row in FORMATS for name in (row.name, *row.aliases)))


def detected_format(template: str) -> ToolFormat:
    """The family of a model by its chat template."""
    return next(row for row in FORMATS if all(text in template for text in row.tells))


def named_format(name: str, template: str) -> ToolFormat | None:
    """The format that an operator chose. Of several under one name, the template decides; none for "none"."""
    if name == NONE:
        return None
    if name == AUTO:
        return detected_format(template)
    found = [row for row in FORMATS if name in (row.name, *row.aliases)]
    if not found:
        known = ", ".join((AUTO, NONE, *format_names()))
        raise ConfigError(f"--tool-call-parser: there is no {name!r}; there are {known}")
    return next((row for row in found if all(text in template for text in row.tells)), found[-1])


def marker_ids(texts: Iterator[str], control: Mapping[str, int]) -> frozenset[int]:
    """The control tokens among these texts: they stay in the text of an answer, which leaves others out."""
    joined = "\0".join(texts)
    return frozenset(token for text, token in control.items() if text in joined)
