"""The input of a batch, line by line: what is wrong with it before anything is run, and where each request is.

A line's envelope is checked here (JSON, custom_id, method, url, body, model), as a batch that has one bad line runs
none; the fields of a body are checked when it is run, as those of any request. Reads a bounded piece at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from paceline.server.batches.batch_records import BatchLine, LineError
from paceline.server.errors import Refusal
from paceline.server.http.strict_json import MAX_KEYS, read_object

MAX_CUSTOM_ID = 512  # characters
MAX_ERRORS = 100  # that are reported
PAGE_LINES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LineRules:
    """What the lines of a batch have to be."""

    endpoint: str
    models: tuple[str, ...]
    max_lines: int
    max_line_bytes: int


@dataclass(slots=True)
class Findings:
    """What came out of reading an input."""

    total: int = 0
    errors: list[LineError] = field(default_factory=list)
    num_errors: int = 0

    def add(self, error: LineError) -> None:
        self.num_errors += 1
        if self.num_errors <= MAX_ERRORS:
            self.errors.append(error)
        elif self.num_errors == MAX_ERRORS + 1:
            self.errors.append(
                LineError(code="too_many_errors", message="there are more errors than are reported")
            )


class BadLine(Exception):
    """Something is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def read_input(
    path: Path, rules: LineRules, findings: Findings, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[list[BatchLine]]:
    """Pages of good lines. What is wrong is added to `findings`; after a mistake no more pages come."""
    seen: set[bytes] = set()
    page: list[BatchLine] = []
    with path.open("rb") as file:
        for number, offset, raw in _raw_lines(file, rules.max_line_bytes):
            if is_stopped():
                return
            findings.total += 1
            if findings.total > rules.max_lines:
                message = f"the file has more than {rules.max_lines} requests; cut it into several batches"
                findings.add(LineError(code="too_many_requests", message=message, line=number))
                return
            try:
                page.append(_checked(number, offset, raw, rules, seen))
            except BadLine as bad:
                findings.add(LineError(code=bad.code, message=str(bad), line=number, param=bad.param))
            if len(page) >= PAGE_LINES:
                if not findings.num_errors:
                    yield page
                page = []
    if not findings.total:
        findings.add(
            LineError(code="empty_file", message="the file holds no request; give it one on each line")
        )
    if page and not findings.num_errors:
        yield page


def read_body(path: Path, line: BatchLine) -> dict[str, Any]:
    """The body of one request of an input that was checked."""
    with path.open("rb") as file:
        file.seek(line.offset)
        body = read_object(file.read(line.length))["body"]
    assert isinstance(body, dict)
    return body


def _raw_lines(file: BinaryIO, most: int) -> Iterator[tuple[int, int, bytes]]:
    """Number, place and bytes of each line that is not blank; one that is too long comes cut, and just too long."""
    number = offset = 0
    while True:
        raw = file.readline(most + 2)
        if not raw:
            return
        number += 1
        size = len(raw)
        while not raw.endswith(b"\n") and size >= most + 2:
            rest = file.readline(1 << 16)
            size += len(rest)
            if not rest or rest.endswith(b"\n"):
                break
        if raw.strip():
            yield number, offset, raw.rstrip(b"\r\n")
        offset += size


def _checked(number: int, offset: int, raw: bytes, rules: LineRules, seen: set[bytes]) -> BatchLine:
    if len(raw) > rules.max_line_bytes:
        raise BadLine("line_too_long", f"a line may have {rules.max_line_bytes} bytes; shorten this one")
    try:
        given = read_object(raw)
    except Refusal as refusal:
        what = str(refusal).replace("The request body", "The line").replace("request body", "line")
        raise BadLine(
            "invalid_json_line", f"This line is not a JSON object as it should be: {what}"
        ) from None
    custom_id = _required(given, "custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID} characters"
        raise BadLine("invalid_custom_id", message, "custom_id")
    digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
    if digest in seen:
        message = "The custom_id of this line is that of an earlier one; each line needs its own."
        raise BadLine("duplicate_custom_id", message, "custom_id")
    seen.add(digest)
    _check_target(given, rules)
    return BatchLine(number=number, offset=offset, length=len(raw), custom_id=custom_id)


def _check_target(given: dict[str, Any], rules: LineRules) -> None:
    if _required(given, "method") != "POST":
        raise BadLine("invalid_method", "method must be POST", "method")
    if _required(given, "url") != rules.endpoint:
        message = f"url must be that of the batch, {rules.endpoint}"
        raise BadLine("mismatched_url", message, "url")
    body = _required(given, "body")
    if not isinstance(body, dict):
        raise BadLine("invalid_body", "body must be an object: what would be posted to the url", "body")
    if len(body) > MAX_KEYS:
        raise BadLine("invalid_body", f"body has more than {MAX_KEYS} keys", "body")
    if body.get("stream"):
        raise BadLine(
            "invalid_body", "the answers of a batch are not streamed; leave stream out", "body.stream"
        )
    model = body.get("model")
    if model is None:
        raise BadLine("missing_required_parameter", "Missing required parameter: body.model", "body.model")
    if model not in rules.models:
        message = f"the model {model!r:.128} is not loaded; there is {', '.join(rules.models)}"
        raise BadLine("model_not_found", message, "body.model")


def _required(given: dict[str, Any], name: str) -> Any:
    value = given.get(name)
    if value is None:
        raise BadLine("missing_required_parameter", f"Missing required parameter: {name}", name)
    return value
