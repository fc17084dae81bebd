"""What is known of files, batches, lines and results, in one SQLite file that survives whatever ends the server.

A change is on the disk when its method returns. A line has one result: the first that was recorded. Belongs to one
thread; bytes of files are `folder`'s business.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.server.batches.batch_records import (
    IN_PROGRESS,
    OPEN_STATES,
    STATES,
    VALIDATING,
    Batch,
    BatchLine,
    LineResult,
    StoredFile,
)

VERSION = 1
MAX_KEPT_BATCHES = 10_000  # of one tenant, that are over; older ones are forgotten
_FILE = tuple(spec.name for spec in fields(StoredFile))
_BATCH = tuple(spec.name for spec in fields(Batch))
_LINE = tuple(spec.name for spec in fields(BatchLine))
_IS_OPEN = f"status IN ({', '.join(map(repr, OPEN_STATES))})"
_SCHEMA = f"""
CREATE TABLE files (seq INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_FILE)}, UNIQUE (id));
CREATE INDEX files_of_tenant ON files (tenant, seq);
CREATE TABLE batches (seq INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_BATCH)}, UNIQUE (id));
CREATE INDEX batches_of_tenant ON batches (tenant, seq);
CREATE INDEX batches_by_status ON batches (status, seq);
CREATE TABLE lines (batch_id, {", ".join(_LINE)}, PRIMARY KEY (batch_id, number)) WITHOUT ROWID;
CREATE TABLE results (batch_id, number, is_ok, data BLOB, PRIMARY KEY (batch_id, number));
PRAGMA user_version = {VERSION};
"""


class WrongVersion(Exception):
    """The database was made by another version of the program."""


class Database:
    """One connection. Raises sqlite3.Error where the disk does not do what it should."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self.connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")  # committed means on the disk
            (version,) = self.connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self.connection.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
            elif version != VERSION:
                raise WrongVersion(f"it has version {version}, and this program reads version {VERSION}")
        except BaseException:
            self.connection.close()
            raise

    def close(self) -> None:
        self.connection.close()

    @contextlib.contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    # -- files ---------------------------------------------------------------------------------------------

    def add_file(self, file: StoredFile) -> None:
        with self._change() as db:
            _insert(db, "files", _FILE, [file])

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        found = self._select("files", _FILE, "tenant = ? AND id = ?", (tenant, file_id))
        return StoredFile(**found[0]) if found else None

    def files(
        self, tenant: str, *, after: str | None, limit: int, newest_first: bool, purpose: str | None
    ) -> list[StoredFile] | None:
        """A page of a tenant's files; None when `after` is not one of them."""
        where, values = "tenant = ?", [tenant]
        if purpose is not None:
            where, values = where + " AND purpose = ?", [*values, purpose]
        page = self._page("files", _FILE, where, values, after, limit, newest_first=newest_first)
        return None if page is None else [StoredFile(**row) for row in page]

    def remove_file(self, tenant: str, file_id: str) -> bool:
        """Forget a file; False when a batch that is not over reads it."""
        with self._change() as db:
            used = db.execute(
                f"SELECT 1 FROM batches WHERE tenant = ? AND input_file_id = ? AND {_IS_OPEN}",
                (tenant, file_id),
            ).fetchone()
            if used is None:
                db.execute("DELETE FROM files WHERE tenant = ? AND id = ?", (tenant, file_id))
            return used is None

    def file_ids(self) -> set[str]:
        return {name for (name,) in self.connection.execute("SELECT id FROM files")}

    def expired_files(self, now: int) -> list[StoredFile]:
        return [StoredFile(**row) for row in self._select("files", _FILE, "expires_at <= ?", (now,))]

    def stored(self, tenant: str) -> tuple[int, int]:
        """How many files a tenant has, and the bytes of them and of results that are not files yet."""
        number, stored = self.connection.execute(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM files WHERE tenant = ?", (tenant,)
        ).fetchone()
        (under_way,) = self.connection.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM results WHERE batch_id IN "
            "(SELECT id FROM batches WHERE tenant = ? AND status = ?)",
            (tenant, IN_PROGRESS),
        ).fetchone()
        return int(number), int(stored) + int(under_way)

    # -- batches -------------------------------------------------------------------------------------------

    def add_batch(self, batch: Batch) -> bool:
        """Begin a batch; False when its input is not there any more."""
        with self._change() as db:
            known = db.execute(
                "SELECT 1 FROM files WHERE tenant = ? AND id = ?", (batch.tenant, batch.input_file_id)
            ).fetchone()
            if known is not None:
                _insert(db, "batches", _BATCH, [batch])
                _forget_old(db, batch.tenant)
            return known is not None

    def batch(self, batch_id: str, tenant: str | None = None) -> Batch | None:
        """A batch by its id; of one tenant only, where one is named."""
        where, values = (
            ("id = ?", (batch_id,)) if tenant is None else ("id = ? AND tenant = ?", (batch_id, tenant))
        )
        found = self._select("batches", _BATCH, where, values)
        return Batch(**found[0]) if found else None

    def batches(self, tenant: str, *, after: str | None, limit: int) -> list[Batch] | None:
        page = self._page("batches", _BATCH, "tenant = ?", [tenant], after, limit, newest_first=True)
        return None if page is None else [Batch(**row) for row in page]

    def open_batches(self) -> list[Batch]:
        """Those that are not over, oldest first."""
        return [Batch(**row) for row in self._select("batches", _BATCH, f"{_IS_OPEN} ORDER BY seq", ())]

    def num_open(self, tenant: str) -> int:
        query = f"SELECT count(*) FROM batches WHERE tenant = ? AND {_IS_OPEN}"
        return int(self.connection.execute(query, (tenant,)).fetchone()[0])

    def move(
        self, batch_id: str, status: str, now: int, *, before: Sequence[str], errors: str = "[]"
    ) -> bool:
        """Give a batch another status, and note when; False when its status was none of `before`."""
        assert status in STATES and status != VALIDATING
        marks = ", ".join("?" * len(before))
        with self._change() as db:
            done = db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, errors = ? WHERE id = ? AND status IN ({marks})",
                (status, now, errors, batch_id, *before),
            )
            return done.rowcount > 0

    def finish(
        self, batch_id: str, status: str, now: int, files: Sequence[StoredFile | None], errors: str
    ) -> None:
        """The end of a batch, in one piece: its files are there, its lines are not needed any more."""
        output, error = files
        with self._change() as db:
            _insert(db, "files", _FILE, [file for file in files if file is not None])
            done = db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, errors = ?, output_file_id = ?, "
                f"error_file_id = ?, failed = total - completed WHERE id = ? AND {_IS_OPEN}",
                (status, now, errors, output and output.id, error and error.id, batch_id),
            )
            assert done.rowcount == 1, "a batch ends once"
            _forget_lines(db, batch_id)
        self.connection.execute("PRAGMA incremental_vacuum")

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Batches by status, and lines of batches that are not over by what became of them."""
        states = dict.fromkeys(STATES, 0)
        states.update(self.connection.execute("SELECT status, count(*) FROM batches GROUP BY status"))
        total, completed, failed = self.connection.execute(
            "SELECT coalesce(sum(total), 0), coalesce(sum(completed), 0), coalesce(sum(failed), 0) "
            f"FROM batches WHERE {_IS_OPEN}"
        ).fetchone()
        return states, {"pending": total - completed - failed, "completed": completed, "failed": failed}

    # -- lines ---------------------------------------------------------------------------------------------

    def forget_lines(self, batch_id: str) -> None:
        with self._change() as db:
            _forget_lines(db, batch_id)

    def add_lines(self, batch_id: str, lines: Sequence[BatchLine]) -> None:
        with self._change() as db:
            _insert(db, "lines", _LINE, lines, batch_id=batch_id)

    def begin(self, batch_id: str, now: int, total: int) -> bool:
        """All lines are in order; False when the batch was cancelled meanwhile."""
        with self._change() as db:
            done = db.execute(
                f"UPDATE batches SET status = '{IN_PROGRESS}', in_progress_at = ?, total = ? "
                f"WHERE id = ? AND status = '{VALIDATING}'",
                (now, total, batch_id),
            )
            return done.rowcount > 0

    def pending(self, batch_id: str, *, after: int, limit: int) -> list[BatchLine]:
        """The next lines without a result, in the order of the file."""
        where = (
            "batch_id = ? AND number > ? AND NOT EXISTS (SELECT 1 FROM results WHERE "
            "results.batch_id = lines.batch_id AND results.number = lines.number) ORDER BY number LIMIT ?"
        )
        return [BatchLine(**row) for row in self._select("lines", _LINE, where, (batch_id, after, limit))]

    def note_loss(self, batch_id: str, number: int) -> int:
        """The engine was lost while it worked on a line; returns how often by now."""
        key = (batch_id, number)
        with self._change() as db:
            db.execute("UPDATE lines SET losses = losses + 1 WHERE batch_id = ? AND number = ?", key)
            found = db.execute("SELECT losses FROM lines WHERE batch_id = ? AND number = ?", key).fetchone()
            return int(found[0]) if found else 0

    def record(self, results: Sequence[LineResult]) -> None:
        """Keep results. A line that has one keeps it; lines of batches that are over are skipped."""
        with self._change() as db:
            for result in results:
                key = (result.batch_id, result.number)
                added = db.execute(
                    "INSERT INTO results SELECT ?, ?, ?, ? WHERE EXISTS "
                    "(SELECT 1 FROM lines WHERE batch_id = ? AND number = ?) ON CONFLICT DO NOTHING",
                    (*key, result.is_ok, result.data, *key),
                )
                if added.rowcount > 0:
                    db.execute(
                        "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
                        "prompt_tokens = prompt_tokens + ?, cached_tokens = cached_tokens + ?, "
                        "output_tokens = output_tokens + ? WHERE id = ?",
                        (
                            *(result.is_ok, not result.is_ok, result.prompt_tokens),
                            *(result.cached_tokens, result.output_tokens, result.batch_id),
                        ),
                    )

    def results(self, batch_id: str, *, after: int, limit: int) -> list[tuple[int, bool, bytes]]:
        """Number, success and line of the next results, in the order of the input."""
        query = "SELECT number, is_ok, data FROM results WHERE batch_id = ? AND number > ? ORDER BY number LIMIT ?"
        rows = self.connection.execute(query, (batch_id, after, limit))
        return [(number, bool(is_ok), bytes(data)) for number, is_ok, data in rows]

    # -- reading -------------------------------------------------------------------------------------------

    def _select(
        self, table: str, columns: Sequence[str], where: str, values: Sequence[Any]
    ) -> list[dict[str, Any]]:
        rows = self.connection.execute(
            f"SELECT {', '.join(columns)} FROM {table} WHERE {where}", tuple(values)
        )
        return [dict(zip(columns, row, strict=True)) for row in rows]

    def _page(
        self,
        table: str,
        columns: Sequence[str],
        where: str,
        values: list[Any],
        after: str | None,
        limit: int,
        *,
        newest_first: bool,
    ) -> list[dict[str, Any]] | None:
        if after is not None:
            tenant = values[0]
            found = self.connection.execute(
                f"SELECT seq FROM {table} WHERE tenant = ? AND id = ?", (tenant, after)
            ).fetchone()
            if found is None:
                return None
            where, values = where + f" AND seq {'<' if newest_first else '>'} ?", [*values, found[0]]
        order = "DESC" if newest_first else "ASC"
        return self._select(table, columns, f"{where} ORDER BY seq {order} LIMIT ?", [*values, limit])


def _insert(
    db: sqlite3.Connection, table: str, columns: Sequence[str], items: Sequence[object], **more: str
) -> None:
    """Add a row for each item; `more` are columns that have the same value in all of them."""
    names = (*more, *columns)
    db.executemany(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
        [(*more.values(), *(getattr(item, name) for name in columns)) for item in items],
    )


def _forget_old(db: sqlite3.Connection, tenant: str) -> None:
    db.execute(
        f"DELETE FROM batches WHERE tenant = ? AND NOT {_IS_OPEN} AND seq <= "
        "(SELECT seq FROM batches WHERE tenant = ? ORDER BY seq DESC LIMIT 1 OFFSET ?)",
        (tenant, tenant, MAX_KEPT_BATCHES),
    )


def _forget_lines(db: sqlite3.Connection, batch_id: str) -> None:
    db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
    db.execute("DELETE FROM results WHERE batch_id = ?", (batch_id,))
