"""The key of a store's prefixes: 32 random bytes in a file, made once.

Keys of prefixes are made with it, so that they hold over restarts and cannot be computed outside.
Decision: docs/decisions/0047-the-disk.md.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

KEY_BYTES = 32


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
