"""The two files of a batch: requests line by line, and results that survive a crash.

A result is one line, written at once and never changed. Opening the file again reads which lines are done; a last line
that is incomplete is dropped. Knows the envelope of a line, not the request inside.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from paceline.errors import InputError, InvalidRequest

DUPLICATE = "duplicate_custom_id"
OK = 200


class DuplicateId(InvalidRequest):
    """A custom id that an earlier line has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLine:
    """A line of the input: what its envelope says, or what is wrong with it, and whether it has a result."""

    number: int
    custom_id: str | None
    envelope: Mapping[str, Any] = field(default_factory=dict)
    error: InvalidRequest | None = None
    earlier_status: int | None = None  # of its result; None: it has none yet


def result_id(number: int) -> str:
    """The id of the result of an input line."""
    return f"batch_req_{number}"


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error


class ResultFile:
    """Results, appended and flushed one by one. Only one process at a time writes to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
        try:
            self._lock()
            self._by_custom_id: dict[str, int] = {}  # status of a result
            self._by_id: dict[str, int] = {}  # of results whose line had no custom id of its own
            self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def match(self, lines: Iterable[tuple[int, bytes]]) -> Iterator[InputLine]:
        """The lines of an input, each with its result in this file. A repeated custom id is an error."""
        seen: set[str] = set()
        for number, raw in lines:
            custom_id: str | None = None
            try:
                envelope = _envelope(raw)
                custom_id = _custom_id(envelope)
                if custom_id in seen:
                    raise DuplicateId(
                        f"custom_id {custom_id!r:.200} is used by an earlier line", param="custom_id"
                    )
            except InvalidRequest as error:
                status = self._by_id.get(result_id(number))
                yield InputLine(number=number, custom_id=custom_id, error=error, earlier_status=status)
                continue
            seen.add(custom_id)
            status = self._by_custom_id.get(custom_id)
            yield InputLine(number=number, custom_id=custom_id, envelope=envelope, earlier_status=status)

    def write(self, result: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(result).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{self._path}: another process is writing to it") from error

    def _scan(self) -> None:
        """Take in what is done, and drop a last line that is not complete."""
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            self._take(number, line)
            end += len(line)
        os.truncate(self._file.fileno(), end)

    def _take(self, number: int, line: bytes) -> None:
        try:
            result = json.loads(line)
            name, own, response = result["custom_id"], result["id"], result["response"]
            status, error = int(response["status_code"]), response["body"].get("error") or {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as wrong:
            message = (
                f"{self._path}: line {number} is not a result of a batch; give another file for the results"
            )
            raise InputError(message) from wrong
        if isinstance(name, str) and error.get("code") != DUPLICATE:
            self._by_custom_id[name] = status
        else:
            self._by_id[str(own)] = status


def _envelope(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("it is not JSON") from error
    if not isinstance(value, dict):
        raise InvalidRequest("it is not a JSON object")
    return value


def _custom_id(envelope: Mapping[str, Any]) -> str:
    custom_id = envelope.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest("custom_id must be a text that is not empty", param="custom_id")
    return custom_id
