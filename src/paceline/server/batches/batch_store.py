"""The folder and its database behind one thread, for an event loop that must not wait for a disk.

Everything that touches the database runs in that thread, one after the other; reading and writing files may run in
others. Owns the error for a full disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from paceline.core.shared_files import take_lock
from paceline.errors import ConfigError, PacelineError
from paceline.server.batches.batch_records import LineResult, StoredFile
from paceline.server.batches.database import Database, WrongVersion
from paceline.server.logs import log

# The folder that holds files and batches: one server at a time, and no file that is only half there.
#
# A file is written beside its place, flushed to the disk and moved. What a server that was killed left half done is
# removed when the next one starts. Names are ids made here; what clients call a file is never part of a path.


OWNER_ONLY, OWNER_FOLDER = 0o600, 0o700
_ID = re.compile(r"file-[0-9a-f]{32}")


class NewFile:
    """A file being written. `keep` gives it its name; without that, `close` removes it."""

    def __init__(self, folder: Folder, file_id: str) -> None:
        self._folder = folder
        self._id = file_id
        self._path = folder.incoming / file_id
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file: BinaryIO | None = os.fdopen(os.open(self._path, flags, OWNER_ONLY), "wb")
        self.size = 0

    def write(self, data: bytes) -> None:
        assert self._file is not None
        self._file.write(data)
        self.size += len(data)

    def keep(self) -> None:
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._path, self._folder.path_of(self._id))
        _sync_folder(self._folder.files)

    def close(self) -> None:
        """May be called twice, and after `keep`."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what is buffered does not fit, and is not wanted
                file.close()
            self._path.unlink(missing_ok=True)


class Folder:
    """`--batch-dir`. Raises ConfigError when it cannot be used."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files, self.incoming = path / "files", path / "incoming"
        try:
            for folder in (path, self.files, self.incoming):
                folder.mkdir(OWNER_FOLDER, exist_ok=True)
            if stat.S_IMODE(path.stat().st_mode) & 0o077:  # it holds what people ask
                raise ConfigError(f"--batch-dir {path} can be read by others; run: chmod 700 {path}")
            lock = take_lock(path / "lock")
        except OSError as error:
            hint = "name a folder this server may write to, inside one that exists"
            raise ConfigError(f"--batch-dir {path} cannot be used: {error.strerror}; {hint}") from error
        if lock is None:
            raise ConfigError(f"--batch-dir {path} is used by another server; name another folder")
        self._lock = lock

    @property
    def database(self) -> Path:
        return self.path / "batches.sqlite3"

    def path_of(self, file_id: str) -> Path:
        assert _ID.fullmatch(file_id), "an id that was not made here"
        return self.files / file_id

    def create(self, file_id: str) -> NewFile:
        return NewFile(self, file_id)

    def remove(self, file_id: str) -> None:
        self.path_of(file_id).unlink(missing_ok=True)

    def sweep(self, known: Iterable[str]) -> None:
        """Remove unknown files, before anything is written here."""
        shutil.rmtree(self.incoming)
        self.incoming.mkdir(OWNER_FOLDER)
        for name in {path.name for path in self.files.iterdir()} - set(known):
            (self.files / name).unlink()

    def close(self) -> None:
        os.close(self._lock)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


NUM_FILE_THREADS = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
Value = TypeVar("Value")
RETRY_S = 1.0
LONGEST_RETRY_S = 30.0
POLL_S = 0.005


class StorageFailed(PacelineError):
    """The disk does not take or give what it should (507 when it is full, else 500)."""

    def __init__(self, error: BaseException) -> None:
        is_full = (isinstance(error, OSError) and error.errno in _FULL) or (
            isinstance(error, sqlite3.Error) and "full" in str(error)
        )
        super().__init__(
            "there is no room left for files and batches; try again later" if is_full else str(error)
        )
        self.code = "storage_full" if is_full else "internal_error"


class Store:
    """Opened once; `close` it."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.folder = Folder(path)
        self._clock = clock
        try:
            self._database = Database(self.folder.database)
            self.folder.sweep(self._database.file_ids())
        except (OSError, sqlite3.Error, WrongVersion) as error:
            self.folder.close()
            raise ConfigError(f"--batch-dir {path} cannot be used: {error}; name another folder") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paceline-batches")
        self._files = ThreadPoolExecutor(NUM_FILE_THREADS, thread_name_prefix="paceline-files")

    def now(self) -> int:
        """Seconds since 1970."""
        return int(self._clock())

    async def ask(self, do: Callable[[Database], Value]) -> Value:
        """Read or change the database. Raises StorageFailed."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, do, self._database)
        except (OSError, sqlite3.Error) as error:
            raise StorageFailed(error) from error

    async def file_work(self, do: Callable[[], Value]) -> Value:
        """Read or write files. Raises StorageFailed."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._files, do)
        except OSError as error:
            raise StorageFailed(error) from error

    async def expire_files(self) -> int:
        """Remove files whose time has come and that no batch reads; returns how many."""
        removed = 0
        for file in await self.ask(lambda db: db.expired_files(self.now())):
            removed += await self.remove(file)
        return removed

    async def remove(self, file: StoredFile) -> bool:
        """Remove a file; False when a batch that is not over reads it."""
        if not await self.ask(lambda db: db.remove_file(file.tenant, file.id)):
            return False
        await self.file_work(lambda: self.folder.remove(file.id))
        return True

    def close(self) -> None:
        """What is under way ends first."""
        self._files.shutdown()
        self._thread.shutdown()
        self._database.close()
        self.folder.close()


async def insist(
    do: Callable[[], Awaitable[Value]],
    *,
    retry_s: float = RETRY_S,
    batch_id: str | None = None,
    what: str = "batches wait for their disk",
) -> Value:
    """Try until the disk takes it: a full disk stops a batch, and does not end it."""
    while True:
        try:
            return await do()
        except StorageFailed as error:
            log(what, level=logging.ERROR, batch=batch_id, reason=error.__cause__)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LONGEST_RETRY_S)


class ResultWriter:
    """Writes the results of all batches, many at once when many have come; `start` it, and `stop` it last.

    A result that was handed over is kept until it is on the disk, whatever becomes of the task that handed it over.
    """

    def __init__(self, store: Store, *, retry_s: float = RETRY_S) -> None:
        self._store = store
        self._retry_s = retry_s
        self._waiting: list[tuple[LineResult, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._write())

    async def record(self, result: LineResult) -> None:
        """Returns when the result is on the disk."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((result, done))
        self._wake.set()
        await done

    async def flush(self) -> None:
        """Returns when everything that was handed over is on the disk."""
        while self._waiting:
            await asyncio.sleep(POLL_S)

    async def stop(self, patience_s: float) -> None:
        try:
            async with asyncio.timeout(patience_s):
                await self.flush()
        except TimeoutError:
            log("results were not written; their lines will run again", level=logging.ERROR)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = list(self._waiting)
            if not batch:
                continue
            results = [result for result, _ in batch]
            await insist(lambda: self._store.ask(lambda db: db.record(results)), retry_s=self._retry_s)  # noqa: B023
            del self._waiting[: len(batch)]
            for _, done in batch:
                if not done.done():
                    done.set_result(None)
            if self._waiting:
                self._wake.set()
