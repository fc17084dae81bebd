"""Decisions on disk: an append-only chain in SQLite files, where every entry holds the hash of the one before.

A folder holds files named after their first entry; when one has grown large the next begins, and the oldest go when
there are too many or they are too old. What was changed, taken out or put in between breaks the chain, and `verify`
says where. Knows entries as JSON texts and nothing of what they say.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InputError

NO_HASH = "0" * 64  # before the first entry
_NAME = re.compile(r"decisions-(\d{12})\.db")
_SCHEMA = """
CREATE TABLE entries (seq INTEGER PRIMARY KEY, body TEXT NOT NULL, previous TEXT NOT NULL, hash TEXT NOT NULL) STRICT;
CREATE TRIGGER no_update BEFORE UPDATE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
CREATE TRIGGER no_delete BEFORE DELETE ON entries BEGIN SELECT RAISE(ABORT, 'entries are never taken out'); END;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How large a file gets, how many are kept, and for how long."""

    max_bytes: int = 64 << 20
    max_files: int = 16
    max_age_s: float = 30 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a look at the whole chain found."""

    first: int  # number of the first entry that is there; 0 when there is none
    last: int
    head: str  # hash of the last entry
    problem: str  # "", or what is wrong where


def chained(previous: str, seq: int, body: str) -> str:
    """The hash of an entry: of its number, its text and everything before it."""
    return hashlib.sha256(f"{previous}\n{seq}\n{body}".encode()).hexdigest()


class TrailDb:
    """The chain of one folder, to be added to. One writer at a time."""

    def __init__(self, folder: str | Path, retention: Retention | None = None) -> None:
        self._folder = Path(folder)
        self._retention = retention or Retention()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files = trail_files(self._folder)
            self._seq, self._head = _end_of(files[-1]) if files else (0, NO_HASH)
            self._path = files[-1] if files else self._file_from(1)
            self._connection = _open(self._path, self._seq == 0)
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"the decision log in {folder} cannot be opened: {error}") from error

    @property
    def head(self) -> tuple[int, str]:
        """Number and hash of the last entry."""
        return self._seq, self._head

    def append(self, bodies: Sequence[str]) -> None:
        """Add entries, all or none, and see to it that they are on the disk."""
        rows, seq, head = [], self._seq, self._head
        for body in bodies:
            seq += 1
            previous, head = head, chained(head, seq, body)
            rows.append((seq, body, previous, head))
        with self._connection:
            self._connection.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
        self._seq, self._head = seq, head
        if self._path.stat().st_size >= self._retention.max_bytes:
            self._rotate()

    def close(self) -> None:
        self._connection.close()

    def _rotate(self) -> None:
        self._connection.close()
        self._path = self._file_from(self._seq + 1)
        self._connection = _open(self._path, True)
        files = trail_files(self._folder)
        oldest_s = time.time() - self._retention.max_age_s
        for index, path in enumerate(files[:-1]):
            if len(files) - index > self._retention.max_files or path.stat().st_mtime < oldest_s:
                path.unlink()

    def _file_from(self, seq: int) -> Path:
        return self._folder / f"decisions-{seq:012}.db"


def trail_files(folder: Path) -> list[Path]:
    """The files of a chain, oldest first."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def read_entries(folder: str | Path) -> Iterator[tuple[int, str, str, str]]:
    """Number, text, previous hash and hash of every entry. Raises InputError for what is no decision log."""
    try:
        files = trail_files(Path(folder))
    except OSError as error:
        raise InputError(f"the decision log in {folder} cannot be read: {error.strerror}") from error
    if not files:
        raise InputError(f"{folder} holds no decision log: there is no file decisions-NUMBER.db")
    for path in files:
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                yield from connection.execute("SELECT seq, body, previous, hash FROM entries ORDER BY seq")
        except sqlite3.Error as error:
            raise InputError(f"{path} cannot be read: {error}") from error


def verify(folder: str | Path, known_head: str = "") -> Verdict:
    """Walk the chain. With `known_head`, a hash that was noted earlier, its end cannot have been cut off unseen."""
    first = last = 0
    head, seen = NO_HASH, not known_head
    for seq, body, previous, own in read_entries(folder):
        problem = ""
        if last and seq != last + 1:
            problem = f"entry {seq} follows entry {last}"
        elif (last or seq == 1) and previous != head:
            problem = f"entry {seq} does not go on from the one before it"
        elif chained(previous, seq, body) != own:
            problem = f"entry {seq} was changed"
        if problem:
            return Verdict(first=first, last=last, head=head, problem=problem)
        first, last, head = first or seq, seq, own
        seen = seen or own == known_head
    problem = (
        "" if seen else f"no entry has the hash {known_head}: what was there then is gone or was changed"
    )
    return Verdict(first=first, last=last, head=head, problem=problem)


def _open(path: Path, is_new: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA synchronous=FULL")
    if is_new and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        connection.executescript(_SCHEMA)
    return connection


def _end_of(path: Path) -> tuple[int, str]:
    """Number and hash of the last entry; of a file that was begun and never written to, those before it."""
    with closing(sqlite3.connect(path)) as connection:
        row = connection.execute("SELECT seq, hash FROM entries ORDER BY seq DESC LIMIT 1").fetchone()
    if row is not None:
        return int(row[0]), str(row[1])
    before = [other for other in trail_files(path.parent) if other.name < path.name]
    return _end_of(before[-1]) if before else (0, NO_HASH)
