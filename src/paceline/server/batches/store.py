"""The folder and its database behind one thread, for an event loop that must not wait for a disk.

Everything that touches the database runs in that thread, one after the other; reading and writing files may run in
others. Says what a client is told when the disk does not take more.
"""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from paceline.errors import ConfigError, PacelineError
from paceline.server.batches.database import Database, WrongVersion
from paceline.server.batches.folder import Folder
from paceline.server.batches.records import StoredFile

NUM_FILE_THREADS = 2
_FULL = (errno.ENOSPC, errno.EDQUOT)
Value = TypeVar("Value")


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
            self.num_swept = self.folder.sweep(self._database.file_ids())
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
