"""A picture's file to pixels in red, green and blue, eight bits each, and these to what an encoder takes.

Transparency stands on white, turned pictures are turned, of an animation the first frame is taken, sixteen bits lose
their lower eight. Pillow does the work, without Python's lock; it comes with the extra `vision` and is imported when
the first picture is decoded. Its own words never reach a client.

Tiles and patches are equal to those of the processors of transformers that use Pillow, byte for byte, up to their
normalisation, which is the encoder's. Resizing runs without Python's lock.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidImage, UnsupportedModality
from paceline.models.media.headers import FORMATS, Header
from paceline.models.media.picture_settings import MediaSettings, PatchSettings, TileSettings
from paceline.models.media.sizes import MediaSize, first_size

if TYPE_CHECKING:
    from PIL.Image import Image

STRIP_PIXELS = 1_000_000
MISSING = "pictures need the extra vision, which is not installed here: pip install 'paceline[vision]'"
# How to turn a picture by its orientation in EXIF, in the words of Pillow.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


@cache
def can_decode() -> bool:
    return importlib.util.find_spec("PIL") is not None


def check_installed() -> None:
    """Raises UnsupportedModality without the extra that decodes pictures."""
    if not can_decode():
        raise UnsupportedModality(MISSING, param="messages")


def decode(data: bytes, header: Header) -> Image:
    """Raises InvalidImage for what cannot be decoded, or is not what its header says."""
    check_installed()
    from PIL import Image

    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            if image.size == (header.width, header.height):
                image.load()
                found = rgb(image)
                turn = _TURNS.get(header.orientation)
                return found if turn is None else found.transpose(Image.Transpose[turn])
    except MemoryError:
        raise
    except Exception:  # decoders fail in any way, and with any words
        raise InvalidImage("the picture cannot be decoded: its file is damaged or cut short") from None
    raise InvalidImage("the picture has another size than its header says")


def rgb(image: Image) -> Image:
    """Any picture in red, green and blue, on white where it is transparent."""
    from PIL import Image as images

    if image.mode.startswith("I"):
        image = images.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        return _on_white(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _on_white(image: Image) -> Image:
    """In strips: of a large picture every copy is hundreds of megabytes."""
    from PIL import Image as images

    found = images.new("RGB", image.size)
    high = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, high):
        strip = image.crop((0, top, image.width, min(top + high, image.height))).convert("RGBA")
        white = images.new("RGBA", strip.size, (255, 255, 255, 255))
        found.paste(images.alpha_composite(white, strip).convert("RGB"), (0, top))
    return found


Pixels = NDArray[np.uint8]


def item_pixels(image: Image, size: MediaSize, settings: MediaSettings) -> list[Pixels]:
    """The pixels of each item of a picture in red, green and blue; see `MediaInput` for their order."""
    if isinstance(settings, TileSettings):
        return _tiles(image, size, settings)
    return [_patches(image, size, settings)]


def _tiles(image: Image, size: MediaSize, settings: TileSettings) -> list[Pixels]:
    tile = settings.tile
    image = _resized(image, first_size(image.width, image.height, settings), settings.resample)
    image = _resized(image, (size.width, size.height), settings.resample)
    whole = np.asarray(_resized(image, (tile, tile), settings.resample))
    pixels = np.asarray(image)
    found = [
        pixels[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
        for row in range(size.rows)
        for column in range(size.columns)
    ]
    return [np.ascontiguousarray(each)[None] for each in (*found, whole)]


def _patches(image: Image, size: MediaSize, settings: PatchSettings) -> Pixels:
    patch, merge = settings.patch, settings.merge
    _, rows, columns = size.grid
    pixels = np.asarray(_resized(image, (size.width, size.height), settings.resample))
    cut = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    # Squares that are merged row by row, in each the patches row by row, in each channel, row, column.
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, -1)


def _resized(image: Image, size: tuple[int, int], resample: int) -> Image:
    return image if image.size == size else image.resize(size, resample=resample)
