"""Structures are checked before a request is accepted; what hangs or crashes ends with the process that checks it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core.structure import Structure
from paceline.errors import GrammarTooComplex, InvalidRequest, QueueFull
from paceline.text.guide import check as check_module
from paceline.text.guide import checkers
from paceline.text.guide.check import check, verdict_of
from paceline.text.guide.checkers import GrammarChecker

TREE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
LIST = {**TREE, "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}
# Takes llguidance seconds: patterns of keys are compared each with each.
SLOW = {
    "type": "object",
    "patternProperties": {f"^p{i}[a-z]+": {"type": "string"} for i in range(400)},
}
ANSWERS = 'import sys; print("ready", flush=True)\nfor line in sys.stdin: '
GOOD = """print('{"error": "", "too_complex": false, "ignored": []}', flush=True)"""


def schema(value: Any, **more: Any) -> Structure:
    return Structure(kind="json_schema", source=json.dumps(value), **more)


@pytest.mark.parametrize(
    ("structure", "said"),
    [
        (schema({"type": "strin"}), "Invalid type"),
        (schema(False), "Unsatisfiable"),
        (schema({"type": "string", "minLength": 5, "maxLength": 2}), "Unsatisfiable"),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema({"$ref": "#"}), "without end"),
        (schema(TREE), "without end"),
        (schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}), "without end"),
        (schema({"$ref": "#/nowhere"}), "does not exist"),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (schema({"type": "string", "pattern": "(?=a)"}), "look-around"),
        (schema({"not": {}}, strict=True), "Unimplemented"),
        (schema({"format": "unheard-of"}, strict=True), "format"),
        (Structure(kind="regex", source="a(?=b)"), "look-around"),
        (Structure(kind="regex", source="["), "unclosed"),
        (Structure(kind="lark", source='start: start "a"'), "no answer"),
        (Structure(kind="lark", source='start: "a" start'), "without end"),
        (Structure(kind="gbnf", source='root ::= "(" root ")"'), "without end"),
        (Structure(kind="lark", source="start: missing"), "missing"),
        (Structure(kind="lark", source='begin: "a"'), "start"),
        (Structure(kind="gbnf", source="root ::= ("), "read"),
        (Structure(kind="structural_tag", source="{}"), "structures"),
    ],
)
def test_what_does_not_compile(structure: Structure, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        check(structure, "response_format")
    assert refused.value.param == "response_format"
    assert str(refused.value).startswith("response_format: ")
    assert not isinstance(refused.value, GrammarTooComplex)


@pytest.mark.parametrize(
    "structure",
    [
        schema(LIST),
        schema({"type": "array", "items": {"$ref": "#"}}),
        Structure(kind="lark", source='start: <|tool|> "a"'),
        Structure(kind="regex", source="a*"),
        schema({"type": "object"}, after="</think>"),
    ],
)
def test_what_compiles(structure: Structure) -> None:
    assert check(structure) == ()


def test_what_is_ignored_is_named() -> None:
    lenient = {
        "type": "object",
        "properties": {"a": {"not": {}, "$comment": "x"}, "b": {"type": "string", "format": "byte"}},
        "if": {},
        "minProperties": 1,
        "oneOf": [{"minProperties": 0}, {}],
    }
    names = check(schema(lenient), "response_format")
    assert {f"response_format.{name}" for name in ("not", "if", "format.byte")} <= set(names)


def test_the_place_in_a_schema() -> None:
    bad = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "strin"}}}}
    with pytest.raises(InvalidRequest, match=r"at /properties/a/items\)$"):
        check(schema(bad))


def test_a_sentence_shows_nothing_of_the_grammar_that_a_structure_becomes() -> None:
    assert verdict_of(Structure(kind="regex", source="(a")).error == (
        'invalid regex "(a" (in regex): regex parse error: (a error: unclosed group'
    )
    assert verdict_of(Structure(kind="lark", source="start: b")).error == 'at 1(8): unknown name: "b"'


def test_sentences_are_short() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(Structure(kind="regex", source="(" * 2000 + "["))
    assert len(str(refused.value)) <= len("structured_outputs: ") + 300


def test_too_many_ways_is_too_complex() -> None:
    ways = [{"anyOf": [{"properties": {f"{x}{i}": {"type": "string"}}} for x in "ab"]} for i in range(16)]
    with pytest.raises(GrammarTooComplex, match="too large"):
        check(schema({"allOf": ways}))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_module, "is_installed", lambda: False)
    with pytest.raises(InvalidRequest, match="pip install") as refused:
        check(schema({}), "response_format")
    assert refused.value.param == "response_format"


def in_checker(ask: Callable[[GrammarChecker], Any], *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        checker = GrammarChecker(*arguments, **options)
        try:
            return await ask(checker)
        finally:
            checker.close()

    return asyncio.run(run())


def script(tmp_path: Path, body: str) -> tuple[str, ...]:
    path = tmp_path / "worker.py"
    path.write_text(ANSWERS + body)
    return (sys.executable, str(path))


def test_a_process_answers_as_this_one_does() -> None:
    async def ask(checker: GrammarChecker) -> None:
        for structure in (schema({"not": {}}), schema({"type": "strin"}), schema(LIST)):
            verdict = verdict_of(structure)
            if verdict.error:
                with pytest.raises(InvalidRequest) as refused:
                    await checker.check(structure, "response_format")
                assert str(refused.value) == f"response_format: {verdict.error}"
            else:
                names = await checker.check(structure, "response_format")
                assert names == verdict.approve("response_format")

    in_checker(ask)


def test_what_takes_too_long_is_killed_and_others_go_on() -> None:
    async def ask(checker: GrammarChecker) -> None:
        await checker.check(schema({}))  # the process has started
        slow = asyncio.create_task(checker.check(schema(SLOW), "response_format"))
        await asyncio.sleep(0)
        begun = time.monotonic()
        await checker.check(schema({"type": "string"}))
        with pytest.raises(GrammarTooComplex, match="response_format: it takes too long"):
            await slow
        assert time.monotonic() - begun < 30  # and not the minutes it would have taken
        await checker.check(schema({"type": "array"}))
        # Remembered: no second process is spent on it.
        with pytest.raises(GrammarTooComplex):
            await asyncio.wait_for(checker.check(schema(SLOW)), 0.5)

    in_checker(ask)


def test_a_crash_is_the_grammars_fault_and_the_next_one_gets_a_new_process(tmp_path: Path) -> None:
    body = "print('x' if 0 else sys.exit(3)) if 'crash' in line else " + GOOD

    async def ask(checker: GrammarChecker) -> None:
        for _ in range(2):
            with pytest.raises(GrammarTooComplex, match="crashed"):
                await checker.check(Structure(kind="regex", source="crash"))
            assert await checker.check(schema({})) == ()

    in_checker(ask, script(tmp_path, body))


def test_the_same_question_is_asked_once(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    body = f"open({str(asked)!r}, 'a').write('x'), {GOOD}"

    async def ask(checker: GrammarChecker) -> None:
        await asyncio.gather(*(checker.check(schema({})) for _ in range(20)))
        await checker.check(schema({}, after="</think>"))

    in_checker(ask, script(tmp_path, body))
    assert asked.read_text() == "x"


def test_a_client_that_leaves_takes_no_answer_from_others(tmp_path: Path) -> None:
    async def ask(checker: GrammarChecker) -> None:
        first = asyncio.create_task(checker.check(schema({})))
        await asyncio.sleep(0)
        second = asyncio.create_task(checker.check(schema({})))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == ()

    in_checker(ask, script(tmp_path, GOOD))


def test_a_full_house_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkers, "WAIT_S", 0.05)

    async def ask(checker: GrammarChecker) -> None:
        held = asyncio.create_task(checker.check(schema({})))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await checker.check(schema({"type": "string"}))
        with pytest.raises(GrammarTooComplex):
            await held

    in_checker(ask, script(tmp_path, "pass"), check_s=0.3, max_workers=1)


def test_a_process_that_does_not_start_is_our_fault(tmp_path: Path) -> None:
    async def ask(checker: GrammarChecker) -> None:
        with pytest.raises(RuntimeError, match="does not start"):
            await checker.check(schema({}))

    in_checker(ask, (sys.executable, "-c", "pass"))


def test_the_worker_has_none_of_our_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    body = "import os; assert 'PACELINE_API_KEY' not in os.environ; " + GOOD

    async def ask(checker: GrammarChecker) -> None:
        assert await checker.check(schema({})) == ()

    in_checker(ask, script(tmp_path, body))
