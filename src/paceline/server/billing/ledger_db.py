"""The ledger on disk: an append-only SQLite file with one entry for each request.

An entry is rows that are only ever added, never changed: `opened` when the engine is given the request, `closed` when
it is over, `voided` when its last frame was not sent after all. Numbers are unique in each, so that nothing can be
written twice. A transaction that has returned is on the disk (write-ahead log, synchronous FULL). What a killed server
left undone is done when the next one starts (`_recover`). One server at a time: a lock file beside the ledger sees to
that.
"""

from __future__ import annotations

import os
import sqlite3
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from paceline.core.shared_files import take_lock
from paceline.errors import InputError

# Which entries' last frames were handed to the network: a file of numbers, each written right before its frame.
#
# An entry is on the disk before its frame leaves, and getting it there takes milliseconds in which a server may be
# killed. A mark takes microseconds: it goes to the memory of the system, which outlives the process but not the
# machine. After a kill, an entry without a mark was never sent. After a restart of the machine marks say nothing,
# and `boot_id` tells the two apart.


_MARK = struct.Struct("<q")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SentMarks:
    """The marks beside one ledger, for the one server that writes them."""

    def __init__(self, ledger: Path) -> None:
        self._path = Path(f"{ledger}.sent")
        self.earlier = _read(self._path)  # of the server before; None where there is no file
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def forget_earlier(self) -> None:
        """What they said has been written to the ledger."""
        self.earlier = None
        os.ftruncate(self._file, 0)

    def note(self, seq: int) -> None:
        """The last frame of this entry is about to be sent. Raises OSError."""
        if os.write(self._file, _MARK.pack(seq)) != _MARK.size:
            raise OSError("a mark was written in part")

    def close(self) -> None:
        os.close(self._file)


def boot_id() -> str:
    """Another one each time the machine starts; "" where there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _read(path: Path) -> frozenset[int] | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    whole = len(data) - len(data) % _MARK.size
    return frozenset(number for (number,) in _MARK.iter_unpack(data[:whole]))


COMPLETE, INCOMPLETE = "complete", "incomplete"
SERVER_LOST = "server_lost"
VERSION = 1
BUSY_S = 2.0  # how long a transaction waits for another process's lock
_APPLICATION = 0x504C4C47
_TABLES = ("opened", "closed", "voided", "lives", "ends")
_GUARDS = "".join(
    f"CREATE TRIGGER {table}_{verb} BEFORE {verb} ON {table} "
    "BEGIN SELECT RAISE(ABORT, 'entries are kept as they are'); END;"
    for table in _TABLES
    for verb in ("UPDATE", "DELETE")
)
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
CREATE TABLE voided (
  seq INTEGER PRIMARY KEY REFERENCES closed (seq), voided_ms INTEGER NOT NULL, reason TEXT NOT NULL
) STRICT;
CREATE TABLE lives (
  life INTEGER PRIMARY KEY, started_ms INTEGER NOT NULL, first_seq INTEGER NOT NULL, boot_id TEXT NOT NULL
) STRICT;
CREATE TABLE ends (life INTEGER PRIMARY KEY REFERENCES lives (life), ended_ms INTEGER NOT NULL) STRICT;
CREATE VIEW entries AS SELECT opened.*,
  CASE WHEN voided.seq IS NOT NULL THEN '{INCOMPLETE}' ELSE coalesce(state, 'open') END AS state,
  coalesce(voided_ms, closed_ms) AS closed_ms, coalesce(voided.reason, closed.reason) AS reason, cached_tokens,
  iif(voided.seq IS NULL, output_tokens, 0) AS output_tokens, recomputed_tokens, preemptions, swaps, queue_us, block_us,
  redone_block_us, iif(voided.seq IS NULL, prompt_nano, 0) AS prompt_nano,
  iif(voided.seq IS NULL, cached_nano, 0) AS cached_nano, iif(voided.seq IS NULL, output_nano, 0) AS output_nano,
  iif(voided.seq IS NULL, kv_nano, 0) AS kv_nano,
  iif(voided.seq IS NULL, prompt_nano + cached_nano + output_nano + kv_nano, 0) AS total_nano
  FROM opened LEFT JOIN closed USING (seq) LEFT JOIN voided USING (seq);
{_GUARDS}
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
class Voiding:
    """An entry that was closed as complete, and whose last frame was not sent; it costs nothing."""

    seq: int
    voided_ms: int
    reason: str


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
_VOID = "INSERT INTO voided VALUES (?, ?, ?) ON CONFLICT (seq) DO NOTHING"
_LOST = f"""
INSERT INTO closed SELECT seq, ?, '{INCOMPLETE}', '{SERVER_LOST}', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
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
                self.marks = SentMarks(self.path)
                self.connection = _open(self.path)
                self._recover()
        except BaseException:
            os.close(self._lock)
            raise

    def _recover(self) -> None:
        """Close what a killed server left open, void what it did not send any more, and begin a life of our own."""
        connection = self.connection
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            unsent = self._unsent()
            connection.executemany(_VOID, [(seq, now_ms(), SERVER_LOST) for seq in unsent])
            self.num_lost = connection.execute(_LOST, (now_ms(),)).rowcount + len(unsent)
            (last,) = connection.execute("SELECT coalesce(max(seq), 0) FROM opened").fetchone()
            self.next_seq = int(last) + 1
            life = (now_ms(), self.next_seq, boot_id())
            self._life = connection.execute("INSERT INTO lives VALUES (NULL, ?, ?, ?)", life).lastrowid
        self.marks.forget_earlier()

    def _unsent(self) -> list[int]:
        """Entries of the life before that were written and not sent, as far as marks can tell."""
        marks = self.marks.earlier
        last = self.connection.execute(
            "SELECT first_seq, boot_id, ends.life IS NOT NULL FROM lives LEFT JOIN ends USING (life) "
            "ORDER BY lives.life DESC LIMIT 1"
        ).fetchone()
        if last is None or marks is None:
            return []
        first, boot, has_ended = last
        if has_ended or not boot or boot != boot_id():
            return []
        found = self.connection.execute(
            f"SELECT seq FROM closed WHERE seq >= ? AND state = '{COMPLETE}' AND seq NOT IN (SELECT seq FROM voided)",
            (first,),
        )
        return [seq for (seq,) in found if seq not in marks]

    def write(
        self, openings: Sequence[Opening], closings: Sequence[Closing], voidings: Sequence[Voiding] = ()
    ) -> None:
        """Add rows, all or none; when this returns they are on the disk. Raises sqlite3.Error."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            connection.executemany(_OPEN, map(astuple, openings))
            connection.executemany(_CLOSE, map(astuple, closings))
            connection.executemany(_VOID, map(astuple, voidings))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise

    def close(self, *, is_settled: bool = True) -> None:
        """`is_settled`: everything is written, and the next server has nothing to make good."""
        try:
            if is_settled:
                with suppress(sqlite3.Error):  # then the next server looks for itself
                    self.connection.execute("INSERT INTO ends VALUES (?, ?)", (self._life, now_ms()))
            self.connection.close()
            self.marks.close()
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
    with _speaking(path):
        lock = take_lock(Path(f"{path}.lock"))
    if lock is None:
        raise BadLedger(f"the ledger {path} is in use by another server; stop that one or name another file")
    return lock


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
