"""Files that processes share: a lock that ends with the process that holds it, and a key that is made once."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

KEY_BYTES = 32


def take_lock(path: Path) -> int | None:
    """A descriptor that holds the lock of a file for as long as it is open, whatever ends the process.

    None: another holds it. Raises OSError where the file cannot be opened or locked.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return handle


def read_key(path: Path) -> bytes | None:
    """The key in a file; None where the file holds something else. Where there is no file, one is made: of several
    servers that start at once, all get the same."""
    with suppress(FileNotFoundError):
        return _as_key(path.read_bytes())
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if os.write(handle, os.urandom(KEY_BYTES)) != KEY_BYTES:
            raise OSError("the disk took a part of a key only")
        os.fsync(handle)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(draft, path)
    finally:
        os.close(handle)
        draft.unlink(missing_ok=True)
    return _as_key(path.read_bytes())


def _as_key(text: bytes) -> bytes | None:
    return text if len(text) == KEY_BYTES else None
