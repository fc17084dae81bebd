"""Answers with tool calls in every format, and what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from paceline.text.tools.formats import FORMATS, ToolFormat
from paceline.text.tools.scanner import CallArguments, CallBegin, CallEnd, Event, Said, ToolScanner

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "string", "enum": ["C", "F"]},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "get.time": {"type": "object", "properties": {}}}


class Answer(NamedTuple):
    """An answer in one format: its text, and the calls and the text around them."""

    row: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    before: str = ""
    behind: str = ""


PARIS: tuple[str, dict[str, Any]] = ("weather", {"city": "Paris", "days": 3})
TIME: tuple[str, dict[str, Any]] = ("get.time", {})
HARD: tuple[str, dict[str, Any]] = ("weather", {"city": 'a "b" \\ </tool_call> [TOOL_CALLS] é 😀 {[ \n'})


def written(call: tuple[str, dict[str, Any]], arguments: str = "arguments", **options: Any) -> str:
    return json.dumps({"name": call[0], arguments: call[1]}, **options)


def tagged(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def deepseek(*calls: str) -> str:
    return "<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"


def deepseek_call(call: tuple[str, dict[str, Any]], *, is_old: bool) -> str:
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    if is_old:
        return f"{begin}function{sep}{call[0]}\n```json\n{json.dumps(call[1])}\n```{end}"
    return f"{begin}{call[0]}{sep}{json.dumps(call[1])}{end}"


XML = "<function=weather>\n<parameter=city>\n{}\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>"
ANSWERS = [
    Answer("hermes", tagged(written(PARIS)), [PARIS]),
    Answer(
        "hermes",
        "I look.\n" + tagged(written(HARD)) + "\n" + tagged(written(TIME)),
        [HARD, TIME],
        "I look.\n",
    ),
    Answer("hermes", tagged(written(HARD, ensure_ascii=False)) + " Done.", [HARD], behind=" Done."),
    Answer(
        "hermes",
        '<tool_call>{"arguments":{"city":"Paris","days":3},"name":"weather","x":[1,"}"]}</tool_call>\n',
        [PARIS],
    ),
    Answer("hermes", tagged('{"name": "get.time"}'), [TIME]),
    Answer("generic", "\n\n" + tagged(written(PARIS, "parameters")), [PARIS]),
    Answer("qwen3_coder", "So:\n" + tagged(XML.format("Paris")), [PARIS], "So:\n"),
    Answer(
        "qwen3_coder", tagged(XML.format('a\n<b> "c"\n')), [("weather", {"city": 'a\n<b> "c"\n', "days": 3})]
    ),
    Answer(
        "qwen3_coder",
        tagged("<function=get.time>\n</function>") + "\n" + tagged(XML.format("Paris")),
        [TIME, PARIS],
    ),
    Answer("llama3_json", written(PARIS, "parameters"), [PARIS]),
    Answer(
        "llama3_json", "<|python_tag|>" + written(PARIS, "parameters") + "; " + written(TIME), [PARIS, TIME]
    ),
    Answer("llama3_json", "Well. <|python_tag|>" + written(HARD, "parameters"), [HARD], "Well. "),
    Answer("pythonic", '[weather(city="Paris", days=3)]', [PARIS]),
    Answer(
        "pythonic",
        "[get.time(), weather(city='it\\'s, (a) [b', exact=True, days=-1)]",
        [TIME, ("weather", {"city": "it's, (a) [b", "exact": True, "days": -1})],
    ),
    Answer(
        "pythonic",
        ' [weather(city=["a", (1, None)], days={"x": false})]',
        [("weather", {"city": ["a", [1, None]], "days": {"x": False}})],
    ),
    Answer(
        "llama4_pythonic",
        'Hm. <|python_start|>[weather(city="Paris", days=3)]<|python_end|>',
        [PARIS],
        "Hm. ",
    ),
    Answer("llama4_pythonic", "[get.time()]", [TIME]),
    Answer("mistral", f"[TOOL_CALLS] [{written(PARIS)}, {written(HARD)}]", [PARIS, HARD]),
    Answer("mistral", f'ok[TOOL_CALLS][{written(TIME)[:-1]}, "id": "abcdefghi"}}]', [TIME], "ok"),
    Answer(
        "mistral_args",
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(PARIS[1])}[TOOL_CALLS]get.time[ARGS]{{}}",
        [PARIS, TIME],
    ),
    Answer("mistral_args", f"a [b] [TOOL_CALLS]weather[ARGS]{json.dumps(HARD[1])}", [HARD], "a [b] "),
    Answer(
        "deepseek_v3",
        deepseek(deepseek_call(PARIS, is_old=True), deepseek_call(HARD, is_old=True)),
        [PARIS, HARD],
    ),
    Answer(
        "deepseek_v31",
        "Hm." + deepseek(deepseek_call(PARIS, is_old=False), deepseek_call(TIME, is_old=False)),
        [PARIS, TIME],
        "Hm.",
    ),
    Answer("granite", f"<|tool_call|>[{written(PARIS)},{written(TIME)}]", [PARIS, TIME]),
    Answer("phi4_mini_json", f"functools[{written(HARD)}, {written(PARIS)}]", [HARD, PARIS]),
]


def row_of(name: str) -> ToolFormat:
    return next(row for row in FORMATS if row.name == name)


def scanner(row: str) -> ToolScanner:
    numbers = iter(range(1000))
    return ToolScanner(row_of(row), SCHEMAS, lambda: f"id{next(numbers)}")


def scanned(row: str, pieces: Iterable[str]) -> list[Event]:
    """All events, neighbouring texts and arguments joined."""
    one = scanner(row)
    found = [event for piece in pieces for event in one.push(piece)] + one.flush()
    joined: list[Event] = []
    for event in found:
        last = joined[-1] if joined else None
        if isinstance(event, Said) and isinstance(last, Said):
            joined[-1] = Said(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def calls_of(events: list[Event]) -> list[tuple[str, dict[str, Any]]]:
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
    assert all(event.is_complete for event in events if isinstance(event, CallEnd))
    return list(zip(names, arguments, strict=True))
