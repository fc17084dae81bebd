"""The two files of a batch: requests line by line, and results that survive a crash.

A result is one line, written at once and never changed. Whoever opens the file again learns what is done; a line
that was cut in the middle is dropped. Knows the envelope of a line, not the request inside.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from paceline.errors import InputError

DUPLICATE = "duplicate_custom_id"


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
            self.done_custom_ids: set[str] = set()
            self.done_ids: set[str] = set()  # of results whose line had no custom id of its own
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
            error = response["body"].get("error") or {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as wrong:
            message = (
                f"{self._path}: line {number} is not a result of a batch; give another file for the results"
            )
            raise InputError(message) from wrong
        if isinstance(name, str) and error.get("code") != DUPLICATE:
            self.done_custom_ids.add(name)
        else:
            self.done_ids.add(str(own))
