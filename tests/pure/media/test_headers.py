"""Headers of pictures: what they say is read without decoding, and what is too large or damaged is refused."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from paceline.errors import InvalidImage
from paceline.models.media.headers import MAX_BYTES, MAX_PARTS, MAX_SCANS, MAX_SIDE, check_type, read_header
from paceline.models.media.pictures import decode
from tests.pictures import encoded, picture, sixty, turned


@pytest.mark.slow
def test_headers_say_what_is_decoded() -> None:
    for name, data in sixty():
        header = read_header(data)
        with Image.open(BytesIO(data)) as image:
            assert (header.width, header.height) == image.size, name
        assert decode(data, header).size == header.shown, name


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_pictures_are_turned(kind: str, orientation: int) -> None:
    header = read_header(turned(120, 80, orientation, kind))
    assert (header.width, header.height, header.orientation) == (120, 80, orientation)
    assert header.shown == ((120, 80) if orientation < 5 else (80, 120))


def _png(width: int, height: int, *more: tuple[bytes, bytes]) -> bytes:
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), *more, (b"IEND", b"")]
    made = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


BOMBS = {
    "png": _png(50_000, 50_000),
    "many pixels": _png(16_000, 16_000),
    "one side": _png(MAX_SIDE + 1, 1),
    "no pixels": _png(0, 5),
    "gif": b"GIF89a"
    + struct.pack("<HHBBB", 65_535, 65_535, 0, 0, 0)
    + b"\x2c"
    + struct.pack("<HHHHB", 0, 0, 1, 1, 0),
    "gif frame": b"GIF89a"
    + struct.pack("<HHBBB", 1, 1, 0, 0, 0)
    + b"\x2c"
    + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0),
    "bmp": b"BM" + bytes(12) + struct.pack("<Iii", 40, 100_000, -100_000) + bytes(40),
    "webp": b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(4) + b"\xff\xff\xff" * 2,
    "jpeg": b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 17, 8, 65_535, 65_535, 3) + bytes(20),
}


@pytest.mark.parametrize("name", BOMBS)
def test_too_many_pixels_cost_nothing(name: str) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidImage, match="pixels"):
        read_header(BOMBS[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000


def test_text_that_unpacks_to_gigabytes_is_not_unpacked() -> None:
    text = b"Comment\0\0" + zlib.compress(bytes(200_000_000), 9)
    data = _png(8, 8, (b"zTXt", text), (b"IDAT", zlib.compress(bytes(8 * 25))))
    with pytest.raises(InvalidImage, match="damaged"):
        decode(data, read_header(data))


def _jpeg_of_scans(count: int) -> bytes:
    """One whose last scan stands there again and again: a decoder goes over all pixels for each."""
    data = encoded(picture(24, 18), "JPEG", progressive=True)
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    known = data.count(b"\xff\xda")
    return data[:end] + data[last:end] * (count - known) + data[end:]


def test_a_jpeg_of_very_many_scans_is_refused() -> None:
    data = _jpeg_of_scans(MAX_SCANS)
    assert decode(data, read_header(data)).size == (24, 18)
    with pytest.raises(InvalidImage, match="more than 100 scans"):
        read_header(_jpeg_of_scans(MAX_SCANS + 1))


def test_what_stands_behind_a_jpeg_counts_for_nothing() -> None:
    data = _jpeg_of_scans(MAX_SCANS) + b"\xff\xda\0\x02" * (2 * MAX_PARTS)
    assert read_header(data).shown == (24, 18)


@pytest.mark.parametrize(
    "data",
    [
        _png(8, 8, *[(b"tEXt", b"")] * MAX_PARTS),
        b"\xff\xd8" + b"\xff\xfe\0\x02" * (MAX_PARTS + 1),
        b"RIFF\0\0\0\0WEBP" + b"VP8L" + bytes(12) + (b"abcd" + bytes(4)) * (MAX_PARTS + 1),
        b"GIF89a" + bytes(7) + b"\x21\xfe\0" * (MAX_PARTS + 1),
        b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\x01x" * (MAX_PARTS + 1),
    ],
    ids=["PNG", "JPEG", "WEBP", "GIF", "blocks of a GIF"],
)
def test_a_file_of_very_many_parts_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidImage, match="more than 20000 parts"):
        read_header(data)


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "empty"),
        (bytes(MAX_BYTES + 1), "20000001 bytes"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no known format"),
        (b"%PDF-1.7", "no known format"),
        (b"\x89PNG\r\n\x1a\n", "no valid PNG"),
        (b"\xff\xd8\xff", "within its header"),
        (b"GIF89a", "within its header"),
        (b"RIFF\0\0\0\0WEBPVP8 ", "within its header"),
        (b"BM", "within its header"),
    ],
)
def test_what_is_no_picture_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(InvalidImage, match=words):
        read_header(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_file_cut_short_is_refused(kind: str) -> None:
    data = encoded(picture(300, 200), kind)
    for size in (len(data) // 2, len(data) * 3 // 4):
        with pytest.raises(InvalidImage):
            decode(data[:size], read_header(data[:size]))


def test_a_type_that_lies_is_refused() -> None:
    header = read_header(encoded(picture(3, 3), "JPEG"))
    check_type(header, "image/jpeg")
    check_type(header, "image/jpg; q=1")
    for declared in ("image/png", "", "text/html"):
        with pytest.raises(InvalidImage, match="is image/jpeg, not"):
            check_type(header, declared)


@pytest.mark.slow
@given(
    which=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]),
    changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=20),
    cut=st.integers(0, 4000),
)
@settings(deadline=None, max_examples=20 * settings().max_examples)
def test_damaged_files_are_decoded_or_refused(which: str, changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(encoded(picture(24, 18), which))
    for place, byte in changes:
        data[place % len(data)] = byte
    damaged = bytes(data[: max(1, len(data) - cut % 50)])
    try:
        header = read_header(damaged)
        found = decode(damaged, header) if header.width * header.height < 10**6 else None
    except InvalidImage:
        return
    assert found is None or found.size == header.shown
