"""A structure is made from every form, and what is no form is refused where it is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.core.structure import MAX_DEPTH, MAX_SOURCE_BYTES, Structure
from paceline.errors import GrammarTooComplex, InvalidRequest


def nested(depth: int) -> Any:
    return {"not": nested(depth - 1)} if depth > 1 else {}


@pytest.mark.parametrize(
    ("given", "kind", "source"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": '{"type": "object"}'}, "json_schema", '{"type": "object"}'),
        ({"json": False, "regex": "a"}, "regex", "a"),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
        ({"choice": ["a", "é"]}, "choice", '["a", "é"]'),
        ({"choice": ("a", "b")}, "choice", '["a", "b"]'),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a", "json": None}, "regex", "a"),
    ],
)
def test_by_the_names_of_vllm(given: dict[str, Any], kind: str, source: str) -> None:
    structure = SamplingParams(structured_outputs=given).structured_outputs  # type: ignore[arg-type]
    assert structure == Structure(kind=kind, source=source)


def test_compact_json() -> None:
    compact = {"x-guidance": {"whitespace_flexible": False}}
    for given, schema in (
        ({"json": {"type": "string"}}, {"type": "string"}),
        ({"json_object": True}, {"type": "object"}),
        ({"json": "true"}, {"anyOf": [True]}),
    ):
        structure = Structure.of({**given, "disable_any_whitespace": True})
        assert structure.kind == "json_schema" and json.loads(structure.source) == schema | compact
    assert Structure.of({"regex": "a", "disable_any_whitespace": False}) == Structure(
        kind="regex", source="a"
    )


@pytest.mark.parametrize(
    "given",
    [
        *({}, {"json": {}, "regex": "a"}, {"xml": "a"}, {"regex": 5}, {"regex": ""}, {"grammar": b"a"}),
        *(
            {"json": "{"},
            {"json": 5},
            {"json": {1, 2}},
            {"choice": []},
            {"choice": ["a", ""]},
            {"choice": "a"},
        ),
        *(
            {"structural_tag": []},
            {"regex": "\ud800"},
            {"regex": "a", "disable_any_whitespace": True},
            5,
            "a",
        ),
    ],
)
def test_what_is_no_form(given: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(structured_outputs=given)
    assert refused.value.param == "structured_outputs"


def test_sizes_up_to_the_limits() -> None:
    Structure(kind="regex", source="a" * MAX_SOURCE_BYTES)
    Structure.named("json", nested(MAX_DEPTH))
    with pytest.raises(GrammarTooComplex):
        Structure(kind="regex", source="é" * (MAX_SOURCE_BYTES // 2) + "a")
    for deep in (nested(MAX_DEPTH + 1), '{"a":' * 900 + "{}" + "}" * 900):
        with pytest.raises(GrammarTooComplex):
            Structure.named("json", deep)
    with pytest.raises(InvalidRequest):
        Structure(kind="json_schema", source="[" * 50_000)


def test_an_answer_that_ends_with_its_structure_cannot_ignore_its_end() -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(structured_outputs=Structure(), ignore_eos=True)
    assert refused.value.param == "ignore_eos"
