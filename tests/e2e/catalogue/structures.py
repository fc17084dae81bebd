"""Entry 96: forms of the answer that do not compile, allow nothing, take too long or contradict each other."""

from __future__ import annotations

import json
from typing import Any

from paceline.core.structure import MAX_DEPTH, MAX_SOURCE_BYTES
from tests.e2e.catalogue.entry import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    OK,
    RESPONSES,
    VALUE,
    Answer,
    Entry,
    asking,
    posting,
)
from tests.e2e.http_server import Reply

NUMBER = 96
TOO_COMPLEX = (400, "grammar_too_complex")
TOO_DEEP = (400, "too_deep")
# A check is ended after a second; a process that replaces another takes a moment to start.
CHECK_SECONDS = 12.0
# Each pattern of keys is compared with each other one: this would take many seconds.
ENDLESS = {
    "type": "object",
    "patternProperties": {f"^p{number}[a-z]+": {"type": "string"} for number in range(400)},
}
PICTURE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

BAD_SCHEMAS: list[Any] = [
    *({"type": "strin"}, {"type": 5}, {"type": []}, {"properties": []}, {"required": "a"}, {"enum": 5}),
    *({"$ref": "#"}, {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:1/"}, {"$ref": "file:///etc/passwd"}),
    *({"type": "string", "pattern": bad} for bad in ("(?=a)", "(?<!a)b", "[", "(a)\\1", "(" * 3000)),
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    # Nothing satisfies these.
    *(False, {"enum": []}, {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"anyOf": []}),
    *({"type": "integer", "minimum": 2, "maximum": 1}, {"type": "string", "minLength": 2, "maxLength": 1}),
    *({"type": "object", "properties": {"a": False}, "required": ["a"]}, {"const": 1, "type": "string"}),
    *({"multipleOf": 0}, {"type": "string", "pattern": "a", "maxLength": 0}),
]
BAD_REGEXES = ["(" * 30_000, "a(?=b)", "(a)\\1", "[", "*", "\\", "(?P<", "a{2,1}"]
BAD_GRAMMARS = [
    *("root ::= (", "root ::= root", "start: missing", 'start: start "a"', "begin: /a/", "start: /[/"),
    *("{}", "\0", "start: <[99999999999999999999]>", "start: %json {", "start: <|im_end|>", "start: <[3]>"),
]
BAD_TAGS: list[Any] = [
    *({}, {"structures": []}, {"structures": [{}], "triggers": ["a"]}, {"format": 5}, {"format": {}}),
    {"structures": [{"begin": "a", "schema": {"type": "x"}, "end": ""}], "triggers": ["a"]},
    {"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]},
    {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}},
]


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    """OpenAI's object around a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def refused(route: str, changes: dict[str, Any], *answers: Answer) -> Entry:
    return asking(NUMBER, route, changes, *(answers or (VALUE,)), seconds=CHECK_SECONDS, check=is_short)


def is_short(reply: Reply) -> bool:
    """The field, and at most 300 characters of the compiler's words."""
    return len(reply.json["error"]["message"]) <= 340


def shapes() -> list[Entry]:
    """What is no form at all."""
    formats: list[Any] = [
        *({}, {"type": "other"}, {"type": 5}, {"type": ["text"]}, "json", 5, [], True),
        *({"type": "json_schema"}, {"type": "json_schema", "json_schema": 5}),
        *({"type": "json_schema", "json_schema": {"name": "x"}}, schema_format(5), schema_format("{}")),
        *(schema_format({}, strict="yes"), schema_format({}, strict=1), schema_format([])),
    ]
    others: list[Any] = [
        *(
            {},
            {"xml": "a"},
            {"json": {}, "regex": "a"},
            {"regex": 5},
            {"regex": ""},
            {"json": "{"},
            {"json": 5},
        ),
        *({"choice": []}, {"choice": [""]}, {"choice": "a"}, {"choice": [1]}, {"json_object": False}, 5, "a"),
        *({"regex": "a", "disable_any_whitespace": True}, {"structural_tag": 5}, {"grammar": ""}),
    ]
    inside: list[Any] = [5, {"format": 5}, {"format": {}}, {"other": 1}]
    cases: list[tuple[str, str, list[Any]]] = [
        (CHAT, "response_format", formats),
        (COMPLETIONS, "response_format", formats),
        (CHAT, "structured_outputs", others),
        (CHAT, "guided_choice", [[], [""], "a", [1], {}]),
        (CHAT, "guided_json", [5, [], "{"]),
        (CHAT, "json_schema", [5, [], "{"]),
        (CHAT, "ebnf", ["", 5]),
        (COMPLETIONS, "grammar", ["", {}]),
        (RESPONSES, "text", [*inside, {"format": {"type": "json_schema", "schema": 5}}]),
        (MESSAGES, "output_config", inside),
        (MESSAGES, "output_format", [5, {}, {"type": "json_schema"}]),
    ]
    return [refused(route, {field: value}) for route, field, values in cases for value in values]


def sources() -> list[Entry]:
    """What does not compile, or allows no answer."""
    flat = [{"type": "json_schema", "schema": schema} for schema in BAD_SCHEMAS[:4]]
    unknown: list[Any] = [{"not": {}}, {"format": "x"}]
    cases: list[tuple[str, str, list[Any]]] = [
        (CHAT, "response_format", [schema_format(schema) for schema in BAD_SCHEMAS]),
        (CHAT, "response_format", [schema_format(schema, strict=True) for schema in BAD_SCHEMAS + unknown]),
        (COMPLETIONS, "guided_regex", BAD_REGEXES),
        (CHAT, "structured_outputs", [{"grammar": grammar} for grammar in BAD_GRAMMARS]),
        (CHAT, "structured_outputs", [{"structural_tag": tags} for tags in BAD_TAGS]),
        (RESPONSES, "text", [{"format": form} for form in flat]),
        (MESSAGES, "output_config", [{"format": form} for form in flat]),
    ]
    return [
        *(refused(route, {field: value}) for route, field, values in cases for value in values),
        posting(NUMBER, "half a pair", CHAT, b'{"guided_regex": "\\ud800"}', (400, "invalid_unicode")),
    ]


def sizes() -> list[Entry]:
    """Too large, too deep, too slow."""
    large = {"enum": ["x" * 100] * (MAX_SOURCE_BYTES // 100)}
    both: list[dict[str, Any]] = [
        *({"response_format": schema_format(schema)} for schema in (large, ENDLESS)),
        *({"guided_json": large}, {"guided_regex": "a" * (MAX_SOURCE_BYTES + 1)}),
        {"guided_json": json.dumps(nested(MAX_DEPTH + 1))},
        {"structured_outputs": {"choice": ["x" * 100 + str(number) for number in range(1000)]}},
        {"guided_grammar": "start: " + "(" * 30_000},
        {"guided_grammar": f"start: %json {json.dumps(ENDLESS)}"},
    ]
    return [
        *(refused(CHAT, changes, TOO_COMPLEX) for changes in both),
        refused(CHAT, {"response_format": schema_format(nested(MAX_DEPTH + 1))}, TOO_DEEP, TOO_COMPLEX),
        refused(RESPONSES, {"text": {"format": {"type": "json_schema", "schema": ENDLESS}}}, TOO_COMPLEX),
        refused(MESSAGES, {"output_format": {"type": "json_schema", "schema": ENDLESS}}, TOO_COMPLEX),
    ]


def together() -> list[Entry]:
    form = {"type": "json_object"}
    return [
        refused(CHAT, {"response_format": form, "structured_outputs": {"regex": "a"}}),
        refused(CHAT, {"guided_json": {}, "guided_regex": "a"}),
        refused(MESSAGES, {"output_config": {"format": form}, "output_format": form}),
        refused(CHAT, {"response_format": form, "ignore_eos": True}),
    ]


def accepted() -> list[Entry]:
    text = {"type": "text"}
    return [
        asking(NUMBER, route, changes, OK, seconds=CHECK_SECONDS)
        for route, changes in (
            (CHAT, {"response_format": text}),
            (CHAT, {"response_format": {"type": "json_object"}}),
            (CHAT, {"response_format": schema_format(PICTURE, strict=True)}),
            (COMPLETIONS, {"response_format": schema_format({"not": {}})}),
            (COMPLETIONS, {"structured_outputs": {"json": PICTURE, "disable_any_whitespace": True}}),
            (COMPLETIONS, {"structured_outputs": {"regex": "[ab]{3}"}, "response_format": text}),
            (CHAT, {"guided_choice": ["a", "b"], "guided_decoding_backend": "xgrammar"}),
            (CHAT, {"guided_grammar": 'root ::= "a" | "b"'}),
            (CHAT, {"guided_json": json.dumps(PICTURE)}),
            (CHAT, {"regex": "a|b"}),
            (COMPLETIONS, {"grammar": 'root ::= "a" | "b"'}),
            (RESPONSES, {"text": {"format": text, "verbosity": "low"}}),
            (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": PICTURE}}}),
            (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": PICTURE}}}),
            (MESSAGES, {"output_format": {"type": "json_schema", "schema": PICTURE}}),
        )
    ]


ENTRIES = [*shapes(), *sources(), *sizes(), *together(), *accepted()]
