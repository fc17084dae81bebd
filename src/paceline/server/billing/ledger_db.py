"""The ledger on disk: an append-only SQLite file with one entry for each request.

An entry is two rows that are only ever added, never changed: `opened` when the engine is given the request, `closed`
when it is over. Number and id are unique in each, so that nothing can be written twice. A transaction that has returned
is on the disk (write-ahead log, synchronous FULL). Entries that a killed server left open are closed as incomplete,
with nothing to pay, when the next one starts. One server at a time: a lock file beside the ledger sees to that.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from paceline.errors import InputError

COMPLETE, INCOMPLETE = "complete", "incomplete"
VERSION = 1
BUSY_S = 2.0  # how long a transaction waits for somebody who has locked the file
_APPLICATION = 0x504C4C47
_SCHEMA = f"""
BEGIN;
CREATE TABLE opened (
  seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, opened_ms INTEGER NOT NULL, key TEXT NOT NULL, class TEXT NOT NULL,
  model TEXT NOT NULL, route TEXT NOT NULL, prompt_tokens INTEGER NOT NULL, factor INTEGER NOT NULL,
  prompt_rate INTEGER NOT NULL, cached_rate INTEGER NOT NULL, output_rate INTEGER NOT NULL, kv_rate INTEGER NOT NULL
) STRICT;
CREATE INDEX opened_by_time ON opened (opened_ms);
CREATE TABLE closed (
  seq INTEGER PRIMARY KEY REFERENCES opened (seq), closed_ms INTEGER NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('{COMPLETE}', '{INCOMPLETE}')), reason TEXT NOT NULL,
  cached_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, recomputed_tokens INTEGER NOT NULL,
  preemptions INTEGER NOT NULL, swaps INTEGER NOT NULL, queue_us INTEGER NOT NULL, block_us INTEGER NOT NULL,
  redone_block_us INTEGER NOT NULL, prompt_nano INTEGER NOT NULL, cached_nano INTEGER NOT NULL,
  output_nano INTEGER NOT NULL, kv_nano INTEGER NOT NULL
) STRICT;
CREATE VIEW entries AS SELECT opened.*, coalesce(state, 'open') AS state, closed_ms, reason, cached_tokens,
  output_tokens, recomputed_tokens, preemptions, swaps, queue_us, block_us, redone_block_us, prompt_nano, cached_nano,
  output_nano, kv_nano, prompt_nano + cached_nano + output_nano + kv_nano AS total_nano
  FROM opened LEFT JOIN closed USING (seq);
CREATE TRIGGER opened_stays BEFORE UPDATE ON opened BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
CREATE TRIGGER closed_stays BEFORE UPDATE ON closed BEGIN SELECT RAISE(ABORT, 'entries are never changed'); END;
CREATE TRIGGER opened_is_kept BEFORE DELETE ON opened BEGIN SELECT RAISE(ABORT, 'entries are never taken out'); END;
CREATE TRIGGER closed_is_kept BEFORE DELETE ON closed BEGIN SELECT RAISE(ABORT, 'entries are never taken out'); END;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {VERSION};
COMMIT;
"""


class BadLedger(InputError):
    """The ledger cannot be used."""

    exit_code = 78


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A request the engine was given; the fields are the columns of `opened`, in their order."""

    seq: int
    id: str
    opened_ms: int  # Unix time
    key: str
    service_class: str
    model: str
    route: str
    prompt_tokens: int
    factor: int
    prompt_rate: int
    cached_rate: int
    output_rate: int
    kv_rate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """What became of it; the fields are the columns of `closed`, in their order."""

    seq: int
    closed_ms: int
    state: str
    reason: str
    cached_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    queue_us: int = 0
    block_us: int = 0
    redone_block_us: int = 0
    prompt_nano: int = 0
    cached_nano: int = 0
    output_nano: int = 0
    kv_nano: int = 0


# Ids are made by the server and unique; if a caller brings one again, its number tells the two apart.
_ID = "CASE WHEN EXISTS (SELECT 1 FROM opened WHERE id = ?2) THEN ?2 || '#' || ?1 ELSE ?2 END"
_OPEN = (
    f"INSERT INTO opened VALUES (?1, {_ID}, {', '.join(f'?{n + 1}' for n in range(2, len(fields(Opening))))})"
)
_CLOSE = f"INSERT INTO closed VALUES ({', '.join('?' * len(fields(Closing)))}) ON CONFLICT (seq) DO NOTHING"
_LOST = f"""
INSERT INTO closed SELECT seq, ?, '{INCOMPLETE}', 'server_lost', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
FROM opened WHERE seq NOT IN (SELECT seq FROM closed)
"""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class LedgerDb:
    """The one writer of a ledger. Raises BadLedger when it cannot be had."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self._lock = _lock(self.path)
        try:
            with _speaking(self.path):
                self.connection = _open(self.path)
                with self.connection:
                    self.connection.execute("BEGIN IMMEDIATE")
                    self.num_lost = self.connection.execute(_LOST, (now_ms(),)).rowcount
                (last,) = self.connection.execute("SELECT coalesce(max(seq), 0) FROM opened").fetchone()
                self.next_seq = int(last) + 1
        except BaseException:
            os.close(self._lock)
            raise

    def write(self, openings: Sequence[Opening], closings: Sequence[Closing]) -> None:
        """Add rows, all or none; when this returns they are on the disk. Raises sqlite3.Error."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany(_OPEN, map(astuple, openings))
            connection.executemany(_CLOSE, map(astuple, closings))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def close(self) -> None:
        try:
            self.connection.close()
        finally:
            os.close(self._lock)


def reading(path: str | Path) -> sqlite3.Connection:
    """A connection that only reads; a server may be writing meanwhile. Raises BadLedger."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise BadLedger(f"there is no ledger {path}; a server writes one with --ledger {path}")
    with _speaking(path):
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=BUSY_S)
        try:
            _check_kind(connection, path)
        except BaseException:
            connection.close()
            raise
        return connection


@contextmanager
def _speaking(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise BadLedger(
            f"the ledger {path} cannot be used: {error}; see to the file or name another"
        ) from error


def _lock(path: Path) -> int:
    """A descriptor that holds the lock for as long as it is open, whatever ends the process."""
    with _speaking(path):
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise BadLedger(
            f"the ledger {path} is in use by another server; stop that one or name another file"
        ) from error
    return descriptor


def _open(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        is_new = not connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        if not is_new:
            _check_kind(connection, path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        if is_new:
            connection.executescript(_SCHEMA)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_kind(connection: sqlite3.Connection, path: Path) -> None:
    (kind,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if kind != _APPLICATION:
        raise BadLedger(f"{path} is no ledger of this program; name another file")
    if version != VERSION:
        raise BadLedger(f"the ledger {path} has version {version}, this program reads {VERSION}; update it")
