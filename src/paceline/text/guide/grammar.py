"""A `Structure` as the text of a grammar that llguidance compiles.

The text is always a JSON list of grammars. The first is the answer as a whole; others have names, and Lark refers to
them with `@name`. Nothing here compiles, so that the check before admission and the engine write the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from paceline.core.structure import Structure
from paceline.errors import InvalidRequest

# Without a bound, models that lose their way write whitespace until their tokens are used up.
WHITESPACE = r"[ \n\t]{1,8}"
ANYTHING = r"/(.|\n)*/"
# Templates that open reasoning teach their models an empty line behind it.
AFTER_MARKER = r"/\n{0,2}/"
# What tokenizers make control tokens of: <tool_call>, <|python_tag|>, [TOOL_CALLS].
_CONTROL = re.compile(r"(<[^<>\s]+>|\[[A-Z_]+\])")

# The id of a marker that is one control token of the model, else None.
MarkerIds = Callable[[str], int | None]


def grammar_of(structure: Structure, marker_ids: MarkerIds) -> str:
    """The grammar of an answer: first reasoning up to the marker of `after`, if there is one, then the structure."""
    writer = _Writer(structure.strict, marker_ids)
    answer = writer.answer(structure.kind, structure.source)
    if structure.after:
        gap = "" if structure.kind == "text" else AFTER_MARKER
        answer = f"{writer.up_to(structure.after)} {gap} {answer}"
    return writer.grammar(answer)


class _Writer:
    """Collects the rules and the named grammars that an answer's rule refers to."""

    def __init__(self, strict: bool, marker_ids: MarkerIds) -> None:
        self._strict = strict
        self._marker_ids = marker_ids
        self._rules: list[str] = []
        self._named: list[dict[str, Any]] = []
        self._numbers: Iterator[int] = count(1)

    def grammar(self, start: str) -> str:
        whole = "\n".join([f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": whole}, *self._named]})

    def answer(self, kind: str, source: str) -> str:
        """What stands for a structure of this kind inside a rule."""
        match kind:
            case "json_schema":
                return self.schema(json.loads(source))
            case "json_object":
                return self.schema({"type": "object"})
            case "regex":
                return self.pattern(source)
            case "lark":
                return self.lark(source)
            case "gbnf":
                return self.lark(_lark_of_gbnf(source))
            case "choice":
                # One lexeme: as a rule, each choice would be an item of the parser, which has at most 2,000.
                return self.rule(" | ".join(map(json.dumps, json.loads(source))), lexeme=True)
            case "structural_tag":
                return self.tags(json.loads(source))
        return ANYTHING

    def schema(self, schema: Any) -> str:
        """A JSON value of this schema, with bounded whitespace, or none where the schema's own `x-guidance` says so."""
        rules = dict(schema) if isinstance(schema, dict) else {"anyOf": [schema]}
        asked = rules.get("x-guidance")
        compact = isinstance(asked, dict) and asked.get("whitespace_flexible") is False
        whitespace = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITESPACE}
        rules["x-guidance"] = {"lenient": not self._strict, **whitespace}
        return self._name({"json_schema": rules})

    def pattern(self, pattern: str) -> str:
        if not isinstance(pattern, str):
            raise _refused("a pattern is a text")
        escaped = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
        return "/" + escaped.replace("\n", r"\n") + "/"

    def lark(self, source: str) -> str:
        return self._name({"lark_grammar": source})

    def rule(self, body: str, *, lexeme: bool = False, lazy: bool = False) -> str:
        number = next(self._numbers)
        name = f"L{number}" if lexeme else f"r{number}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def literal(self, text: str) -> str:
        """This very text; markers that are control tokens of the model by their ids."""
        pieces = (self._piece(piece) for piece in _CONTROL.split(text) if piece)
        return " ".join(pieces) or '""'

    def up_to(self, marker: str) -> str:
        """Any text up to and with this one."""
        number = self._marker_ids(marker)
        if number is not None:
            return f"{ANYTHING} <[{number}]>"
        return self.rule(f"{ANYTHING} {json.dumps(marker)}", lazy=True)

    # Structural tags: free text in which a trigger begins a part with rules.

    def tags(self, tags: dict[str, Any]) -> str:
        """The older form, with `structures` and `triggers`, or the newer, with a `format`."""
        if "format" in tags:
            return self.format(tags["format"])
        pairs = [
            {**each, "content": {"type": "json_schema", "json_schema": each.get("schema", True)}}
            for each in _objects(tags, "structures")
        ]
        return self._triggered({"triggers": tags.get("triggers"), "tags": pairs})

    def format(self, form: Any, before: str = "") -> str:
        """A format of a structural tag. `before` is the text that ends it, where one follows at once."""
        if not isinstance(form, dict):
            raise _refused("a format is an object with a type")
        match form.get("type"):
            case "const_string":
                return self.literal(_text(form, "value"))
            case "json_schema":
                return self.schema(form.get("json_schema", True))
            case "regex":
                return self.pattern(_text(form, "pattern"))
            case "grammar":
                return self.lark(_lark_of_gbnf(_text(form, "grammar")))
            case "any_text":
                return ANYTHING if not before else self.up_to(before)
            case "sequence":
                *first, last = _objects(form, "elements")
                if any(each.get("type") == "any_text" for each in first):
                    raise _refused("any_text is the last element of a sequence, or the content of a tag")
                return " ".join([*(self.format(each) for each in first), self.format(last, before)])
            case "or":
                return "(" + " | ".join(self.format(each) for each in _objects(form, "elements")) + ")"
            case "tag":
                return self._tag(form)
            case "triggered_tags":
                return self._triggered(form)
            case "tags_with_separator":
                return self._separated(form)
        raise _refused(f"unknown format of a structural tag: {str(form.get('type'))[:40]!r}")

    def _tag(self, tag: dict[str, Any], skip: int = 0) -> str:
        """Begin (but for what its trigger has said already), content and end."""
        end = _text(tag, "end", empty=True)
        content = tag.get("content")
        begin = _text(tag, "begin")[skip:]
        parts = [self.literal(begin)] if begin else []
        parts.append(self.format(content, end))
        # Text without rules takes its end along.
        if end and not (isinstance(content, dict) and content.get("type") == "any_text"):
            parts.append(self.literal(end))
        return "(" + " ".join(parts) + ")"

    def _triggered(self, form: dict[str, Any]) -> str:
        """Text in which a trigger must go on as one of its tags, as often as the model likes."""
        triggers = form.get("triggers")
        if (
            not isinstance(triggers, list)
            or not triggers
            or not all(isinstance(t, str) and t for t in triggers)
        ):
            raise _refused("triggers is a list of texts, none of them empty")
        tags = _objects(form, "tags")
        calls = []
        for trigger in triggers:
            begun = [tag for tag in tags if _text(tag, "begin").startswith(trigger)]
            if begun:
                rest = " | ".join(self._tag(tag, len(trigger)) for tag in begun)
                calls.append(self.rule(f"{self.up_to(trigger)} ({rest})"))
        if any(not any(_text(tag, "begin").startswith(trigger) for trigger in triggers) for tag in tags):
            raise _refused("the begin of each structural tag starts with one of the triggers")
        some = "(" + " | ".join(calls) + ")"
        if form.get("stop_after_first"):
            return some if form.get("at_least_one") else f"({some} | {ANYTHING})"
        # The text at the end is a rule of its own: llguidance prefers a trigger inside it.
        return f"{some}{'+' if form.get('at_least_one') else '*'} {self.rule(ANYTHING)}"

    def _separated(self, form: dict[str, Any]) -> str:
        some = "(" + " | ".join(self._tag(tag) for tag in _objects(form, "tags")) + ")"
        between = _text(form, "separator", empty=True)
        more = "" if form.get("stop_after_first") else f"({self.literal(between) if between else ''} {some})*"
        return f"({some} {more})" + ("" if form.get("at_least_one") else "?")

    def _piece(self, piece: str) -> str:
        number = self._marker_ids(piece) if _CONTROL.fullmatch(piece) else None
        return json.dumps(piece) if number is None else f"<[{number}]>"

    def _name(self, grammar: dict[str, Any]) -> str:
        name = f"g{next(self._numbers)}"
        self._named.append({"name": name, **grammar})
        return f"@{name}"


def _lark_of_gbnf(source: str) -> str:
    """llama.cpp's notation, which llguidance can translate; Lark stays as it is."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(source))
    except Exception as error:  # its parser raises what it meets, also IndexError and RecursionError
        raise _refused(f"the grammar cannot be read: {error}") from error


def _objects(form: dict[str, Any], name: str) -> list[dict[str, Any]]:
    given = form.get(name)
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise _refused(f"{name} of a structural tag is a list of objects, not empty")
    return given


def _text(form: dict[str, Any], name: str, *, empty: bool = False) -> str:
    given = form.get(name, "" if empty else None)
    if not isinstance(given, str) or not (given or empty):
        raise _refused(f"{name} of a structural tag is a text")
    return given


def _refused(what: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs: {what}", param="structured_outputs")
