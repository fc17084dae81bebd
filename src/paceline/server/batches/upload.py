"""A form with a file, from the connection to the disk: never held in memory, counted as it comes.

What is too large, too much for its key or not the form it should be is refused as soon as that is known, and leaves
nothing behind.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from urllib.parse import unquote_to_bytes

from paceline.errors import InvalidRequest
from paceline.server.batches.batch_records import (
    INPUT_PURPOSE,
    PICTURE_PURPOSES,
    FileTooLarge,
    QuotaExceeded,
    StoredFile,
    TooManyFiles,
    new_file_id,
)
from paceline.server.batches.batch_store import NewFile, Store

# multipart/form-data read piece by piece, strictly: a form with few small fields and one file.
#
# Bytes go in as they arrive and the file's bytes come out; nothing is kept but the header of a part and the few
# bytes that may be the beginning of a boundary. Everything that is not exactly a form is refused. Knows no disk and
# no HTTP.


MAX_PARTS = 16
MAX_PART_HEADER = 4096  # bytes of a part's header
MAX_FIELD = 1024  # bytes of a field that is no file
MAX_NAME = 256  # characters of a field's or a file's name
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_PARAMETER = re.compile(r';[ \t]*([A-Za-z0-9*_-]+)=("((?:[^"\\\r\n]|\\.)*)"|[^\s;"]+)[ \t]*')
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_PLAIN_ENCODINGS = ("binary", "8bit", "7bit")


class BadMultipart(InvalidRequest):
    """The body is not the form it says it is (400)."""

    code = "invalid_multipart"


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names."""
    kind, _, rest = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise BadMultipart("send the file as multipart/form-data, with the fields purpose and file")
    given = _parameters(";" + rest).get("boundary", "") if rest else ""
    if not _BOUNDARY.fullmatch(given):
        raise BadMultipart(
            "the boundary of multipart/form-data is missing, or not 1 to 70 allowed characters"
        )
    return given.encode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStart:
    """A part begins; `filename` is None for a plain field."""

    name: str
    filename: str | None


class FormReader:
    """Turns the bytes of a body into the parts of a form: the start of each, then its bytes as they come."""

    def __init__(self, boundary: bytes) -> None:
        # The first boundary has no line before it; with one, it is found like all others.
        self._buffer = b"\r\n"
        self._is_over = False
        self._parser = self._parse(b"\r\n--" + boundary)

    def feed(self, data: bytes) -> Iterator[PartStart | bytes]:
        """What more bytes bring. Raises BadMultipart."""
        self._buffer += data
        for event in self._parser:
            if event is None:
                return
            yield event

    def finish(self) -> None:
        """The body is over. Raises BadMultipart when the form is not."""
        if not self._is_over:
            raise BadMultipart("the body ends before its last boundary; it was cut off")

    def _take(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _parse(self, delimiter: bytes) -> Iterator[PartStart | bytes | None]:
        """The whole form; None where it cannot go on before more bytes have come."""
        while len(self._buffer) < len(delimiter) and delimiter.startswith(self._buffer):
            yield None
        if self._take(len(delimiter)) != delimiter:
            raise BadMultipart("the body does not begin with the boundary that its Content-Type names")
        for number in count(1):
            while len(self._buffer) < 2:
                yield None
            after = self._take(2)
            if after == b"--":
                break
            if after != b"\r\n":
                raise BadMultipart("a boundary is followed by neither a line end nor the end of the form")
            while (end := self._header_end()) < 0:
                yield None
            header = self._take(end + 4)[:-4]
            if number > MAX_PARTS:
                raise BadMultipart(f"the form has more than {MAX_PARTS} parts")
            start = _part_start(header)
            yield start
            yield from self._parse_content(delimiter, is_field=start.filename is None)
        self._is_over = True
        while not self._buffer.strip(b"\r\n"):
            self._buffer = b""
            yield None
        raise BadMultipart("there is something behind the end of the form")

    def _header_end(self) -> int:
        if self._buffer.startswith(b"\r\n"):
            raise BadMultipart("a part of the form has no header")
        end = self._buffer.find(b"\r\n\r\n")
        if end > MAX_PART_HEADER or (end < 0 and len(self._buffer) > MAX_PART_HEADER + 3):
            raise BadMultipart(f"the header of a part is larger than {MAX_PART_HEADER} bytes")
        return end

    def _parse_content(self, delimiter: bytes, *, is_field: bool) -> Iterator[bytes | None]:
        """The bytes of a part up to its boundary, but for the few that may be the beginning of one."""
        size, end = 0, -1
        while end < 0:
            end = self._buffer.find(delimiter)
            data = self._take(max(0, len(self._buffer) - len(delimiter) + 1) if end < 0 else end)
            size += len(data)
            if is_field and size > MAX_FIELD:
                raise BadMultipart(f"a field of the form is longer than {MAX_FIELD} bytes; only file may be")
            if data:
                yield data
            if end < 0:
                yield None
        self._take(len(delimiter))


def _part_start(header: bytes) -> PartStart:
    found: dict[str, str] = {}
    for line in header.split(b"\r\n"):
        match = _HEADER.fullmatch(line)
        if match is None:
            raise BadMultipart("a part of the form has a header that cannot be read")
        name = match.group(1).decode("ascii").lower()
        if name in found:
            raise BadMultipart("a part of the form has the same header twice")
        try:
            found[name] = match.group(2).decode("utf-8").strip()
        except UnicodeDecodeError:
            raise BadMultipart("a header of the form is not UTF-8") from None
    if found.get("content-transfer-encoding", "binary").lower() not in _PLAIN_ENCODINGS:
        raise BadMultipart("content-transfer-encoding is not supported; send the file as it is")
    kind, separator, rest = found.get("content-disposition", "").partition(";")
    parameters = _parameters(separator + rest) if separator else {}
    if kind.strip().lower() != "form-data" or not parameters.get("name"):
        raise BadMultipart("a part of the form needs the header Content-Disposition: form-data with a name")
    filename = parameters.get("filename")
    if "filename*" in parameters:
        filename = _extended(parameters["filename*"])
    return PartStart(
        name=_checked(parameters["name"]), filename=None if filename is None else _checked(filename)
    )


def _parameters(text: str) -> dict[str, str]:
    """The parameters of a header's value, from its first semicolon on."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PARAMETER.match(text, at)
        if match is None:
            if text[at:].strip(" \t;") == "":
                break
            raise BadMultipart("a header of the form has parameters that cannot be read")
        name = match.group(1).lower()
        if name in found:
            raise BadMultipart(f"a header of the form has the parameter {name} twice")
        quoted = match.group(3)
        found[name] = match.group(2) if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        at = match.end()
    return found


def _extended(value: str) -> str:
    charset, _, rest = value.partition("'")
    if charset.lower() != "utf-8":
        raise BadMultipart("filename* must be UTF-8; send filename instead")
    try:
        return unquote_to_bytes(rest.partition("'")[2]).decode("utf-8")
    except UnicodeDecodeError:
        raise BadMultipart("filename* is not UTF-8; send filename instead") from None


def _checked(name: str) -> str:
    if len(name) > MAX_NAME or not name.isprintable():
        raise BadMultipart(f"names in the form must be printable and of at most {MAX_NAME} characters")
    return name


MAX_FILES = 10_000  # of one key
WRITE_BYTES = 1 << 18  # collected before a thread is asked to write them
UPLOADED = (INPUT_PURPOSE, *PICTURE_PURPOSES)
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
            self.filename, self.current = part.filename, self.unwritten
            return
        if part.filename is not None:
            raise BadMultipart(f"the file must be in the field file, not in {part.name!r:.80}", param=FILE)
        self.current = self.fields[part.name] = bytearray()

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
    """A file that was taken, and the unknown fields."""

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
            with self._counted(tenant, used) as note:
                form = await self._read(reader, chunks, new, note)
            stored = self._stored(tenant, file_id, form, new.size)
            await self._store.file_work(new.keep)
        finally:
            new.close()
        await self._store.ask(lambda db: db.add_file(stored))
        return Upload(file=stored, ignored=form.unknown)

    async def _read(
        self, reader: FormReader, chunks: AsyncIterator[bytes], new: NewFile, note: Callable[[int], None]
    ) -> _Form:
        form = _Form()
        size = 0
        async for chunk in chunks:
            for event in reader.feed(chunk):
                if isinstance(event, PartStart):
                    form.begin(event)
                    continue
                form.current += event
                if form.in_file:
                    size += len(event)
                    note(size)
            if len(form.unwritten) >= WRITE_BYTES:
                await self._write(form, new)
        reader.finish()
        await self._write(form, new)
        return form

    async def _write(self, form: _Form, new: NewFile) -> None:
        data = bytes(form.unwritten)
        form.unwritten.clear()
        await self._store.file_work(lambda: new.write(data))

    @contextlib.contextmanager
    def _counted(self, tenant: str, used: int) -> Iterator[Callable[[int], None]]:
        """Counts what arrives for a tenant, until it is a file or nothing."""
        own = 0

        def note(size: int) -> None:
            nonlocal own
            if size > self._max_bytes:
                raise FileTooLarge(self._max_bytes)
            self._arriving[tenant] = self._arriving.get(tenant, 0) + size - own
            own = size
            if used + self._arriving[tenant] > self._quota_bytes:
                raise QuotaExceeded(self._quota_bytes)

        try:
            yield note
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
        purpose = form.text(PURPOSE)
        if purpose not in UPLOADED:
            raise InvalidRequest(
                f"purpose must be {UPLOADED[0]}, or {UPLOADED[1]} for a picture", param=PURPOSE
            )
        if size == 0:
            raise InvalidRequest("file is empty; it must hold one request on each line", param=FILE)
        now = self._store.now()
        seconds = _expiry(form)
        return StoredFile(
            id=file_id,
            tenant=tenant,
            filename=form.filename,
            purpose=purpose,
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
