"""What a picture's file says of itself before it is decoded: format, width, height, and how it is to be turned.

Reads PNG, JPEG, WebP, GIF and BMP; other formats are refused. Nothing is decompressed, so a header that promises a
gigantic picture costs nothing, and a picture's price is known without the library that decodes it. A file made of very
many small parts is refused after a bounded number of them; so is a JPEG of very many scans, each of which a decoder
applies to the whole picture.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import InvalidImage

MAX_BYTES = 20_000_000
MAX_PIXELS = 64_000_000
MAX_SIDE = 16_384
MAX_PARTS = 20_000  # chunks, segments or blocks of a file
MAX_SCANS = 100  # of a JPEG; progressive ones have about 10
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112
_NO_FRAME = frozenset((0xC4, 0xC8, 0xCC))  # of the markers C0 to CF, those that begin no frame
# A marker that has a length, or the one that ends a picture; not those within the data of a scan.
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]", re.DOTALL)
_SCAN, _END = 0xDA, 0xD9


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Of a picture that may be decoded."""

    format: str  # one of FORMATS
    width: int  # as the file has it
    height: int
    orientation: int = 1  # of EXIF: 1 to 8

    @property
    def shown(self) -> tuple[int, int]:
        """Width and height as the picture is seen."""
        return (self.height, self.width) if self.orientation >= 5 else (self.width, self.height)

    @property
    def media_type(self) -> str:
        return f"image/{self.format.lower()}"


def read_header(data: bytes) -> Header:
    """Raises InvalidImage for what is no picture of a known format, or is too large."""
    if not data:
        raise InvalidImage("the picture is empty")
    if len(data) > MAX_BYTES:
        raise InvalidImage(f"the picture has {len(data)} bytes; at most {MAX_BYTES} are accepted")
    try:
        header = _read(data)
    except (struct.error, IndexError):
        raise InvalidImage("the picture ends within its header") from None
    check_sides(header.width, header.height)
    return header


def check_sides(width: int, height: int) -> None:
    """Raises InvalidImage for more pixels than are decoded."""
    if width < 1 or height < 1:
        raise InvalidImage("the picture has no pixels")
    if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        limits = f"at most {MAX_SIDE} a side and {MAX_PIXELS} together are accepted"
        raise InvalidImage(f"the picture is {width} x {height} pixels; {limits}")


def check_type(header: Header, declared: str) -> None:
    """Raises InvalidImage where a picture is of another type than its sender says."""
    plain = declared.partition(";")[0].strip().lower()
    if {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-ms-bmp": "image/bmp"}.get(
        plain, plain
    ) != header.media_type:
        raise InvalidImage(f"the picture is {header.media_type}, not {plain[:64]!r} as it says")


def _read(data: bytes) -> Header:
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _gif(data)
    if data[:2] == b"BM":
        return _bmp(data)
    raise InvalidImage(f"the picture is of no known format; {', '.join(FORMATS)} are accepted")


def _png(data: bytes) -> Header:
    if data[12:16] != b"IHDR":
        raise InvalidImage("the picture is no valid PNG")
    width, height = struct.unpack_from(">II", data, 16)
    at, orientation = 8, 1
    for _ in _parts():
        if at + 8 > len(data):
            break
        (size,) = struct.unpack_from(">I", data, at)
        kind = data[at + 4 : at + 8]
        if kind == b"eXIf":
            orientation = _turned(data[at + 8 : at + 8 + size])
        if kind in (b"eXIf", b"IEND"):
            break
        at += 12 + size
    return Header(format="PNG", width=width, height=height, orientation=orientation)


def _jpeg(data: bytes) -> Header:
    at, orientation, num_scans = 2, 0, 0
    sides: tuple[int, int] | None = None
    for _ in _parts():
        found = _MARKER.search(data, at)  # what is between segments is skipped, as decoders do
        if found is None:
            break
        marker, at = data[found.end() - 1], found.end()
        if sides is None and marker in (_END, _SCAN):
            raise InvalidImage("the picture is no valid JPEG")
        if marker == _END or (sides is not None and at + 2 > len(data)):
            break
        (size,) = struct.unpack_from(">H", data, at)
        if marker == 0xE1 and not orientation and data[at + 2 : at + 8] == b"Exif\0\0":
            orientation = _turned(data[at + 8 : at + size])
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME and sides is None:
            height, width = struct.unpack_from(">HH", data, at + 3)
            sides = width, height
        num_scans += marker == _SCAN
        if num_scans > MAX_SCANS:
            raise InvalidImage(f"the picture has more than {MAX_SCANS} scans; save it as an ordinary JPEG")
        at += max(size, 2)
    if sides is None:
        raise IndexError(at)
    return Header(format="JPEG", width=sides[0], height=sides[1], orientation=orientation or 1)


def _webp(data: bytes) -> Header:
    kind = data[12:16]
    if kind == b"VP8X":
        width = 1 + int.from_bytes(_exactly(data, 24, 3), "little")
        height = 1 + int.from_bytes(_exactly(data, 27, 3), "little")
    elif kind == b"VP8 ":
        width, height = (size & 0x3FFF for size in struct.unpack_from("<HH", data, 26))
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        raise InvalidImage("the picture is no valid WebP")
    at, orientation = 12, 1
    for _ in _parts():
        if at + 8 > len(data):
            break
        (size,) = struct.unpack_from("<I", data, at + 4)
        if data[at : at + 4] == b"EXIF":
            orientation = _turned(data[at + 8 : at + 8 + size].removeprefix(b"Exif\0\0"))
            break
        at += 8 + size + size % 2
    return Header(format="WEBP", width=width, height=height, orientation=orientation)


def _gif(data: bytes) -> Header:
    """The screen, or the first frame's end where that lies beyond it."""
    width, height = struct.unpack_from("<HH", data, 6)
    flags = data[10]
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    parts = _parts()
    while data[at] == 0x21:  # an extension: blocks up to an empty one
        at += 2
        while data[at]:
            at += 1 + data[at]
            next(parts)
        at += 1
        next(parts)
    if data[at] != 0x2C:
        raise InvalidImage("the picture is a GIF without a frame")
    left, top, frame_width, frame_height = struct.unpack_from("<HHHH", data, at + 1)
    return Header(format="GIF", width=max(width, left + frame_width), height=max(height, top + frame_height))


def _bmp(data: bytes) -> Header:
    (size,) = struct.unpack_from("<I", data, 14)
    width, height = struct.unpack_from("<HH" if size == 12 else "<ii", data, 18)
    return Header(format="BMP", width=width, height=abs(height))


def _parts() -> Iterator[None]:
    """A turn for each part of a file. Raises InvalidImage where there are too many."""
    for _ in range(MAX_PARTS):
        yield
    raise InvalidImage(f"the picture's file has more than {MAX_PARTS} parts; save it again")


def _exactly(data: bytes, at: int, size: int) -> bytes:
    found = data[at : at + size]
    if len(found) < size:
        raise IndexError(at)
    return found


def _turned(exif: bytes) -> int:
    """The orientation that EXIF data names; 1 where it names none or makes no sense."""
    order = {b"II": "<", b"MM": ">"}.get(exif[:2])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(f"{order}I", exif, 4)
        (count,) = struct.unpack_from(f"{order}H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(f"{order}HHIH", exif, entry)
            if tag == _ORIENTATION and kind == 3:
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
