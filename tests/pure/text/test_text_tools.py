"""Tool calls in answers that arrive in pieces: the same events under every cut, and what is no call stays text."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from paceline.errors import ConfigError
from paceline.text.tools.formats import FORMATS, detected_format, format_names, named_format
from paceline.text.tools.scanner import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Said,
    ToolScanner,
    call_id,
    python_to_json,
)
from tests.pure.text.tool_fixtures import ANSWERS, SCHEMAS, Answer, calls_of, row_of, scanned, tagged, written

NUM_RANDOM_CUTS = 1_000


def names(answers: list[Answer]) -> list[str]:
    return [f"{answer.row}-{index}" for index, answer in enumerate(answers)]


def cuts(text: str, seed: str) -> list[list[str]]:
    """Every cut in two, every character alone, and random sets of places."""
    drawn = random.Random(seed)
    found = [[text[:at], text[at:]] for at in range(len(text) + 1)] + [list(text)]
    for _ in range(NUM_RANDOM_CUTS):
        places = sorted(drawn.choices(range(len(text) + 1), k=drawn.randint(1, 12)))
        found.append([text[begin:end] for begin, end in pairwise([0, *places, len(text)])])
    return found


def test_every_format_has_an_answer_here() -> None:
    assert {answer.row for answer in ANSWERS} == {row.name for row in FORMATS}


@pytest.mark.parametrize("answer", ANSWERS, ids=names(ANSWERS))
def test_calls_are_found_under_every_cut(answer: Answer) -> None:
    events = scanned(answer.row, [answer.text])
    assert calls_of(events) == answer.calls
    said = [event.text for event in events if isinstance(event, Said)]
    assert said == [text for text in (answer.before, answer.behind) if text]
    begun = [event for event in events if isinstance(event, CallBegin)]
    assert [(event.index, event.id) for event in begun] == [(n, f"id{n}") for n in range(len(begun))]
    for pieces in cuts(answer.text, answer.row):
        assert scanned(answer.row, pieces) == events, pieces


@pytest.mark.parametrize(
    "answer",
    [a for a in ANSWERS if "function=" not in a.text and "(" not in a.text[:40]],
    ids=lambda a: a.row,
)
def test_arguments_are_the_model_s_own_text(answer: Answer) -> None:
    for event in scanned(answer.row, [answer.text]):
        if isinstance(event, CallArguments) and event.text != "{}":
            assert event.text in answer.text


def test_arguments_come_before_a_call_ends() -> None:
    one = ToolScanner(row_of("hermes"), SCHEMAS, lambda: "x")
    assert one.push('<tool_call>{"name": "weather", "arguments": {"city": "Par') == [
        CallBegin(0, "x", "weather"),
        CallArguments(0, '{"city": "Par'),
    ]
    assert one.push('is"') == [CallArguments(0, 'is"')]


CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "outcomes"),
    [
        (CALL + CALL, {"complete": 2, "incomplete": 0, "text": 0}),
        (CALL + CALL[:60], {"complete": 1, "incomplete": 1, "text": 0}),
        ("Use <tool_call>s: " + CALL, {"complete": 1, "incomplete": 0, "text": 1}),
        (CALL.replace("weather", "nothing"), {"complete": 0, "incomplete": 0, "text": 1}),
        ("Hello.", {"complete": 0, "incomplete": 0, "text": 0}),
    ],
)
def test_calls_are_counted_by_outcome(text: str, outcomes: dict[str, int]) -> None:
    scanner = ToolScanner(row_of("hermes"), SCHEMAS)
    for character in text:
        scanner.push(character)
    scanner.flush()
    assert scanner.outcomes == outcomes


# Text that looks like a call, each with its format.
HOSTILE = [
    ("hermes", "no call"),
    ("hermes", "   \n"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call> the marker of calls </tool_call>"),
    ("hermes", "<tool_cal <tool_call <tool_call> {} </tool_call>"),
    ("hermes", tagged('{"name": "unknown", "arguments": {}}')),
    ("hermes", tagged('{"name": "weather", "arguments": "city"}')),
    ("hermes", tagged('{"name": "weather", "arguments": [1]}')),
    ("hermes", tagged('{"arguments": {"city": "x"}}')),
    ("hermes", tagged('{"name": 5, "arguments": {}}')),
    ("hermes", tagged('{"name": "weather" "arguments": {}}')),
    ("hermes", tagged('{"name": "\\ud800", "arguments": {}}')),
    ("hermes", '<tool_call>{"name": "weather", "argu'),
    ("hermes", '<tool_call>{"name": "weather\\'),
    ("hermes", '<tool_call>{"' + "n" * 500),
    ("hermes", '<tool_call>{"x": ' + "[" * 200 + "]" * 200 + ', "name": "weather", "arguments": {}}</tool_call>'),
    ("llama3_json", '{"name": "John", "age": 7}'),
    ("llama3_json", '{"a": {"name": "weather"'),
    ("llama3_json", "<|python_tag|>print(1)"),
    ("pythonic", "[weather](http://x)"),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[nobody(a=1)]"),
    ("mistral", "[TOOL_CALLS] weather"),
    ("mistral_args", "[TOOL_CALLS]weather[ARGS]5"),
    ("mistral_args", "[TOOL_CALLS]" + "w" * 300 + "[ARGS]{}"),
    ("qwen3_coder", tagged("<function=nobody>\n</function>")),
    ("qwen3_coder", "<tool_call><function=" + "f" * 300),
    ("deepseek_v31", "<｜tool▁calls▁begin｜>nothing<｜tool▁calls▁end｜>"),
    ("phi4_mini_json", "functools is a module"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "text"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_call_is_text_unchanged(row: str, text: str) -> None:
    for pieces in [[text], *cuts(text, row)[:400]]:
        assert scanned(row, pieces) == [Said(text)], pieces


# Calls that go wrong behind the beginning of their arguments: they end there.
BROKEN: list[tuple[str, str, str, bool, str]] = [
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par', '{"city": "Par', False, ""),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": ]} x', '{"city": ', False, "]} x"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": x}}</tool_call>', '{"city": x}', False, ""),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": NaN}}</tool_call>', '{"a": NaN}', False, ""),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": "\\', '{"a": "', False, "\\"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"a": ' + "[" * 200, '{"a": ' + "[" * 127, False, "[" * 73),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}}', "{}", True, ""),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}}\n</tool_ca', "{}", True, ""),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}}\n</tool_ba', "{}", True, "\n</tool_ba"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}</tool_call>', "{}", True, "</tool_call>"),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {}, "arguments": {"b": 1}}</tool_call>', "{}", True, ""),
    ("pythonic", '[weather(city="a", days=', '{"city": "a"', False, ", days="),
    ("pythonic", "[weather(1)]", "{", False, "1)]"),
    ("pythonic", "[weather(a=b)]", "{", False, "a=b)]"),
    ("pythonic", "[weather(a=" + "(" * 200, "{", False, "a=" + "(" * 200),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>Par", "{", False, "<parameter=city>Par"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "text", "arguments", "is_complete", "rest"), BROKEN, ids=range(len(BROKEN)))
def test_a_call_that_goes_wrong_ends_there(
    row: str, text: str, arguments: str, is_complete: bool, rest: str
) -> None:
    expected: list[Event] = [
        CallBegin(0, "id0", "weather"),
        CallArguments(0, arguments),
        CallEnd(0, is_complete),
    ]
    expected += [Said(rest)] if rest else []
    for pieces in [[text], *cuts(text, row)[:400]]:
        assert scanned(row, pieces) == expected, pieces


def test_a_call_behind_a_false_one_is_found() -> None:
    events = scanned("hermes", ["<tool_call> <tool_call>" + written(("get.time", {})) + "</tool_call>"])
    assert events[0] == Said("<tool_call> ")
    assert calls_of(events) == [("get.time", {})]


def test_many_false_beginnings_are_read_once() -> None:
    """Where every marker began a new look at all that follows, this would take minutes."""
    text = '<tool_call>{"x": [' * 20_000
    assert scanned("hermes", [text]) == [Said(text)]


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n{\"name\": <function-name>}</tool_call>", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p>", "qwen3_coder"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("<|python_start|>[func_name1(params_name1=1)]", "llama4_pythonic"),
        ("write [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_args"),
        ("<｜tool▁calls▁begin｜>x```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>x", "deepseek_v31"),
        ("{{ '<|tool_call|>' }}", "granite"),
        ("'<|tool|>' + message['tools']", "phi4_mini_json"),
        ("{{ messages }}", "generic"),
        ("", "generic"),
    ],
)  # fmt: skip
def test_the_family_is_told_by_the_template(template: str, name: str) -> None:
    assert detected_format(template).name == name
    found = named_format("auto", template)
    assert found is not None and found.name == name


def test_an_operator_chooses_by_vllm_s_names() -> None:
    def chosen(name: str, template: str = "") -> str:
        found = named_format(name, template)
        assert found is not None
        return found.name

    assert chosen("qwen3_xml") == "qwen3_coder" and chosen("llama4_json") == "llama3_json"
    assert chosen("mistral") == "mistral" and chosen("mistral", "[TOOL_CALLS]x[ARGS]") == "mistral_args"
    assert named_format("none", "<tool_call>") is None
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser: there is no 'x'; there are auto, none, qwen3_coder"
    ):
        named_format("x", "")
    assert len(set(format_names())) == len(format_names())


def test_ids_have_the_form_a_family_wants() -> None:
    assert len(call_id(row_of("mistral"))) == 9 and call_id(row_of("mistral")).isalnum()
    assert call_id(row_of("hermes")).startswith("call_")


@pytest.mark.parametrize(
    "text", ["1 +", "a", '"a" "b"', "[1,]", "__import__('x')", "{1: 2}", "0x1", "'\\x'", "((("]
)
def test_what_is_no_literal_becomes_no_json(text: str) -> None:
    assert python_to_json(text) is None


@pytest.mark.parametrize("value", [1, -2.5, 1e9, "a'b\n", True, None, [1, [2]], {"a": {"b": []}}])
def test_literals_become_json(value: object) -> None:
    made = python_to_json(repr(value))
    assert made is not None and json.loads(made) == value
