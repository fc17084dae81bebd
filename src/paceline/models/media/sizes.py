"""What a picture will be to an encoder, from its width and height alone.

So its price is known before a pixel is decoded: admission, quotas, estimates and counts of tokens ask here. The rules
are those of the processors in transformers, rounding included: one tile more or less would shift all that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import InvalidImage
from paceline.models.media.picture_settings import MediaSettings, PatchSettings, TileSettings

MAX_RESIZED = 4096  # pixels of a side, before a picture is cut into tiles
MAX_RATIO = 200  # of the sides of a picture cut into patches: its processor refuses more


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSize:
    """A picture as an encoder gets it."""

    width: int  # in pixels, after resizing
    height: int
    rows: int = 0  # of tiles; 0: it is not cut
    columns: int = 0
    grid: tuple[int, int, int]  # frames, rows and columns of patches of each item
    item_outputs: int  # vectors of each item

    @property
    def items(self) -> int:
        """The whole picture stands behind its tiles."""
        return self.rows * self.columns + 1

    @property
    def item_units(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def outputs(self) -> int:
        return self.items * self.item_outputs


def media_size(width: int, height: int, settings: MediaSettings) -> MediaSize:
    """Raises InvalidImage for sides that the model does not take."""
    if isinstance(settings, TileSettings):
        return _tiled(width, height, settings)
    return _patched(width, height, settings)


def first_size(width: int, height: int, settings: TileSettings) -> tuple[int, int]:
    """A picture that is cut into tiles is resized twice: here to the longest side, later to whole tiles."""
    if not settings.resizes:
        return width, height
    ratio = width / height
    if width >= height:
        width = settings.longest
        height = int(width / ratio)
        height += height % 2
    else:
        height = settings.longest
        width = int(height * ratio)
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_RESIZED:
        width = MAX_RESIZED
        height = int(width / ratio)
    elif height > width and height > MAX_RESIZED:
        height = MAX_RESIZED
        width = int(height * ratio)
    return max(width, 1), max(height, 1)


def _tiled(width: int, height: int, settings: TileSettings) -> MediaSize:
    tile, per_side = settings.tile, settings.tile // settings.patch
    width, height = first_size(width, height, settings)
    rows = columns = 0
    if settings.splits:
        ratio = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
        width, height = max(width, tile), max(height, tile)
        if width > tile or height > tile:
            rows, columns = height // tile, width // tile
    else:
        width = height = tile
    return MediaSize(
        width=width,
        height=height,
        rows=rows,
        columns=columns,
        grid=(1, per_side, per_side),
        item_outputs=settings.outputs,
    )


def _patched(width: int, height: int, settings: PatchSettings) -> MediaSize:
    if max(width, height) > MAX_RATIO * min(width, height):
        message = f"the picture is {width} x {height} pixels; this model takes sides of at most {MAX_RATIO}:1"
        raise InvalidImage(message)
    factor = settings.patch * settings.merge
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > settings.max_pixels:
        shrink = math.sqrt((height * width) / settings.max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor**2 < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        rows = math.ceil(height * grow / factor)
        columns = math.ceil(width * grow / factor)
    return MediaSize(
        width=columns * factor,
        height=rows * factor,
        grid=(1, rows * settings.merge, columns * settings.merge),
        item_outputs=rows * columns,
    )
