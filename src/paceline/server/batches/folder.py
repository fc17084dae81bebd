"""The folder that holds files and batches: one server at a time, and no file that is only half there.

A file is written beside its place, flushed to the disk and moved. What a server that was killed left half done is
removed when the next one starts. Names are ids made here; what clients call a file is never part of a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from paceline.errors import ConfigError

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
            self._lock = os.open(
                path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, OWNER_ONLY
            )
        except OSError as error:
            hint = "name a folder this server may write to, inside one that exists"
            raise ConfigError(f"--batch-dir {path} cannot be used: {error.strerror}; {hint}") from error
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:  # it holds what people ask
                raise ConfigError(f"--batch-dir {path} can be read by others; run: chmod 700 {path}")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ConfigError:
            os.close(self._lock)
            raise
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"--batch-dir {path} is used by another server; name another folder") from error

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

    def sweep(self, known: Iterable[str]) -> int:
        """Remove what nobody knows; returns how much that was. Before anybody else writes here."""
        shutil.rmtree(self.incoming)
        self.incoming.mkdir(OWNER_FOLDER)
        unknown = {path.name for path in self.files.iterdir()} - set(known)
        for name in unknown:
            (self.files / name).unlink()
        return len(unknown)

    def close(self) -> None:
        os.close(self._lock)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
