"""Pictures for tests, made from their names: every size, mode and format that the front end has to read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from io import BytesIO

import numpy as np
from PIL import Image

SIZES = (
    *((1, 1), (1, 5), (7, 3), (28, 28), (50, 200), (199, 1), (224, 224), (300, 301), (364, 364), (365, 100)),
    *((512, 512), (513, 512), (640, 480), (480, 640), (1000, 37), (37, 1000), (1023, 767), (1280, 720)),
    *((1456, 1455), (2048, 300), (1500, 2500), (4000, 3000)),
)
MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK", "I;16")


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Slow waves with noise on them, so that every filter has something to do."""
    random = np.random.default_rng([width, height, seed])
    rows, columns = np.mgrid[0:height, 0:width]
    wave = 127 + 80 * np.sin(columns / 17 + seed) * np.cos(rows / 23)
    channels = {"L": 1, "P": 1, "1": 1, "I;16": 1, "LA": 2, "RGB": 3}.get(mode, 4)
    noisy = wave[..., None] + random.normal(0, 30, (height, width, channels))
    pixels = np.clip(noisy, 0, 255).astype(np.uint8)
    if mode == "I;16":
        return Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    if channels == 1:
        return Image.fromarray(pixels[..., 0]).convert(mode)
    image = Image.frombuffer(mode, (width, height), pixels.tobytes(), "raw", mode, 0, 1)
    return image.copy()


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned(width: int, height: int, orientation: int, kind: str = "JPEG") -> bytes:
    """A picture that is to be turned before it is looked at."""
    image = picture(width, height)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif.tobytes())


@cache
def sixty() -> tuple[tuple[str, bytes], ...]:
    """Names and files of 60 pictures: all sizes, modes, formats and turns. Made once, by the first test that asks."""
    return tuple(_sixty())


def _sixty() -> Iterator[tuple[str, bytes]]:
    for width, height in SIZES:
        yield f"{width}x{height}", encoded(picture(width, height), "JPEG" if width > 2000 else "PNG")
    for mode in MODES[1:]:
        kind = "JPEG" if mode == "CMYK" else "PNG"
        for width, height in ((96, 64), (333, 517)):
            yield f"{mode} {width}x{height}", encoded(picture(width, height, mode), kind)
    for kind in ("JPEG", "WEBP", "GIF", "BMP"):
        yield kind, encoded(picture(401, 299), kind)
    for orientation in range(1, 9):
        yield f"turned {orientation}", turned(120, 80, orientation)
    yield "turned PNG", turned(120, 80, 6, "PNG")
    yield "turned WebP", turned(120, 80, 8, "WEBP")
    yield "transparent colour", encoded(picture(90, 90, "P"), "PNG", transparency=3)
    yield "transparent GIF", encoded(picture(90, 90, "P"), "GIF", transparency=5)
    frames = [picture(64, 48, seed=seed) for seed in range(5)]
    yield "animated GIF", encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    yield "animated WebP", encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:])
    yield "lossless WebP", encoded(picture(100, 70, "RGBA"), "WEBP", lossless=True)
    yield "16 bit colour", sixteen_bits(60, 40)
    yield "progressive", encoded(picture(200, 100), "JPEG", progressive=True)
    yield "grey JPEG", encoded(picture(77, 99, "L"), "JPEG")
    yield "interlaced", interlaced()
    yield "MPO", encoded(picture(80, 60), "MPO", save_all=True, append_images=[picture(80, 60, seed=1)])


def sixteen_bits(width: int, height: int) -> bytes:
    """A PNG in colour with sixteen bits each, which Pillow reads and does not write."""
    import struct
    import zlib

    pixels = np.random.default_rng(1).integers(0, 65536, (height, width * 3)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def interlaced() -> bytes:
    return encoded(picture(65, 43, "P"), "GIF", interlace=1)
