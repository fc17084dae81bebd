"""A decoded picture to what an encoder takes: tiles or patches, bytes as they are after resizing.

Equal to the processors of transformers that use Pillow, byte for byte, up to their normalisation, which is the
encoder's. Resizing runs without Python's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.media.picture_settings import MediaSettings, PatchSettings, TileSettings
from paceline.media.sizes import MediaSize, first_size

if TYPE_CHECKING:
    from PIL.Image import Image

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
