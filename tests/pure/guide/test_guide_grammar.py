"""The grammar written for a structure accepts what it must, refuses the rest, and ends where the structure ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.text.guide.grammar import grammar_of

BYTES = LLTokenizer("byte")
# Of the byte tokenizer's control tokens.
MARKER = 258
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "name": {"type": "string"}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
COMPACT = {**POINT, "x-guidance": {"whitespace_flexible": False}}
TAGS = {
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "object"}, "end": "</f>"},
        {"begin": "<f=point>", "schema": COMPACT, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def no_markers(_: str) -> int | None:
    return None


def markers(marker: str) -> int | None:
    return MARKER if marker in ("</think>", "<tool_call>") else None


def matcher(structure: Structure, marker_ids: Any = no_markers) -> LLMatcher:
    made = LLMatcher(BYTES, grammar_of(structure, marker_ids), log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def taken(structure: Structure, *parts: str | int, marker_ids: Any = no_markers) -> tuple[int, bool]:
    """How many tokens of a text the grammar takes, and whether the answer may end there."""
    ids = [token for part in parts for token in ([part] if isinstance(part, int) else part.encode())]
    made = matcher(structure, marker_ids)
    return made.try_consume_tokens(ids) - len(ids), made.is_accepting()


ACCEPTED = (0, True)


def schema(value: Any, **more: Any) -> Structure:
    return Structure(kind="json_schema", source=json.dumps(value), **more)


def tag(form: Any) -> Structure:
    return Structure(kind="structural_tag", source=json.dumps({"type": "structural_tag", "format": form}))


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (schema(POINT), ['{"x":1,"name":"a"}', '{ "x": 1,\n\t"name": "a" }'], ['{"name":"a"}', "[1]", ""]),
        (schema(True), ["1", '{"a":[]}', "null"], ["nil"]),
        (schema({"enum": ["a", 3]}), ['"a"', "3"], ["4"]),
        (Structure(kind="json_object"), ["{}", '{"a": {"b": [1, null]}}'], ["[]", "1"]),
        (Structure(kind="regex", source=r"^\d{3}/[a-z]+$"), ["123/abc"], ["12/abc", "123/A"]),
        (Structure(kind="regex", source="a\\/b\n[/]"), ["a/b\n/"], ["a\\/b\n/"]),
        (Structure(kind="lark", source='start: "a" NUM\nNUM: /[0-9]+/'), ["a12"], ["b", "a"]),
        (Structure(kind="gbnf", source='root ::= "yes" | "no" [0-9]{2}'), ["yes", "no42"], ["no4"]),
        (Structure(kind="choice", source='["left", "le", "\\"q\\" é"]'), ["left", "le", '"q" é'], ["lef"]),
        (Structure(kind="text"), ["", "anything\n{"], []),
    ],
)
def test_each_kind(structure: Structure, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert taken(structure, text) == ACCEPTED, text
    for text in bad:
        assert taken(structure, text) != ACCEPTED, text


def test_whitespace_is_bounded_and_compact_has_none() -> None:
    assert taken(schema(POINT), "{" + " " * 8 + '"x"')[0] == 0
    assert taken(schema(POINT), "{" + " " * 200)[0] == 8 - 200
    assert taken(Structure(kind="json_object"), "{" + "\n" * 200)[0] == 8 - 200
    assert taken(schema(COMPACT), '{"x":1,"name":"a"}') == ACCEPTED
    assert taken(schema(COMPACT), "{ ")[0] == -1
    # What is forced is known: nothing but the name of the key can follow.
    assert matcher(schema(COMPACT)).compute_ff_bytes() == b'{"x":'


def test_a_request_cannot_loosen_the_rules_by_x_guidance() -> None:
    loose = {**POINT, "not": {}, "x-guidance": {"lenient": True, "whitespace_pattern": " *"}}
    assert taken(schema(loose), "{" + " " * 9)[0] == -1
    text = grammar_of(schema(loose, strict=True), no_markers)
    failed, notes = LLMatcher.validate_grammar_with_warnings(text)
    assert failed and "not" in notes[0]


def test_a_complete_structure_stops() -> None:
    made = matcher(schema(POINT))
    made.consume_tokens(list(b'{"x":1,"name":"a"}'))
    assert made.is_stopped() and not made.is_error()


def test_five_thousand_choices() -> None:
    many = Structure(kind="choice", source=json.dumps([f"n{i}" for i in range(5000)]))
    assert taken(many, "n4999") == ACCEPTED


def test_a_grammar_in_braces_is_lark_and_nothing_else() -> None:
    """llguidance takes a text that begins with a brace for its own JSON."""
    inner = json.dumps({"grammars": [{"lark_grammar": 'start: "x"'}]})
    text = grammar_of(Structure(kind="lark", source=inner), no_markers)
    assert LLMatcher.validate_grammar_with_warnings(text)[0]


@pytest.mark.parametrize("marker_ids", [no_markers, markers])
@pytest.mark.parametrize(
    ("structure", "answer"),
    [
        (schema(COMPACT, after="</think>"), '{"x":1,"name":"a"}'),
        (Structure(kind="choice", source='["a"]', after="</think>"), "a"),
        (Structure(kind="lark", source='start: "a"', after="</think>"), "a"),
        (Structure(kind="text", after="</think>"), "free {"),
    ],
)
def test_reasoning_comes_first(structure: Structure, answer: str, marker_ids: Any) -> None:
    end: str | int = "</think>" if marker_ids is no_markers else MARKER
    for gap in ("", "\n", "\n\n"):
        said = taken(structure, 'so: {"x" </thin', end, gap + answer, marker_ids=marker_ids)
        assert said == ACCEPTED
    assert taken(structure, "only thoughts", marker_ids=marker_ids) == (0, False)
    if structure.kind != "text":
        assert taken(structure, end, "wrong", marker_ids=marker_ids)[0] == -len("wrong")


def test_structural_tags_older_form() -> None:
    tags = Structure(kind="structural_tag", source=json.dumps(TAGS))
    assert taken(tags, "just text < f") == ACCEPTED
    call = 'call <f=point>{"x":1,"name":"a"}</f> and '
    assert taken(tags, call + call + "<f=add>{}</f>") == ACCEPTED
    assert taken(tags, "<f=other")[0] == -len("other")
    assert taken(tags, '<f=point>{"y"')[0] == -len('y"')


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"type": "const_string", "value": 'say "hi"'}, ['say "hi"'], ["say"]),
        (
            {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"},
            ["<a>x < y</a>", "<a></a>"],
            ["<a>x", "x"],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "regex", "pattern": "[0-9]+"},
                    {"type": "or", "elements": [{"type": "const_string", "value": w} for w in "ab"]},
                    {"type": "grammar", "grammar": 'root ::= "!" | "?"'},
                ],
            },
            ["12a!", "1b?"],
            ["a!", "1c!"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<c"],
                "tags": [
                    {"begin": "<c>", "content": {"type": "json_schema", "json_schema": True}, "end": "<"}
                ],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["text <c>1<"],
            ["text", "<c>1< more"],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [{"begin": "(", "content": {"type": "regex", "pattern": "x"}, "end": ")"}],
                "separator": ",",
                "at_least_one": True,
            },
            ["(x)", "(x),(x)"],
            ["", "(x)(x)"],
        ),
    ],
)
def test_structural_tags_newer_form(form: Any, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert taken(tag(form), text) == ACCEPTED, text
    for text in bad:
        assert taken(tag(form), text) != ACCEPTED, text


def test_a_tag_whose_trigger_is_a_control_token() -> None:
    form = {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "begin": "<tool_call>\n",
                "content": {"type": "json_schema", "json_schema": COMPACT},
                "end": "\n",
            }
        ],
    }
    said = taken(tag(form), "hm ", MARKER, '\n{"x":1,"name":"a"}\n', "bye", marker_ids=markers)
    assert said == ACCEPTED


@pytest.mark.parametrize(
    "structure",
    [
        Structure(kind="gbnf", source="root ::= ("),
        tag({"type": "unheard of"}),
        tag({"type": "sequence", "elements": []}),
        tag({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}),
        tag({"type": "tag", "begin": 3, "content": {"type": "any_text"}, "end": ""}),
        tag(
            {"type": "triggered_tags", "triggers": ["x"], "tags": [{"begin": "y", "content": {}, "end": ""}]}
        ),
        tag({"type": "regex", "pattern": 3}),
        tag("text"),
        Structure(kind="structural_tag", source="{}"),
        Structure(kind="structural_tag", source='{"structures": [{"begin": "a"}], "triggers": "a"}'),
    ],
)
def test_what_cannot_be_written_is_refused(structure: Structure) -> None:
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(structure, no_markers)
    assert refused.value.param == "structured_outputs"
