"""The grammar of answers with tool calls, for llguidance: the second reader of the table of formats.

Where calls are required, the answer is calls from its first token on. Otherwise it is free text up to the marker, and
from there on a call to one of the tools: a call that begins is a call that parses. JSON is written in the one form that
chat templates show to models, `{"a": 1, "b": 2}`. Markers that are control tokens are written by their id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.core.structure import MAX_SOURCE_BYTES, Structure
from paceline.errors import GrammarTooComplex, InvalidRequest
from paceline.text.tools.formats import Shape, ToolFormat
from paceline.text.tools.use import Tool, ToolUse

MAX_CALLS = 32  # in one answer
ANY_OBJECT = {"type": "object"}
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_AT_LINE = re.compile(r"tools: at (\d+)\(\d+\): (.*)", re.DOTALL)
_ANYTHING = r"/(.|\n)*/"
_VALUE_END = "\n</parameter>\n"
_DEFINITIONS = ("$defs", "definitions")
# Keywords of a schema that says nothing of arguments it does not name.
_PLAIN = {"type", "properties", "required", "title", "description", "$schema", *_DEFINITIONS}


def tool_structure(
    row: ToolFormat, use: ToolUse, control: Mapping[str, int], answer: Structure | None = None
) -> Structure:
    """The form of an answer with these tools; `answer`: what text must look like where no tool is called."""
    is_strict = any(tool.strict for tool in use.callable_tools)
    lines = _CallWriter(row, use, control).lines(_answer_rule(answer))
    try:
        return Structure(kind="lark", source="\n".join(lines) + "\n", strict=is_strict)
    except GrammarTooComplex:
        message = f"the schemas of the tools have more than {MAX_SOURCE_BYTES >> 10} KiB; send fewer or smaller ones"
        raise GrammarTooComplex(message, param="tools") from None


def with_tool_named(error: InvalidRequest, structure: Structure, use: ToolUse) -> InvalidRequest:
    """An error of such a form, which names the tool whose schema is wrong instead of a line that only we know."""
    found = _AT_LINE.match(str(error))
    if found is None:
        return error
    line = structure.source.splitlines()[int(found[1]) - 1]
    rule = re.match(r"arguments_(\d+):", line)
    about = f"the parameters of the tool {use.callable_tools[int(rule[1])].name}" if rule else "tools"
    return type(error)(f"{about}: {found[2]}", param=error.param)


def _answer_rule(answer: Structure | None) -> str:
    if answer is None or answer.kind == "text":
        return ""
    if answer.kind in ("json_object", "json_schema"):
        schema = ANY_OBJECT if answer.kind == "json_object" else json.loads(answer.source)
        rules = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        form = {**_JSON_FORM, "lenient": not answer.strict}
        return f"%json {json.dumps({**rules, 'x-guidance': form}, ensure_ascii=False)}"
    raise InvalidRequest(
        f"tools and an answer by {answer.kind} do not go together; send one of them, or a JSON schema",
        param="tools",
    )


class _CallWriter:
    def __init__(self, row: ToolFormat, use: ToolUse, control: Mapping[str, int]) -> None:
        self._row = row
        self._use = use
        self._control = {
            text: token for text, token in control.items() if any(text in t for t in row.texts())
        }
        self._rules: list[str] = []

    def lines(self, answer: str) -> list[str]:
        row, tools = self._row, self._use.callable_tools
        for index, tool in enumerate(tools):
            head, arguments, tail = self._call(tool, index)
            self._rules.append(f"call_{index}: {self._terms(head)} arguments_{index} {self._terms(tail)}")
            # One text with the bracket before it: a lexer takes the longest match, which would be free text.
            opened = self._terms(row.opens + head)
            self._rules.append(f"first_{index}: {opened} arguments_{index} {self._terms(tail)}")
            self._rules.append(f"arguments_{index}: {arguments}")
        marked = "calls" if row.is_bare else f"{self._terms(row.begin)} calls {self._terms(row.end)}"
        whole = [f"marked: {marked}"]
        one_after_another = "marked" if row.is_shared else f"marked {self._further('marked')}"
        if self._use.is_required:
            heads = [f"start: {one_after_another}", *whole]
        elif answer:
            heads = [f"start: answer | {one_after_another}", *whole, f"answer: {answer}"]
        else:
            heads = self._free_text()
        further = self._further("call") if row.is_shared else ""
        return [
            *("%llguidance {}", *heads),
            f"calls: ({self._either('first')}) {further} {self._terms(row.closes)}",
            f"call: {self._either('call')}",
            *self._rules,
        ]

    def _either(self, rule: str) -> str:
        return " | ".join(f"{rule}_{index}" for index, _ in enumerate(self._use.callable_tools))

    def _further(self, rule: str) -> str:
        """A rule some more times, where parallel calls are allowed."""
        if not self._use.is_parallel:
            return ""
        return f"({self._terms(self._row.separator)} {rule}){{0,{MAX_CALLS - 1}}}"

    def _free_text(self) -> list[str]:
        """Text in which calls may begin, or in which they stand alone."""
        row, use = self._row, self._use
        rest = f"{self._terms(row.begin.removeprefix(row.marker))} calls {self._terms(row.end)}"
        lines, ways = [], []
        if row.is_bare:
            lines.append(f"TEXT: {_ANYTHING} & ~/{self._bare_beginning()}(.|\\n)*/")
            ways.append("calls")
        else:
            lines.append(f"TEXT: {_ANYTHING}")
        if row.marker in self._control:
            ways.append(f"TEXT <[{self._control[row.marker]}]> {rest}")
        elif row.marker:
            lines.append(f"until_marker[lazy]: {_ANYTHING} {json.dumps(row.marker, ensure_ascii=False)}")
            ways.append(f"until_marker {rest}")
        if use.is_parallel and not row.is_shared:
            (way,) = ways
            return [f"start: ({way}){{0,{MAX_CALLS}}} TEXT", *lines]
        return [f"start: TEXT | {' | '.join(ways)}", *lines]

    def _bare_beginning(self) -> str:
        """A pattern for how an answer begins that is calls without markers."""
        blank = "[ \\t\\r\\n]*"
        if self._row.shape is Shape.PYTHONIC:
            names = "|".join(re.escape(tool.name) for tool in self._use.callable_tools)
            return f"{blank}\\[{blank}({names})\\("
        return f'{blank}\\{{{blank}"name"'

    def _call(self, tool: Tool, index: int) -> tuple[str, str, str]:
        """What stands before the arguments, the rule of them, and what stands behind."""
        row = self._row
        if row.shape is Shape.JSON:
            head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(row.arguments)}: '
            return head, self._json(tool), "}"
        if row.shape is Shape.NAME_THEN_JSON:
            return row.call_begin + tool.name + row.between, self._json(tool), row.call_end
        if row.shape is Shape.PYTHONIC:
            return tool.name + "(", self._keywords(tool, index), ")"
        return f"<function={tool.name}>\n", self._parameters(tool, index), "</function>"

    def _has_rules(self, tool: Tool) -> bool:
        return self._use.is_required or tool.strict

    def _json(self, tool: Tool) -> str:
        return self._value(_closed(tool.parameters) if self._has_rules(tool) else ANY_OBJECT, tool)

    def _value(self, schema: Any, tool: Tool) -> str:
        made = dict(schema) if isinstance(schema, Mapping) else {}
        made["x-guidance"] = {**_JSON_FORM, "lenient": not tool.strict}
        return f"%json {json.dumps(made, ensure_ascii=False)}"

    def _arguments(self, tool: Tool) -> list[tuple[str, Any, bool]]:
        """Names, schemas and whether they are required; definitions of the whole schema come along."""
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        needed = required if isinstance(required, list) else []
        shared = {name: tool.parameters[name] for name in _DEFINITIONS if name in tool.parameters}
        return [
            (name, {**schema, **shared} if isinstance(schema, Mapping) else {}, name in needed)
            for name, schema in (properties.items() if isinstance(properties, Mapping) else ())
        ]

    def _keywords(self, tool: Tool, index: int) -> str:
        """`a=1, b="x"`: in the order of the schema; what is not required may be left out."""
        if not self._has_rules(tool):
            self._rules.append(f"any_{index}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ ({self._python({}, tool)})")
            return f'(any_{index} (", " any_{index})*)?'
        # What stands after a first argument has a comma before it: `first` is all that may come first.
        return self._ordered(
            [
                (f"{self._terms(name + '=')} ({self._python(schema, tool)})", is_required)
                for name, schema, is_required in self._arguments(tool)
            ],
            f"list_{index}",
        )

    def _ordered(self, entries: list[tuple[str, bool]], name: str) -> str:
        """A list with commas of entries in order, some of which may be left out: a rule for every place."""
        for at in range(len(entries)):
            for has_before in (False, True):
                self._rules.append(f"{name}_{at}_{int(has_before)}: {_place(entries, at, name, has_before)}")
        return f"{name}_0_0" if entries else '""'

    def _python(self, schema: Any, tool: Tool) -> str:
        kind = schema.get("type")
        if kind == "boolean":
            return '"True" | "False"'
        if not kind and not schema:
            return f'{self._value(schema, tool)} | "True" | "False" | "None"'
        return self._value(schema, tool)

    def _parameters(self, tool: Tool, index: int) -> str:
        # Ends where the scanner ends it, with any white space before.
        self._rules.append(f'until_tag_{index}[lazy]: {_ANYTHING} "</parameter>"')
        self._rules.append(f'text_{index}: until_tag_{index} "\\n"')
        if not self._has_rules(tool):
            return f"(/<parameter=[^<>\\n]{{1,64}}>\\n/ text_{index})*"
        terms = []
        for name, schema, is_required in self._arguments(tool):
            one = f"{self._terms(f'<parameter={name}>' + chr(10))} {self._parameter(schema, tool, index)}"
            terms.append(one if is_required else f"({one})?")
        return " ".join(terms) or '""'

    def _parameter(self, schema: Any, tool: Tool, index: int) -> str:
        enum = schema.get("enum")
        if isinstance(enum, list) and enum and all(isinstance(each, str) and each for each in enum):
            return f"({' | '.join(map(self._terms, enum))}) {self._terms(_VALUE_END)}"
        if schema.get("type") == "string":
            return f"text_{index}"
        return f"{self._value(schema, tool)} {self._terms(_VALUE_END)}"

    def _terms(self, text: str) -> str:
        """A text as terms of a rule: control tokens in it by their ids."""
        pattern = "|".join(re.escape(each) for each in sorted(self._control, key=len, reverse=True))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(
            f"<[{self._control[part]}]>" if part in self._control else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that names its arguments, without others, unless it speaks of them: models would invent some."""
    properties, required = schema.get("properties"), schema.get("required") or ()
    if (
        not isinstance(properties, Mapping)
        or not set(schema) <= _PLAIN
        or not set(required) <= set(properties)
    ):
        return schema
    return {**schema, "additionalProperties": False}


def _place(entries: list[tuple[str, bool]], at: int, name: str, has_before: bool) -> str:
    entry, is_required = entries[at]
    taken = f'", " {entry}' if has_before else entry
    is_last = at + 1 == len(entries)
    with_it = taken if is_last else f"{taken} {name}_{at + 1}_1"
    if is_required:
        return with_it
    without = '""' if is_last else f"{name}_{at + 1}_{int(has_before)}"
    return f"{with_it} | {without}"


def behind_reasoning(structure: Structure | None, marker: str, budget: int | None) -> Structure | None:
    """A form that holds behind reasoning, which has a budget of tokens; None where neither is asked for."""
    if structure is None and budget is None:
        return None
    return replace(structure or Structure(kind="text"), after=marker, within=budget)
