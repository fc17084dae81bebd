"""Which entries' last frames were handed to the network: a file of numbers, each written right before its frame.

An entry is on the disk before its frame leaves, and getting it there takes milliseconds in which a server may be
killed. A mark takes microseconds: it goes to the memory of the system, which outlives the process but not the machine.
After a kill, an entry without a mark was never sent. After a restart of the machine marks say nothing, and `boot_id`
tells the two apart.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

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
