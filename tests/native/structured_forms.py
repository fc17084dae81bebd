"""Forms of answers with every keyword of a schema that is kept to, patterns, grammars and choices, and their judges.

All of them are bounded, so that a model that says nothing sensible comes to an end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema

from paceline.core.structure import Structure

Judge = Callable[[str], bool]
WORD = {"type": "string", "maxLength": 8}
LETTERS = {"type": "string", "pattern": "^[a-z]{1,6}$"}
FEW = {"type": "integer", "minimum": 0, "maximum": 99}
LEAF: dict[str, Any] = {"enum": ["a", 1, None]}
ODD_NAMES = {"with space": FEW, 'quote"d': LEAF, "$ref": LEAF, "": LEAF}
# Each with a pattern that is as strict as the name promises for any month.
_DATE, _TIME = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])", r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?"
_ZONE, _BYTE = r"([Zz]|[-+]\d\d:\d\d)", r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
FORMATS = {
    "date": _DATE,
    "time": _TIME + _ZONE,
    "date-time": f"{_DATE}[Tt]{_TIME}{_ZONE}",
    "duration": r"P(?=.)(\d+W|(\d+[YMD])*(T(\d+[HMS])+)?)",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": r"[0-9a-fA-F:.]{2,45}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[^@\s]+@[^@\s]+",
    "hostname": r"[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?",
    "uri": r"[A-Za-z][-+.A-Za-z0-9]*:\S*",
}


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: list[Any] = [
    *({"type": "boolean"}, {"type": "null"}, FEW, WORD, LETTERS, LEAF, {"const": {"a": [1, "x"]}}),
    *({"enum": ["é", 'a"b', "c\\d", "tab\t"]}, {"type": ["null", "boolean"]}, {"const": "only"}),
    # Strings.
    *({"type": "string", "minLength": low, "maxLength": low + 3} for low in (0, 1, 5)),
    *(
        {"type": "string", "pattern": p}
        for p in ("^a{2,4}$", "^(x|yz)-\\d{3}$", "^[^a-z]{1,5}$", "^\\w{1,5}$")
    ),
    *({"type": "string", "format": name} for name in FORMATS),
    {"type": "string", "pattern": "^[ab]+$", "maxLength": 6},
    # Numbers.
    *(
        {"type": "integer", "minimum": low, "maximum": high}
        for low, high in ((-5, 5), (100, 999), (-20, -10))
    ),
    *(
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
        {"type": "integer", "enum": [7, 77]},
    ),
    {"type": "integer", "minimum": 0, "maximum": 500, "multipleOf": 25},
    {"type": "number", "enum": [0.5, 1, -2.25]},
    {"type": "number", "minimum": 0, "maximum": 2, "multipleOf": 0.25},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    # Lists.
    *({"type": "array", "items": FEW, "minItems": low, "maxItems": low + 2} for low in (0, 1, 3)),
    {"type": "array", "prefixItems": [FEW, LETTERS], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "head"}], "items": LEAF, "minItems": 1, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": LEAF, "maxItems": 2}, "maxItems": 2},
    {"type": "array", "items": False},
    # Objects.
    *(
        record(a=FEW),
        record(a=LETTERS, b=FEW, c=LEAF),
        record([], a=FEW, b=LEAF),
        record(["b"], a=FEW, b=LEAF),
    ),
    record(outer=record(inner=record(leaf=LEAF))),
    {**record(), "properties": ODD_NAMES, "required": list(ODD_NAMES)},
    {"type": "object", "additionalProperties": False},
    record(items={"type": "array", "items": record(name=LETTERS, count=FEW), "minItems": 1, "maxItems": 2}),
    {**record(kind={"const": "x"}), "minProperties": 1},
    {
        "type": "object",
        "properties": {"a": LEAF},
        "additionalProperties": FEW,
        "required": ["a"],
        "maxProperties": 2,
    },
    {
        "type": "object",
        "patternProperties": {"^k[0-9]$": LEAF},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    # Several ways.
    *({"anyOf": [FEW, LETTERS, {"type": "null"}]}, {"oneOf": [{"type": "boolean"}, LETTERS]}),
    {"anyOf": [record(kind={"const": "a"}, x=FEW), record(kind={"const": "b"}, y=LETTERS)]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"allOf": [record(["a"], a=FEW, b=LEAF), {"required": ["b"]}]},
    {"type": "string", "anyOf": [{"maxLength": 2}, {"pattern": "^long$"}]},
    # References.
    {"$defs": {"few": FEW}, **record(a={"$ref": "#/$defs/few"}, b={"$ref": "#/$defs/few"})},
    {"definitions": {"leaf": LEAF}, "type": "array", "items": {"$ref": "#/definitions/leaf"}, "maxItems": 2},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": LETTERS}, "$ref": "#/$defs/a"},
    record(a={"$ref": "#/properties/b"}, b=FEW),
    {
        "$defs": {"node": record(["value"], value=LEAF, next={"anyOf": [{"type": "null"}, LEAF]})},
        "$ref": "#/$defs/node",
    },
    # As people write them.
    record(
        sentiment={"enum": ["good", "bad"]},
        score={"type": "integer", "minimum": 1, "maximum": 5},
        is_spam={"type": "boolean"},
    ),
    record(name={"const": "get_weather"}, arguments=record(city=LETTERS, unit={"enum": ["C", "F"]})),
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "description": "d",
        **record(a=FEW),
    },
    {
        **record(
            day={"type": "string", "format": "date"}, tags={"type": "array", "items": LETTERS, "maxItems": 2}
        )
    },
]
REGEXES = [
    *(
        r"\d{3}",
        r"[a-z]{2,5}",
        r"(ab|cd){1,3}",
        r"x?y?z",
        r"\d{4}-\d{2}-\d{2}",
        r"[A-Z][a-z]{1,8}",
        r"a{0,4}b",
    ),
    *(
        r"(yes|no|maybe)",
        r"\(\d{2}\) \d{3}",
        r"[0-9a-f]{8}",
        r"#[0-9a-fA-F]{6}",
        r"\w{1,6}@\w{1,6}\.(com|org)",
    ),
    *(r"-?(0|[1-9]\d{0,3})(\.\d{1,2})?", r"[^\n]{1,12}", r"a/b/\d", r"\"[^\"\n]{0,6}\"", r"(a|b)(c|d)(e|f)"),
    *(r"[ \t]{1,3}end", r"v\d{1,2}\.\d{1,2}", r"(\d{1,3}\.){3}\d{1,3}"),
]


def _nested(part: str, whole: str) -> Judge:
    """A language with brackets inside of brackets: its parts become T, the innermost first, until none is left."""

    def judge(text: str) -> bool:
        while (shorter := re.sub(part, "T", text)) != text:
            text = shorter
        return re.fullmatch(whole, text) is not None

    return judge


CSV = r"[a-z0-9]{1,4};[a-z0-9]{1,4}(\n[a-z0-9]{1,4};[a-z0-9]{1,4}){0,2}"
# Each with a pattern for the same language, or how to judge it.
GRAMMARS: list[tuple[str, str, str | Judge]] = [
    ("lark", 'start: "a" | "b" start2\nstart2: "c"', r"a|bc"),
    ("lark", 'start: NUM ("," NUM){0,3}\nNUM: /[0-9]{1,2}/', r"\d{1,2}(,\d{1,2}){0,3}"),
    (
        "lark",
        'start: greeting " " NAME\ngreeting: "hi" | "bye"\nNAME: /[A-Z][a-z]{1,4}/',
        r"(hi|bye) [A-Z][a-z]{1,4}",
    ),
    ("gbnf", 'root ::= "yes" | "no"', r"yes|no"),
    ("gbnf", "root ::= item item?\nitem ::= [a-c] [0-9]", r"([a-c]\d){1,2}"),
    ("gbnf", 'root ::= "(" digits ")"\ndigits ::= [0-9] [0-9]?', r"\(\d\d?\)"),
    ("gbnf", 'root ::= [a-z]{1,4} "=" ("on" | "off") "\\n"?', r"[a-z]{1,4}=(on|off)\n?"),
    ("lark", 'start: row ("\\n" row){0,2}\nrow: CELL ";" CELL\nCELL: /[a-z0-9]{1,4}/', CSV),
    ("lark", 'start: "(" start? ("x" | "y"){1,2} ")"', _nested(r"\(T?[xy]{1,2}\)", "T")),
    (
        "gbnf",
        'root ::= term ("+" term){0,2}\nterm ::= [1-9] | "(" root ")"',
        _nested(r"[1-9]|\(T(\+T){0,2}\)", r"T(\+T){0,2}"),
    ),
]
CHOICES = [["left", "right"], ["a", "ab", "abc"], ["only"], ["two words", "three more words", "é"]]


def _valid(schema: Any) -> Judge:
    checker = jsonschema.FormatChecker(formats=())
    for name, pattern in FORMATS.items():
        checker.checks(name)(_matches(pattern))
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)

    def judge(text: str) -> bool:
        return bool(validator.is_valid(json.loads(text)))

    return judge


def _matches(pattern: str | Judge) -> Judge:
    return (lambda text: re.fullmatch(pattern, text) is not None) if isinstance(pattern, str) else pattern


def forms(*, compact: bool) -> list[tuple[Structure, Judge]]:
    """Every form and whether a text has it."""
    found: list[tuple[Structure, Judge]] = []
    for schema in SCHEMAS:
        found.append((Structure.of({"json": schema, "disable_any_whitespace": compact}), _valid(schema)))
    found += [(Structure(kind="regex", source=regex), _matches(regex)) for regex in REGEXES]
    found += [(Structure(kind=kind, source=source), _matches(regex)) for kind, source, regex in GRAMMARS]
    found += [(Structure.of({"choice": choice}), set(choice).__contains__) for choice in CHOICES]
    return found
