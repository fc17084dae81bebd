"""Decisions on disk: an append-only chain of pages in SQLite files, where every page holds the hash of the one before.

A folder holds files named after their first page; when one has grown large the next begins, and the oldest go when
there are too many or they are too old. What was changed, taken out or put in between breaks the chain, and `verify`
says in which page. A write that a crash interrupted is no change: SQLite undoes it, and the chain ends before it. Knows
pages as JSON texts with a number of entries each, and nothing of what they say.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import re
import shutil
import sqlite3
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.audit.codec import plain
from paceline.core.events import Decision
from paceline.core.inputs import AddRequest, Done
from paceline.core.recorder import Inputs, StepRecord
from paceline.errors import InputError
from paceline.version import __version__

NO_HASH = "0" * 64  # before the first page
_NAME = re.compile(r"decisions-(\d{12})\.db")
_SCHEMA = """
CREATE TABLE pages (
    page INTEGER PRIMARY KEY,
    first INTEGER NOT NULL,
    count INTEGER NOT NULL,
    body TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL
) STRICT;
CREATE TRIGGER no_update BEFORE UPDATE ON pages BEGIN SELECT RAISE(ABORT, 'pages are never changed'); END;
CREATE TRIGGER no_delete BEFORE DELETE ON pages BEGIN SELECT RAISE(ABORT, 'pages are never taken out'); END;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How large a file gets, how many are kept, and for how long."""

    max_bytes: int = 64 << 20
    max_files: int = 16
    max_age_s: float = 30 * 86400.0


class Page(NamedTuple):
    """Some entries, and what chains them to those before."""

    page: int  # pages are numbered from 1
    first: int  # number of its first entry; entries are numbered from 1 through all pages
    # How many entries it has. (A tuple's own `count` is of no use here.)
    count: int  # type: ignore[assignment]
    body: str
    previous: str
    hash: str

    @property
    def last(self) -> int:
        return self.first + self.count - 1


class End(NamedTuple):
    """Where a chain ends, and the next page goes on."""

    page: int = 0
    entry: int = 0
    hash: str = NO_HASH


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCheck:
    """What a look at the whole chain found."""

    first: Page | None  # the first page that is there
    end: End  # of what is whole
    problem: str  # "", or what is wrong where
    undone: bool  # a write that a crash interrupted left its traces, and does not count

    @property
    def num_entries(self) -> int:
        return 0 if self.first is None else self.end.entry - self.first.first + 1


def chained(previous: str, page: int, first: int, count: int, body: str) -> str:
    """The hash of a page: of its numbers, its text and everything before it."""
    return hashlib.sha256(f"{previous}\n{page}\n{first}\n{count}\n{body}".encode()).hexdigest()


class TrailDb:
    """The chain of one folder, to be added to. One writer at a time."""

    def __init__(self, folder: str | Path, retention: Retention | None = None) -> None:
        self._folder = Path(folder)
        self._retention = retention or Retention()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files = trail_files(self._folder)
            self.end = _end_of(files[-1]) if files else End()
            self._path = files[-1] if files else self._file_from(1)
            self._connection = _open(self._path, self.end.page == 0)
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"the decision log in {folder} cannot be opened: {error}") from error

    def append(self, bodies: Sequence[tuple[str, int]]) -> None:
        """Add pages (a text, and how many entries it has), all or none, and see to it that they are on the disk."""
        rows: list[Page] = []
        number, entry, head = self.end
        for body, count in bodies:
            number += 1
            own = chained(head, number, entry + 1, count, body)
            rows.append(Page(number, entry + 1, count, body, head, own))
            entry, head = entry + count, own
        with self._connection:
            self._connection.executemany("INSERT INTO pages VALUES (?, ?, ?, ?, ?, ?)", rows)
        self.end = End(number, entry, head)
        if self._path.stat().st_size >= self._retention.max_bytes:
            self._rotate()

    def close(self) -> None:
        self._connection.close()

    def _rotate(self) -> None:
        self._connection.close()
        self._path = self._file_from(self.end.page + 1)
        self._connection = _open(self._path, True)
        files = trail_files(self._folder)
        oldest_s = time.time() - self._retention.max_age_s
        for index, path in enumerate(files[:-1]):
            if len(files) - index > self._retention.max_files or path.stat().st_mtime < oldest_s:
                path.unlink()

    def _file_from(self, page: int) -> Path:
        return self._folder / f"decisions-{page:012}.db"


# -- reading -----------------------------------------------------------------------------------------------


class TrailReader:
    """The pages of a folder, in order. Nothing in the folder is changed by reading it."""

    def __init__(self, folder: str | Path) -> None:
        self.undone = False  # a write that a crash interrupted was left out
        try:
            self._files = trail_files(Path(folder))
        except OSError as error:
            raise InputError(f"the decision log in {folder} cannot be read: {error.strerror}") from error
        if not self._files:
            raise InputError(f"{folder} holds no decision log: there is no file decisions-NUMBER.db")

    def __iter__(self) -> Iterator[Page]:
        for path in self._files:
            try:
                yield from self._pages(path)
            except sqlite3.Error as error:
                raise InputError(f"{path} cannot be read: {error}") from error

    def _pages(self, path: Path) -> Iterator[Page]:
        with tempfile.TemporaryDirectory(prefix="paceline-audit-") as folder:
            try:
                connection = _read_only(path)
            except sqlite3.OperationalError:
                if not _journal(path).exists():
                    raise
                # Its writer died in the middle of a write. Undoing that changes the file, so it is done in a copy.
                connection = _read_only(_recovered(path, Path(folder)))
                self.undone = True
            with closing(connection):
                for row in connection.execute("SELECT * FROM pages ORDER BY page"):
                    yield Page(*row)


def trail_files(folder: Path) -> list[Path]:
    """The files of a chain, oldest first."""
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def verify(folder: str | Path, known_head: str = "") -> ChainCheck:
    """Walk the chain. With `known_head`, a hash that was noted earlier, its end cannot have been cut off unseen."""
    reader = TrailReader(folder)
    first: Page | None = None
    end, seen, problem = End(), not known_head, ""
    for page in reader:
        problem = _problem(page, end, is_first=first is None)
        if problem:
            return ChainCheck(first=first, end=end, problem=problem, undone=reader.undone)
        first = first or page
        end = End(page.page, page.last, page.hash)
        seen = seen or page.hash == known_head
    if not seen:
        problem = f"no page has the hash {known_head}: what was there then is gone or was changed"
    return ChainCheck(first=first, end=end, problem=problem, undone=reader.undone)


def _problem(page: Page, end: End, *, is_first: bool) -> str:
    """What is wrong with a page that comes after `end`; the first one that is kept may come after anything."""
    named = f"page {page.page} (entries {page.first:,} to {page.last:,})"
    if not is_first and page.page != end.page + 1:
        return f"page {page.page} follows page {end.page}"
    if (not is_first or page.page == 1) and page.previous != end.hash:
        return f"{named} does not go on from the one before it"
    if chained(page.previous, page.page, page.first, page.count, page.body) != page.hash:
        return f"{named} was changed"
    return ""


def _open(path: Path, is_new: bool) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA synchronous=FULL")
    if is_new and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
        connection.executescript(_SCHEMA)
    return connection


def _read_only(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _journal(path: Path) -> Path:
    return path.with_name(f"{path.name}-journal")


def _recovered(path: Path, folder: Path) -> Path:
    """A copy in which SQLite has undone what was not finished."""
    copy = folder / path.name
    shutil.copyfile(path, copy)
    shutil.copyfile(_journal(path), _journal(copy))
    with closing(sqlite3.connect(copy)) as connection:
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
    return copy


def _end_of(path: Path) -> End:
    """Where a file ends; one that was begun and never written to ends where the one before it does."""
    with closing(sqlite3.connect(path)) as connection:
        has_pages = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'pages'").fetchone()
        query = "SELECT page, first + count - 1, hash FROM pages ORDER BY page DESC LIMIT 1"
        row = connection.execute(query).fetchone() if has_pages else None
        if not has_pages and connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise sqlite3.DatabaseError(
                f"{path.name} is no decision log of this version; name another folder"
            )
    if row is not None:
        return End(*row)
    before = [other for other in trail_files(path.parent) if other.name < path.name]
    return _end_of(before[-1]) if before else End()


# JSON texts of whole pages, made in native code: the thread that makes them shares the interpreter with the engine.
#
# With msgspec, which a server has anyway, a decision takes a quarter of a microsecond; the standard library takes
# two. Both texts say the same, not byte for byte, so that only what is never compared with another text may be made
# here: pages of the decision log, not lines of the run log.


_standard = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=plain, check_circular=False)


def standard_text(value: Any) -> str:
    """Named tuples and texts of an enumeration become lists and texts without a step in between."""
    try:
        return _standard.encode(value)
    except ValueError:  # a number that JSON lacks
        return _standard.encode(plain(value))


def _native_text() -> Callable[[Any], str]:
    try:
        import msgspec
    except ImportError:  # an engine runs without a server's libraries too
        return standard_text
    encoder = msgspec.json.Encoder(enc_hook=plain)
    return lambda value: encoder.encode(value).decode()


page_text = _native_text()


# From the engine's records to the decision log: a separate thread makes pages of them and writes these.
#
# A step pays for one append to a queue, whatever it decided. Everything else is the thread's: it shares the
# interpreter with the engine, so that it makes its pages in native code, a few hundred decisions at a time. The
# queue is bounded: what a slow disk does not take is left out, and a page says how much. A disk that fails stops
# the writing, never the engine.


INTERVAL_S = 0.5
MOST_WAITING = 4096  # steps whose decisions are not written yet
PAGE = 256  # decisions of a page, those of one step aside: what is one call to native code, and holds the engine up

_logger = logging.getLogger("paceline")
Step = tuple[Inputs, Sequence[Decision]]


class TrailWriter:
    """A `StepRecorder` that keeps decisions for good."""

    def __init__(self, db: TrailDb, interval_s: float = INTERVAL_S, most_waiting: int = MOST_WAITING) -> None:
        self._db = db
        self._waiting: deque[Step] = deque()
        self._most = most_waiting
        self._lost = 0
        self._interval_s = interval_s
        self._has_begun = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-trail", daemon=True)
        self._thread.start()
        atexit.register(self.close, (), ())  # for owners that never close their engine

    def step(self, record: StepRecord) -> None:
        inputs = record.inputs
        if not record.decisions and len(inputs) == 1 and isinstance(inputs[0][1], Done):
            return  # a step of plain decode
        if len(self._waiting) < self._most:
            self._waiting.append((inputs, record.decisions))
        else:
            self._lost += len(record.decisions)

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        """Write what is left. A second call does nothing."""
        if not self._closed.is_set():
            self._waiting.append((inputs, decisions))
            self._closed.set()
            self._thread.join()
            self._db.close()
            atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._interval_s):
                self._write()
            self._write()
        except Exception:
            _logger.exception("decisions are not written any more")
            self._most = 0  # nothing piles up for a disk that takes nothing
            self._waiting.clear()

    def _write(self) -> None:
        """One transaction for everything that waits."""
        waiting = self._waiting
        pages = list(make_pages(waiting.popleft() for _ in range(len(waiting))))
        lost, self._lost = self._lost, 0
        if lost:
            pages.append((page_text({"lost": lost}), 0))
        if not pages:
            return
        if not self._has_begun:
            self._has_begun = True
            pages.insert(0, (_start(), 0))
        self._db.append(pages)


def make_pages(steps: Iterable[Step]) -> Iterator[tuple[str, int]]:
    """Texts of pages, each with its number of decisions. A step is never divided."""
    adds: list[tuple[object, ...]] = []
    decisions: list[Decision] = []
    for inputs, decided in steps:
        for _, add in inputs:
            if isinstance(add, AddRequest):
                sizes = (add.id, add.num_prompt, add.max_tokens)
                adds.append((*sizes, add.arrival_s, add.tenant, add.priority, add.parent, add.service_class))
        decisions += decided
        if len(decisions) >= PAGE or len(adds) >= PAGE:
            yield page_text({"adds": adds, "decisions": decisions}), len(decisions)
            adds, decisions = [], []
    if adds or decisions:
        yield page_text({"adds": adds, "decisions": decisions}), len(decisions)


def _start() -> str:
    """A run begins: its requests are numbered anew, and its clock is not that of the run before."""
    now = {"unix_s": round(time.time(), 3), "clock_s": time.monotonic()}
    return page_text({"start": {"version": __version__, **now}})
