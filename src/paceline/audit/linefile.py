"""Lines of text on disk, plain or compressed: where a run log is written to and read from.

A failed write must not fail the step it tells of; what went wrong comes out when the file is closed. Knows
nothing of what the lines say.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TextIO, cast

from paceline.errors import InputError

_GZIP_MAGIC = b"\x1f\x8b"


class Damaged(Exception):
    """A compressed file is broken."""


class Unfinished(Damaged):
    """A compressed file has no end: it is still written, or its writer was killed."""


class LineFile:
    """Where lines go: a path (one that ends in `.gz` is compressed), or an open text file, which stays open.

    A write that fails must not fail the step it tells of: the rest is dropped, and `close` says so.
    """

    def __init__(self, target: str | Path | TextIO) -> None:
        self._name = str(target if isinstance(target, str | Path) else getattr(target, "name", "run log"))
        self._num_lines = 0
        self.problem: OSError | None = None  # why nothing is written any more
        self._owned: list[IO[Any]] = []  # to be closed, in this order
        self._raw: IO[bytes] | None = None
        self._file: TextIO = self._open(target) if isinstance(target, str | Path) else target

    def write(self, line: str) -> None:
        if self.problem is None:
            try:
                self._file.write(line + "\n")
                self._num_lines += 1
            except OSError as problem:
                self.problem = problem

    def flush(self) -> None:
        """Hand everything to the operating system: it is there when this process is killed."""
        if self.problem is None:
            try:
                self._file.flush()
            except OSError as problem:
                self.problem = problem

    @property
    def num_bytes(self) -> int:
        """The size of a file that was opened here, as far as it has been handed on."""
        return self._raw.tell() if self._raw is not None and not self._raw.closed else 0

    def close(self) -> None:
        """Flush, close what was opened here, and raise if a line could not be written."""
        for action in (self._file.flush, *(file.close for file in self._owned)):
            try:
                action()
            except OSError as problem:
                self.problem = self.problem or problem
        self._owned = []
        if self.problem is not None:
            reason = self.problem.strerror or self.problem
            raise InputError(f"{self._name} is cut off after line {self._num_lines}: {reason}")

    def _open(self, path: str | Path) -> TextIO:
        try:
            raw = Path(path).open("wb")  # noqa: SIM115 - closed by `close`
        except OSError as problem:
            raise InputError(f"cannot write run log {path}: {problem.strerror or problem}") from problem
        self._owned, self._raw = [raw], raw
        binary: IO[bytes] = raw
        if str(path).endswith(".gz"):
            # No name and no time in the gzip header: the same run gives the same bytes.
            binary = cast(IO[bytes], gzip.GzipFile("", "wb", 6, raw, mtime=0))
            self._owned = [binary, raw]
        text = io.TextIOWrapper(binary, encoding="ascii", newline="\n")
        self._owned = [text, *self._owned]
        return text


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file with their ends; its first bytes say whether it is compressed."""
    try:
        with _open(path) as file:
            yield from file
    except EOFError as problem:
        raise Unfinished(str(problem)) from problem
    except (zlib.error, gzip.BadGzipFile) as problem:
        raise Damaged(str(problem)) from problem
    except OSError as problem:
        raise InputError(f"cannot read run log {path}: {problem.strerror or problem}") from problem


def _open(path: Path) -> TextIO:
    with path.open("rb") as file:
        is_gzip = file.read(2) == _GZIP_MAGIC
    opened = gzip.open if is_gzip else open
    # Bytes that are no text stay in their line, so that the error can name it.
    return cast(TextIO, opened(path, "rt", encoding="utf-8", errors="surrogateescape", newline="\n"))
