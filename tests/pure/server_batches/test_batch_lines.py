"""The input of a batch: every kind of mistake is named with its line, and good lines are found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.server.batches.batch_records import BatchLine
from paceline.server.batches.line_run import MAX_ERRORS, Findings, LineRules, read_body, read_input
from tests.pure.server_batches.batch_helpers import jsonl, request

RULES = LineRules(endpoint="/v1/chat/completions", models=("tiny",), max_lines=5, max_line_bytes=4096)


def check(path: Path, data: bytes, rules: LineRules = RULES) -> tuple[list[BatchLine], Findings]:
    path.write_bytes(data)
    findings = Findings()
    return [line for page in read_input(path, rules, findings) for line in page], findings


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in request("a").items() if key != name}


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[]", "invalid_json_line", None),
        (b"\xff", "invalid_json_line", None),
        (b'{"a": NaN}', "invalid_json_line", None),
        (b'{"custom_id": "a", "custom_id": "b"}', "invalid_json_line", None),
        (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "invalid_json_line", None),
        (without("custom_id"), "missing_required_parameter", "custom_id"),
        (without("method"), "missing_required_parameter", "method"),
        (without("url"), "missing_required_parameter", "url"),
        (without("body"), "missing_required_parameter", "body"),
        ({**request("a"), "custom_id": 1}, "invalid_custom_id", "custom_id"),
        ({**request("a"), "custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({**request("a"), "custom_id": "x" * 513}, "invalid_custom_id", "custom_id"),
        ({**request("a"), "method": "GET"}, "invalid_method", "method"),
        ({**request("a"), "url": "/v1/completions"}, "mismatched_url", "url"),
        ({**request("a"), "body": []}, "invalid_body", "body"),
        ({**request("a"), "body": {str(i): i for i in range(65)}}, "invalid_body", "body"),
        (request("a", stream=True), "invalid_body", "body.stream"),
        (request("a", model=None), "missing_required_parameter", "body.model"),
        (request("a", model="other"), "model_not_found", "body.model"),
        (request("a", model=["tiny"]), "model_not_found", "body.model"),
        (request("a", padding="x" * 4096), "line_too_long", None),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, line: Any, code: str, param: str | None) -> None:
    bad = line if isinstance(line, bytes) else json.dumps(line).encode()
    lines, findings = check(
        tmp_path / "in", jsonl(request("good")) + b"\n" + bad + b"\n" + jsonl(request("z"))
    )
    assert lines == []
    (error,) = findings.errors
    assert (error.code, error.param, error.line) == (code, param, 3)
    assert error.message


def test_good_lines_are_found_again(tmp_path: Path) -> None:
    names = ["a", "ü" * 512, "c"]
    data = jsonl(*(request(name, seed=number) for number, name in enumerate(names)))
    # Blank lines, line ends of all kinds, none at the end.
    data = b"\r\n  \n" + data.replace(b"\n", b"\r\n").rstrip()
    lines, findings = check(tmp_path / "in", data)
    assert findings.errors == [] and findings.total == 3
    assert [(line.number, line.custom_id) for line in lines] == list(zip((3, 4, 5), names, strict=True))
    assert [read_body(tmp_path / "in", line)["seed"] for line in lines] == [0, 1, 2]


def test_the_number_of_lines_is_limited(tmp_path: Path) -> None:
    requests = [request(str(number)) for number in range(6)]
    assert len(check(tmp_path / "in", jsonl(*requests[:5]))[0]) == 5
    _, findings = check(tmp_path / "in", jsonl(*requests))
    assert [(error.code, error.line) for error in findings.errors] == [("too_many_requests", 6)]


def test_the_length_of_a_line_is_limited(tmp_path: Path) -> None:
    text = json.dumps(request("a", user="")).encode()
    longest = text.replace(b'"user": ""', b'"user": "' + b"x" * (4096 - len(text)) + b'"')
    assert len(longest) == 4096
    assert len(check(tmp_path / "in", longest)[0]) == 1
    _, findings = check(tmp_path / "in", longest.replace(b"x", b"xx", 1))
    assert [error.code for error in findings.errors] == ["line_too_long"]
    _, findings = check(tmp_path / "in", jsonl(request("a")) + b"x" * 300_000 + b"\n" + jsonl(request("b")))
    assert [(error.code, error.line) for error in findings.errors] == [("line_too_long", 2)]


def test_nothing_is_no_batch(tmp_path: Path) -> None:
    for data in (b"", b"\n\n \r\n"):
        _, findings = check(tmp_path / "in", data)
        assert [error.code for error in findings.errors] == ["empty_file"]


def test_a_repeated_custom_id_is_named_and_errors_are_bounded(tmp_path: Path) -> None:
    rules = LineRules(endpoint=RULES.endpoint, models=("tiny",), max_lines=1000, max_line_bytes=4096)
    _, findings = check(tmp_path / "in", jsonl(*[request("same")] * 500), rules)
    assert findings.num_errors == 499 and len(findings.errors) == MAX_ERRORS + 1
    assert {error.code for error in findings.errors[:-1]} == {"duplicate_custom_id"}
    assert findings.errors[-1].code == "too_many_errors"
