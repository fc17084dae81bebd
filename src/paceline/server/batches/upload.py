"""A form with a file, from the connection to the disk: never held in memory, counted as it comes.

What is too large, too much for its key or not the form it should be is refused as soon as that is known, and leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from paceline.errors import InvalidRequest
from paceline.server.batches.failures import FileTooLarge, QuotaExceeded, TooManyFiles
from paceline.server.batches.folder import NewFile
from paceline.server.batches.multipart import BadMultipart, FormReader, PartStart, boundary_of
from paceline.server.batches.records import INPUT_PURPOSE, StoredFile, new_file_id
from paceline.server.batches.store import Store

MAX_FILES = 10_000  # of one key
WRITE_BYTES = 1 << 18  # collected before a thread is asked to write them
PURPOSE, FILE, ANCHOR, SECONDS = "purpose", "file", "expires_after[anchor]", "expires_after[seconds]"
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, 2_592_000


@dataclass(slots=True)
class _Form:
    """What has come of a form."""

    fields: dict[str, bytearray] = field(default_factory=dict)
    filename: str | None = None
    in_file: bool = False
    current: bytearray = field(default_factory=bytearray)
    unwritten: bytearray = field(default_factory=bytearray)

    def begin(self, part: PartStart) -> None:
        if part.name in self.fields or (part.name == FILE and self.filename is not None):
            raise BadMultipart(
                f"the form has {part.name!r:.80} twice; one file is taken at a time", param=FILE
            )
        self.in_file = part.name == FILE
        if self.in_file:
            if not part.filename:
                raise BadMultipart("the field file needs a filename", param=FILE)
            self.filename = part.filename
            return
        if part.filename is not None:
            raise BadMultipart(f"the file must be in the field file, not in {part.name!r:.80}", param=FILE)
        self.current = self.fields[part.name] = bytearray()

    def add(self, data: bytes) -> None:
        if self.in_file:
            self.unwritten += data
        else:
            self.current += data

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        try:
            return None if value is None else bytes(value).decode("utf-8")
        except UnicodeDecodeError:
            raise InvalidRequest(f"{name} must be UTF-8", param=name) from None

    @property
    def unknown(self) -> tuple[str, ...]:
        return tuple(name for name in self.fields if name not in (PURPOSE, ANCHOR, SECONDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A file that was taken, and the fields nobody knows."""

    file: StoredFile
    ignored: tuple[str, ...]


class Uploads:
    """Takes files, within the limits of one file and of all files of a key."""

    def __init__(self, store: Store, *, max_bytes: int, quota_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._quota_bytes = quota_bytes
        self._arriving: dict[str, int] = {}  # bytes by tenant that are not files yet

    async def check_quota(self, tenant: str) -> int:
        """Bytes a tenant has stored. Raises QuotaExceeded and TooManyFiles."""
        number, used = await self._store.ask(lambda db: db.stored(tenant))
        if number >= MAX_FILES:
            raise TooManyFiles(MAX_FILES)
        if used + self._arriving.get(tenant, 0) >= self._quota_bytes:
            raise QuotaExceeded(self._quota_bytes)
        return used

    async def take(self, tenant: str, content_type: str, chunks: AsyncIterator[bytes]) -> Upload:
        """Read a whole form. Raises InvalidRequest, and StorageFailed."""
        reader = FormReader(boundary_of(content_type))
        used = await self.check_quota(tenant)
        file_id = new_file_id()
        new = await self._store.file_work(lambda: self._store.folder.create(file_id))
        try:
            with self._counted(tenant, used) as count:
                form = await self._read(reader, chunks, new, count)
            stored = self._stored(tenant, file_id, form, new.size)
            await self._store.file_work(new.keep)
        finally:
            new.close()
        await self._store.ask(lambda db: db.add_file(stored))
        return Upload(file=stored, ignored=form.unknown)

    async def _read(
        self, reader: FormReader, chunks: AsyncIterator[bytes], new: NewFile, count: Callable[[int], None]
    ) -> _Form:
        form = _Form()
        size = 0
        async for chunk in chunks:
            for event in reader.feed(chunk):
                if isinstance(event, PartStart):
                    form.begin(event)
                    continue
                form.add(event.data)
                if form.in_file:
                    size += len(event.data)
                    count(size)
            if len(form.unwritten) >= WRITE_BYTES:
                await self._write(form, new)
        reader.finish()
        await self._write(form, new)
        return form

    async def _write(self, form: _Form, new: NewFile) -> None:
        data, form.unwritten = bytes(form.unwritten), bytearray()
        await self._store.file_work(lambda: new.write(data))

    @contextlib.contextmanager
    def _counted(self, tenant: str, used: int) -> Iterator[Callable[[int], None]]:
        """Counts what arrives for a tenant, until it is a file or nothing."""
        own = 0

        def count(size: int) -> None:
            nonlocal own
            if size > self._max_bytes:
                raise FileTooLarge(self._max_bytes)
            self._arriving[tenant] = self._arriving.get(tenant, 0) + size - own
            own = size
            if used + self._arriving[tenant] > self._quota_bytes:
                raise QuotaExceeded(self._quota_bytes)

        try:
            yield count
        finally:
            left = self._arriving.get(tenant, 0) - own
            if left:
                self._arriving[tenant] = left
            else:
                self._arriving.pop(tenant, None)

    def _stored(self, tenant: str, file_id: str, form: _Form, size: int) -> StoredFile:
        if form.filename is None:
            raise InvalidRequest(
                "file is missing; send it as a part of the form, with a filename", param=FILE
            )
        if form.text(PURPOSE) != INPUT_PURPOSE:
            raise InvalidRequest(f"purpose must be {INPUT_PURPOSE}", param=PURPOSE)
        if size == 0:
            raise InvalidRequest("file is empty; it must hold one request on each line", param=FILE)
        now = self._store.now()
        seconds = _expiry(form)
        return StoredFile(
            id=file_id,
            tenant=tenant,
            filename=form.filename,
            purpose=INPUT_PURPOSE,
            bytes=size,
            created_at=now,
            expires_at=None if seconds is None else now + seconds,
        )


def _expiry(form: _Form) -> int | None:
    anchor, seconds = form.text(ANCHOR), form.text(SECONDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(f"{ANCHOR} must be created_at", param=ANCHOR)
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise InvalidRequest(f"{SECONDS} must be a whole number", param=SECONDS)
    if not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:
        raise InvalidRequest(f"{SECONDS} must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S}", param=SECONDS)
    return int(seconds)
