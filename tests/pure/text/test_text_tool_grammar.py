"""Grammars of tool calls: what they allow is what the scanner reads, and every call is valid by its schema."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.text.guide.check import check
from paceline.text.tools.call_grammar import behind_reasoning, tool_structure, with_tool_named
from paceline.text.tools.formats import FORMATS, Shape, ToolFormat, marker_ids
from paceline.text.tools.scanner import CallArguments, CallBegin, CallEnd, Said
from paceline.text.tools.use import Tool, ToolUse
from tests.pure.text.tool_fixtures import SCHEMAS, scanned

EOS = 256
VALUE_END = b"\n</parameter>\n"
MARKERS = (
    *("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<|tool_call|>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "<｜tool▁sep｜>",
)
CONTROL = {text: EOS + 1 + index for index, text in enumerate(MARKERS)}
TEXTS = [bytes([index]) for index in range(256)] + [b"<eos>"] + [text.encode() for text in MARKERS]
ROWS = {row.name: row for row in FORMATS}
TOOLS = tuple(Tool(name=name, parameters=schema) for name, schema in SCHEMAS.items())
STRICT = tuple(Tool(name=name, parameters=schema, strict=True) for name, schema in SCHEMAS.items())
ALL = frozenset(SCHEMAS)
BARE = "[get.time("  # the beginning of a call without a marker


@cache
def vocabulary() -> Any:
    """Every byte is a token; markers and the end of text are control tokens."""

    class Bytes:
        eos_token_id, bos_token_id = EOS, None
        tokens, special_token_ids = TEXTS, list(range(256, len(TEXTS)))

        def __call__(self, text: str | bytes) -> list[int]:
            return list(text if isinstance(text, bytes) else text.encode())

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def ids(text: str) -> list[int]:
    """Markers as control tokens, the rest as bytes."""
    found: list[int] = []
    while text:
        marker = next((each for each in MARKERS if text.startswith(each)), "")
        found += [CONTROL[marker]] if marker else text[0].encode()
        text = text[len(marker) or 1 :]
    return found


def matcher(structure: Structure) -> Any:
    assert structure.kind == "lark"
    assert llguidance.LLMatcher.validate_grammar(structure.source, vocabulary()) == ""
    made = llguidance.LLMatcher(vocabulary(), structure.source)
    assert not made.is_error(), made.get_error()
    return made


def allows(structure: Structure, text: str) -> bool:
    """Whether a text can be the beginning of an answer."""
    tokens = ids(text)
    return int(matcher(structure).try_consume_tokens(tokens)) == len(tokens)


def accepts(structure: Structure, text: str) -> bool:
    """Whether a text can be an answer."""
    one = matcher(structure)
    tokens = ids(text)
    return int(one.try_consume_tokens(tokens)) == len(tokens) and bool(one.is_accepting())


def walk(structure: Structure, seed: str, begin: str = "", most: int = 4_000) -> str:
    """A random answer that follows the rules; quotes and ends of text come often enough to reach an end."""
    one, drawn = matcher(structure), random.Random(seed)
    found = bytearray(begin.encode())
    assert one.consume_tokens(ids(begin))
    for _ in range(most):
        if one.is_stopped():
            break
        # Chance does not spell the end of an XML value.
        if drawn.random() < 0.1 and one.validate_tokens(list(VALUE_END)) == len(VALUE_END):
            assert one.consume_tokens(list(VALUE_END))
            found += VALUE_END
            continue
        bits = np.frombuffer(one.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(TEXTS)])
        likely = [token for token in allowed if token > 127 or chr(token) in '"<\n}])']
        token = int(drawn.choice(likely if likely and drawn.random() < 0.4 else list(allowed)))
        if token == EOS:
            break
        assert one.consume_token(token)
        found += TEXTS[token]
    else:
        pytest.fail(f"no end in {most} tokens: {bytes(found[-200:])!r}")
    return found.decode()


def use(tools: tuple[Tool, ...] = TOOLS, **changes: Any) -> ToolUse:
    return ToolUse(tools=tools, **{"callable_names": ALL, **changes})


def checked_calls(row: ToolFormat, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls of an answer, each valid by its schema."""
    events = scanned(row.name, [text])
    found = []
    for begun in events:
        if isinstance(begun, CallBegin):
            pieces = [e.text for e in events if isinstance(e, CallArguments) and e.index == begun.index]
            arguments = json.loads("".join(pieces))
            jsonschema.validate(arguments, SCHEMAS[begun.name])
            found.append((begun.name, arguments))
    assert all(event.is_complete for event in events if isinstance(event, CallEnd))
    return found


EACH = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@EACH
@pytest.mark.parametrize("is_parallel", [True, False])
def test_required_calls_are_calls_from_the_first_token_on(row: ToolFormat, is_parallel: bool) -> None:
    structure = tool_structure(row, use(is_required=True, is_parallel=is_parallel), CONTROL)
    assert not allows(structure, "Hello")
    counts = set()
    for seed in range(12):
        text = walk(structure, f"{row.name}{seed}")
        calls = checked_calls(row, text)
        assert calls and not [e for e in scanned(row.name, [text]) if isinstance(e, Said)]
        counts.add(len(calls))
    assert max(counts) > 1 if is_parallel else counts == {1}


@EACH
def test_one_tool_can_be_named(row: ToolFormat) -> None:
    structure = tool_structure(row, use(is_required=True, callable_names=frozenset(["weather"])), CONTROL)
    for seed in range(4):
        assert {name for name, _ in checked_calls(row, walk(structure, f"{row.name}{seed}"))} == {"weather"}


@EACH
@pytest.mark.parametrize("tools", [TOOLS, STRICT], ids=["free", "strict"])
def test_text_is_free_until_a_call_begins(row: ToolFormat, tools: tuple[Tool, ...]) -> None:
    structure = tool_structure(row, use(tools), CONTROL)
    text = "I say [x] and <y> and {z}.\n"
    assert accepts(structure, text) and accepts(structure, "")
    begin = text + row.begin + row.opens if row.marker else BARE
    assert allows(structure, begin), "a call may begin"
    assert not allows(structure, begin + row.call_begin + "(")
    for seed in range(6):
        found = walk(structure, f"{row.name}{seed}", begin)
        events = scanned(row.name, [found])
        assert any(isinstance(event, CallBegin) for event in events)
        assert all(event.is_complete for event in events if isinstance(event, CallEnd))
        if tools is STRICT:
            checked_calls(row, found)


@EACH
def test_at_most_one_call_where_parallel_ones_are_forbidden(row: ToolFormat) -> None:
    structure = tool_structure(row, use(STRICT, is_parallel=False), CONTROL)
    for seed in range(6):
        begin = row.begin + row.opens if row.marker else BARE
        one = walk(structure, f"{row.name}{seed}", begin)
        assert len(checked_calls(row, one)) == 1
        assert not allows(structure, one + row.separator + row.begin + row.call_begin + "x")


OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "arguments", "is_taken"),
    [
        (OPEN, '{"a": 1}', True),
        (OPEN, '{"b": 1}', False),
        (OPEN | {"additionalProperties": True}, '{"b": 1}', True),
        (OPEN | {"required": ["b"]}, '{"b": 1}', True),
        (OPEN | {"allOf": [{"properties": {"b": {"type": "integer"}}}]}, '{"b": 1}', True),
        ({"type": "object"}, '{"b": 1}', True),
        ({"type": "object", "properties": {}}, '{"b": 1}', False),
        ({"type": "object", "properties": {}}, "{}", True),
    ],
)
def test_required_calls_have_the_arguments_that_are_named(
    parameters: dict[str, Any], arguments: str, is_taken: bool
) -> None:
    tool = Tool(name="f", parameters=parameters)
    required = use((tool,), callable_names=frozenset("f"), is_required=True)
    structure = tool_structure(ROWS["hermes"], required, CONTROL)
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert allows(structure, text) == is_taken


def test_an_error_names_the_tool() -> None:
    bad = Tool(name="g", parameters={"type": "object", "properties": {"a": {"type": "bogus"}}})
    required = use((Tool(name="f", parameters=OPEN), bad), callable_names=frozenset("fg"), is_required=True)
    structure = tool_structure(ROWS["hermes"], required, CONTROL)
    with pytest.raises(InvalidRequest) as refused:
        check(structure, "tools")
    error = with_tool_named(refused.value, structure, required)
    assert str(error) == "the parameters of the tool g: failed to compile JSON schema: Invalid type: bogus"
    assert error.param == "tools"


def test_arguments_without_strict_are_any_object() -> None:
    free = tool_structure(ROWS["hermes"], use(), CONTROL)
    strict = tool_structure(ROWS["hermes"], use(STRICT), CONTROL)
    call = '<tool_call>\n{"name": "weather", "arguments": {"nothing": [1, 2]}}\n</tool_call>'
    assert accepts(free, call) and not allows(strict, call)
    assert not allows(free, call.replace("weather", "x"))
    assert not allows(free, call.replace(": {", ":{")), "JSON has one form"


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.is_bare], ids=lambda row: row.name)
def test_an_answer_that_begins_like_a_call_is_one(row: ToolFormat) -> None:
    structure = tool_structure(row, use(), CONTROL)
    is_python = row.shape is Shape.PYTHONIC
    assert not allows(structure, "[weather(5" if is_python else '{"name": 5')
    assert accepts(structure, "[1, 2]" if is_python else '{"age": 5}')
    assert accepts(structure, 'It is {"name": 5}, [weather(5)].')


def test_a_marker_that_is_no_control_token_here_is_text() -> None:
    structure = tool_structure(ROWS["mistral_args"], use(), {})
    assert "<[" not in structure.source
    tokens = list(b"hm [TOOL_CALLS]weather[ARGS]{}")
    assert matcher(structure).try_consume_tokens(tokens) == len(tokens)
    assert matcher(structure).try_consume_tokens(list(b"[TOOL_CALLS]x")) == len("[TOOL_CALLS]")


def test_a_schema_for_answers_without_calls() -> None:
    answer = Structure(
        kind="json_schema", source='{"type": "object", "properties": {"a": {"type": "integer"}}}'
    )
    structure = tool_structure(ROWS["hermes"], use(), CONTROL, answer)
    assert (
        accepts(structure, '{"a": 5}') and not allows(structure, "Hello") and not allows(structure, '{"a": "')
    )
    assert allows(structure, '<tool_call>\n{"name": "weather", "arguments": {')
    assert accepts(tool_structure(ROWS["hermes"], use(), CONTROL, Structure()), '{"b": 5}')
    with pytest.raises(InvalidRequest, match="tools and an answer by regex do not go together"):
        tool_structure(ROWS["hermes"], use(), CONTROL, Structure(kind="regex", source="a+"))


def test_definitions_and_optional_arguments_reach_every_shape() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"$ref": "#/$defs/b"}, "c": {"type": "string"}},
        "required": ["b"],
        "$defs": {"b": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
    }
    tools = (Tool(name="weather", parameters=schema),)
    for name, good, bad in [
        ("pythonic", '[weather(b=[1, 2], c="x")]', "[weather(a=True)"),
        ("pythonic", "[weather(a=False, b=[1])]", '[weather(b=["'),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=b>\n[1]\n</parameter>\n</function>\n</tool_call>",
         "<tool_call>\n<function=weather>\n<parameter=c>"),
        ("hermes", '<tool_call>\n{"name": "weather", "arguments": {"b": [1]}}\n</tool_call>',
         '<tool_call>\n{"name": "weather", "arguments": {"b": ["'),
    ]:  # fmt: skip
        chosen = use(tools, is_required=True, callable_names=frozenset(["weather"]))
        structure = tool_structure(ROWS[name], chosen, CONTROL)
        assert accepts(structure, good) and not allows(structure, bad)


def test_a_form_behind_reasoning() -> None:
    assert behind_reasoning(None, "</think>", None) is None
    assert behind_reasoning(None, "</think>", 7) == Structure(kind="text", after="</think>", within=7)
    found = behind_reasoning(Structure(kind="regex", source="a"), "</think>", None)
    assert found == Structure(kind="regex", source="a", after="</think>")


def test_markers_stay_in_the_text() -> None:
    row = ROWS["mistral_args"]
    assert marker_ids(row.texts(), {**CONTROL, "<s>": 1}) == {CONTROL["[TOOL_CALLS]"], CONTROL["[ARGS]"]}
