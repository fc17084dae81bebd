"""Blocks in a folder, for prefixes that outlive the server.

    key      32 random bytes, made once: the keys of prefixes are made with it, so that they hold over restarts and
             cannot be computed outside. No token stands on the disk.
    lock     held by the one server that uses the folder
    index    a header, then records of one size, appended: a place was filled, or is empty. Each has a checksum
    data     places of one size, allocated beforehand
    tables   what eviction had learned when the server ended

A place is written first and its record after it. Nothing is synced for correctness: a read compares the head with the
index and the bytes with the checksum in it, which covers head and fingerprint too. So what is torn, stale, swapped,
rotten or of other weights is a miss. The index is read up to its first bad record and written anew when most of it is
history. Knows nothing of tickets, models or threads but that several call it.
Decision: docs/decisions/0047-the-disk.md.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.core.shared_files import read_key, take_lock
from paceline.core.store import BlockHead
from paceline.errors import ConfigError

VERSION = 1
MAGIC = b"paceline kv\n"
HEADER = struct.Struct("<12sHHQI")  # magic, version, 0, bytes of a place, checksum of the rest
# Filled, place, uses, checksum of the place, key, check, fingerprint, own.
RECORD = struct.Struct("<BxxxIII32s16s16sI")
FINGERPRINT_BYTES = 16
HISTORY = 4  # records for each live one (or place, where few live) after which the index is written anew
FEW_RECORDS = 1024
MOST_PLACES = 1 << 18  # what is known of each place takes memory, 400 bytes or so
ALIGNED = 4096  # bytes: what is moved past the page cache begins and ends with a page
SYNC_BYTES = 64 << 20  # written before pages are pushed out of the page cache, which weights need
PROBE_BYTES = 64 << 20  # written and read to learn how fast the disk is
PROBE_PIECE = 1 << 20


class Kept(NamedTuple):
    """What the index says of a place."""

    head: BlockHead
    crc: int


class DiskStore:
    """The places of one folder."""

    flag = "--kv-disk-dir"
    is_shared = False
    notices: tuple[str, ...] = ()

    def __init__(self, folder: Path, *, size: int, place_bytes: int, fingerprint: bytes) -> None:
        """`size`: most bytes of all files. `fingerprint`: of everything but the tokens that bytes depend on.

        Raises ConfigError for a folder that cannot be used.
        """
        self._folder, self._place_bytes = folder, place_bytes
        room = size - HEADER.size - FEW_RECORDS * RECORD.size
        self.num_places = min(room // (place_bytes + (HISTORY + 1) * RECORD.size), MOST_PLACES)
        if self.num_places < 1:
            raise ConfigError(
                f"--kv-disk-size {size} holds no block of {place_bytes} bytes: give at least a hundred times that"
            )
        self._guard = threading.Lock()  # of the index and of what is known of places
        self._kept: dict[int, Kept] = {}
        self._num_records = 0  # of the index
        self._unsynced = 0
        self._lock = _take_folder(folder)
        try:
            self.key = _own_key(folder / "key")
            # With another key no prefix would be found again: its places are not worth keeping.
            known = hashlib.blake2b(fingerprint, key=self.key, digest_size=FINGERPRINT_BYTES)
            self._fingerprint = known.digest()
            self._data = self._open_data(size)
            self._direct = self._open_direct()
            self._index = self._open_index()
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(f"--kv-disk-dir {folder}: cannot be used: {error.strerror or error}") from error
        except ConfigError:
            os.close(self._lock)
            raise

    # -- the store seam --------------------------------------------------------------------------------------

    def write(self, place: int, head: BlockHead, parts: Sequence[memoryview]) -> None:
        with self._guard:
            if self._kept.pop(place, None) is not None:
                self._append(place, None)
        crc = self._checksum(head, parts)
        if self._move(os.pwritev, place, parts) != sum(part.nbytes for part in parts):
            raise OSError("the disk took a part of a block only")
        with self._guard:
            kept = Kept(head, crc)
            self._append(place, kept)
            self._kept[place] = kept

    def read(self, place: int, head: BlockHead, into: Sequence[memoryview]) -> bool:
        with self._guard:
            kept = self._kept.get(place)
        if kept is None or kept.head[:2] != head[:2]:
            return False
        got, wanted = self._move(os.preadv, place, into), sum(part.nbytes for part in into)
        if got == wanted and self._checksum(head, into) == kept.crc:
            return True
        with self._guard:
            if self._kept.get(place) is kept:
                del self._kept[place]
                self._append(place, None)
        return False

    def entries(self) -> Iterator[tuple[int, BlockHead]]:
        with self._guard:
            kept = sorted(self._kept.items())
        for place, (head, _) in kept:
            yield place, head

    def _move(
        self, move: Callable[[int, Sequence[memoryview], int], int], place: int, parts: Sequence[memoryview]
    ) -> int:
        """Read or write a place; returns the number of bytes. Past the page cache where the system allows that: it
        takes a quarter of the processor's time, and weights need the cache."""
        start = place * self._place_bytes
        if self._direct is not None and len(parts) == 1 and _is_aligned(parts[0]):
            try:
                return move(self._direct, parts, start)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = None  # the file system does not know it after all
        moved = move(self._data, parts, start)
        with self._guard:
            self._unsynced += self._place_bytes
            is_due = self._unsynced >= SYNC_BYTES
            self._unsynced = 0 if is_due else self._unsynced
        if is_due:
            os.fdatasync(self._data)
            os.posix_fadvise(self._data, 0, 0, os.POSIX_FADV_DONTNEED)
        return moved

    # -- outside the seam ------------------------------------------------------------------------------------

    def measure(self) -> tuple[float, float]:
        """Bytes a second that can be written and read, as far as some places tell; what survived is not spoilt."""
        first, count = self._longest_gap()
        if not count:
            first, count = self.num_places - 1, 1
            with self._guard:
                del self._kept[first]
                self._append(first, None)
        piece = memoryview(os.urandom(min(PROBE_PIECE, self._place_bytes)))
        times = max(1, min(PROBE_BYTES, count * self._place_bytes) // len(piece))
        start, rates = first * self._place_bytes, []
        for move, data in ((os.pwritev, piece), (os.preadv, memoryview(bytearray(len(piece))))):
            started_s = time.perf_counter()
            for number in range(times):
                move(self._data, [data], start + number * len(piece))
            os.fdatasync(self._data)
            rates.append(times * len(piece) / max(time.perf_counter() - started_s, 1e-9))
            os.posix_fadvise(self._data, 0, 0, os.POSIX_FADV_DONTNEED)
        return rates[0], rates[1]

    def _longest_gap(self) -> tuple[int, int]:
        """First and number of the places that lie behind one another and hold nothing."""
        taken = [-1, *sorted(self._kept), self.num_places]
        before, after = max(pairwise(taken), key=lambda pair: pair[1] - pair[0])
        return before + 1, after - before - 1

    def save_tables(self, tables: Sequence[Sequence[float]]) -> None:
        """Keep what was learned, in the place of what was kept before."""
        body = json.dumps(tables)
        path = self._folder / "tables.new"
        path.write_text(f"{zlib.crc32(body.encode())}\n{body}\n")
        path.chmod(0o600)
        os.replace(path, self._folder / "tables")

    def load_tables(self) -> tuple[tuple[float, ...], ...]:
        """What was kept; nothing where it cannot be read."""
        try:
            checksum, body = (self._folder / "tables").read_text().splitlines()
            if int(checksum) != zlib.crc32(body.encode()):
                return ()
            return tuple(tuple(map(float, table)) for table in json.loads(body))
        except (OSError, ValueError, TypeError):
            return ()

    def close(self) -> None:
        """Another server may use the folder from now on."""
        for handle in (self._index, self._data, self._direct, self._lock):
            if handle is not None:
                with suppress(OSError):
                    os.close(handle)

    # -- files -----------------------------------------------------------------------------------------------

    def _open_data(self, size: int) -> int:
        handle = os.open(self._folder / "data", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        wanted, there = self.num_places * self._place_bytes, os.fstat(handle).st_size
        try:
            if there > wanted:
                os.ftruncate(handle, wanted)
            os.posix_fallocate(handle, 0, wanted)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(handle, min(there, wanted))
            free = os.statvfs(self._folder)
            os.close(handle)
            raise ConfigError(
                f"--kv-disk-dir {self._folder}: {wanted} bytes cannot be allocated ({error.strerror}); "
                f"{free.f_bavail * free.f_frsize + there} are free: give a smaller --kv-disk-size than {size}"
            ) from error
        return handle

    def _open_direct(self) -> int | None:
        """The data once more, without the page cache; None where that cannot be."""
        if self._place_bytes % ALIGNED or not hasattr(os, "O_DIRECT"):
            return None
        with suppress(OSError):
            return os.open(self._folder / "data", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        return None

    def _open_index(self) -> int:
        path = self._folder / "index"
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            text = b""
        num_good = self._read_index(text)
        whole = HEADER.size + num_good * RECORD.size
        if not num_good or self._is_history(num_good):
            return self._rewrite()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(handle, whole)  # what follows is of a write that was cut short
        self._num_records = num_good
        return handle

    def _read_index(self, text: bytes) -> int:
        """Take in what survived; returns the number of records up to the first bad one, 0 if none is of use."""
        if len(text) < HEADER.size:
            return 0
        magic, version, _, place_bytes, crc = HEADER.unpack_from(text)
        if magic != MAGIC or crc != zlib.crc32(text[: HEADER.size - 4]):
            return 0
        if version != VERSION:
            raise ConfigError(
                f"--kv-disk-dir {self._folder}: was written by another version of paceline; empty it or give another"
            )
        if place_bytes != self._place_bytes:
            return 0
        num_good = 0
        for at in range(HEADER.size, len(text) - RECORD.size + 1, RECORD.size):
            filled, place, uses, crc, key, check, fingerprint, own = RECORD.unpack_from(text, at)
            if own != zlib.crc32(text[at : at + RECORD.size - 4]):
                break
            num_good += 1
            self._kept.pop(place, None)
            if filled and fingerprint == self._fingerprint and place < self.num_places:
                self._kept[place] = Kept(BlockHead(key, check, uses), crc)
        return num_good

    def _is_history(self, num_records: int) -> bool:
        return num_records > max(HISTORY * len(self._kept), FEW_RECORDS // 2)

    def _rewrite(self) -> int:
        """The index with live records only, under its name at once."""
        head = HEADER.pack(MAGIC, VERSION, 0, self._place_bytes, 0)[:-4]
        parts = [head + struct.pack("<I", zlib.crc32(head))]
        parts += [self._record(place, kept) for place, kept in self._kept.items()]
        path = self._folder / "index.new"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            _write_all(handle, b"".join(parts))
            os.replace(path, self._folder / "index")
        except OSError:
            os.close(handle)
            raise
        self._num_records = len(self._kept)
        return handle

    def _append(self, place: int, kept: Kept | None) -> None:
        """Note what a place holds from now on. The caller has the guard."""
        try:
            _write_all(self._index, self._record(place, kept))
        except OSError:
            # What comes later must not stand behind a part of a record.
            os.ftruncate(self._index, HEADER.size + self._num_records * RECORD.size)
            raise
        self._num_records += 1
        if self._is_history(self._num_records):
            old, self._index = self._index, self._rewrite()
            os.close(old)

    def _record(self, place: int, kept: Kept | None) -> bytes:
        head, crc = kept if kept is not None else (BlockHead(b"", b""), 0)
        uses = max(0, min(head.uses, 0xFFFFFFFF))
        values = (kept is not None, place, uses, crc, head.key, head.check, self._fingerprint)
        record = RECORD.pack(*values, 0)[:-4]
        return record + struct.pack("<I", zlib.crc32(record))

    def _checksum(self, head: BlockHead, parts: Sequence[memoryview]) -> int:
        crc = zlib.crc32(head.key + head.check + self._fingerprint)
        for part in parts:
            crc = zlib.crc32(part, crc)
        return crc


def _is_aligned(part: memoryview) -> bool:
    return not (part.nbytes % ALIGNED or np.frombuffer(part, np.uint8).ctypes.data % ALIGNED)


def _write_all(handle: int, text: bytes) -> None:
    if os.write(handle, text) != len(text):
        raise OSError("the disk took a part of a record only")


def _take_folder(folder: Path) -> int:
    """Make or check the folder and take its lock; raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        names = {entry.name for entry in folder.iterdir()}
        if names and "lock" not in names:
            raise ConfigError(
                f"--kv-disk-dir {folder}: holds other files; give an empty folder, or one that paceline has made"
            )
        folder.chmod(0o700)
        lock = take_lock(folder / "lock")
    except OSError as error:
        raise ConfigError(f"--kv-disk-dir {folder}: cannot be used: {error.strerror or error}") from error
    if lock is None:
        raise ConfigError(
            f"--kv-disk-dir {folder}: is in use by another server; give each a folder of its own"
        )
    return lock


def _own_key(path: Path) -> bytes:
    """The key of a folder; a new one where what is there cannot be used."""
    key = read_key(path)
    while key is None:
        path.unlink()
        key = read_key(path)
    return key
