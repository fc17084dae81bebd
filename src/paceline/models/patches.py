"""Pictures as the encoders read them: patches, where each stands, and which of them become one vector.

In numpy, for the native kernels and torch alike. A patch is a row of values: channel, row, column. The units of a line
are patches row by row, or square by square; where layers see windows, those of a window stand together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.stretch import MediaInput
from paceline.models.spec import PatchSpec

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]
Floats = NDArray[np.float32]


def patch_bytes(patches: PatchSpec, given: MediaInput) -> Bytes:
    """The patches of a picture in the order of the line, [units, 3, size * size]."""
    _, rows, columns = given.grid
    size = patches.size
    if patches.in_squares:
        own: Bytes = np.asarray(given.pixels, np.uint8).reshape(rows * columns, 3, size * size)
    else:
        pixels = np.asarray(given.pixels, np.uint8).reshape(rows, size, columns, size, 3)
        own = pixels.transpose(0, 2, 4, 1, 3).reshape(rows * columns, 3, size * size)
    return own[_order(patches, given)] if patches.window else own


def patch_values(patches: PatchSpec, own: Bytes) -> Floats:
    """What some patches are read as, [units, 3 * size * size]."""
    values: Floats = _channels(patches)[np.arange(3)[:, None], own].reshape(len(own), -1)
    return values


def _channels(patches: PatchSpec) -> Floats:
    """What each byte is read as, by channel; rounded as the reference rounds it."""
    scaled = (np.arange(256) * patches.scale).astype(np.float32)
    mean, deviation = np.array(patches.mean, np.float32), np.array(patches.deviation, np.float32)
    return (scaled - mean[:, None]) / deviation[:, None]


def unit_cells(patches: PatchSpec, given: MediaInput) -> Index:
    """Row and column of each unit of the line, [2, units]."""
    cells = _cells(patches, given)
    return cells[:, _order(patches, given)] if patches.window else cells


def _cells(patches: PatchSpec, given: MediaInput) -> Index:
    """Row and column of each patch, as they come."""
    _, rows, columns = given.grid
    cells: Index = np.indices((rows, columns))
    if patches.in_squares:
        merge = patches.merge
        cells = cells.reshape(2, rows // merge, merge, columns // merge, merge).swapaxes(2, 3)
    return cells.reshape(2, -1)


def _order(patches: PatchSpec, given: MediaInput) -> Index:
    """Which of the patches, as they come, stands at each place of the line."""
    order: Index = np.argsort(_windows(patches, given), kind="stable")
    return order


def _windows(patches: PatchSpec, given: MediaInput) -> Index:
    """The window of each patch, as they come."""
    row, column = _cells(patches, given) // (patches.window * patches.merge)
    windows: Index = row * (1 + column.max()) + column
    return windows


def window_sizes(patches: PatchSpec, given: MediaInput) -> Index:
    """Units of each window, in the order of the line."""
    return np.bincount(_windows(patches, given))


class TablePlaces(NamedTuple):
    """Rows of the table of positions that stand for each unit, [units, rows], and how much of each is taken."""

    rows: Index
    share: Floats | None  # None: all of one


def table_places(patches: PatchSpec, given: MediaInput) -> TablePlaces:
    """Where the units of a picture stand in the table of positions, which is of a square picture."""
    row, column = unit_cells(patches, given)
    _, rows, columns = given.grid
    along = _between if patches.is_interpolated else _nearest
    rows_at, rows_share = along(row, rows, patches.side)
    columns_at, columns_share = along(column, columns, patches.side)
    index = (rows_at[:, :, None] * patches.side + columns_at[:, None, :]).reshape(len(row), -1)
    if rows_share is None or columns_share is None:
        return TablePlaces(index, None)
    return TablePlaces(index, (rows_share[:, :, None] * columns_share[:, None, :]).reshape(index.shape))


def _nearest(place: Index, count: int, side: int) -> tuple[Index, None]:
    """The picture is laid over the table: a patch has the place in which its beginning falls. The sums are those of the
    reference, in float32: rounding decides where two places meet."""
    borders = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
    begins = place.astype(np.float32) * (np.float32(1) / np.float32(count))
    found: Index = np.searchsorted(borders, np.minimum(begins, np.float32(1.0 - 1e-6)), side="right")
    return found[:, None], None


def _between(place: Index, count: int, side: int) -> tuple[Index, Floats]:
    """The first and the last patch stand at the ends of the table, the others at equal distances, in float32 as the
    reference counts."""
    at = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(count - 1, 1))
    before = np.floor(at)
    index = np.minimum(before.astype(np.int64)[:, None] + np.arange(2), side - 1)
    share = np.float32(1) - np.abs((at - before)[:, None] - np.arange(2, dtype=np.float32))
    return index, np.maximum(share, np.float32(0))


def merged_units(patches: PatchSpec, given: MediaInput) -> Index:
    """For each vector the units it is made from, [outputs, merge * merge]: a square, row by row."""
    _, rows, columns = given.grid
    merge = patches.merge
    if not patches.in_squares:
        squares = np.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
        return squares.transpose(0, 2, 1, 3).reshape(-1, merge * merge)
    units = np.arange(rows * columns)
    if patches.window:
        units = np.argsort(_order(patches, given))
    return units.reshape(-1, merge * merge)


class PicturePlace(NamedTuple):
    """A picture in a sequence: where its vectors begin and end, and the rows and columns that they are of."""

    begin: int
    end: int
    rows: int
    columns: int


def turns(pictures: Iterable[PicturePlace], start: int, end: int) -> Index:
    """By what the tokens `start` to `end` of a sequence turn, [3, tokens]: time, row and column.

    All three are the position in text. In a picture time stands still, and it takes as many turns as its longer side
    has vectors: from then on tokens turn by less than their position. `pictures`: in their order.
    """
    found: Index = np.tile(np.arange(start, end), (3, 1))
    saved = 0
    for picture in pictures:
        if picture.begin >= end:
            break
        low, high = max(picture.begin, start), min(picture.end, end)
        if low < high:
            inside, place = found[:, low - start : high - start], np.arange(low, high) - picture.begin
            inside[:] = picture.begin - saved
            inside[1] += place // picture.columns
            inside[2] += place % picture.columns
        saved += picture.end - picture.begin - max(picture.rows, picture.columns)
        if picture.end < end:
            behind = max(picture.end, start)
            found[:, behind - start :] = np.arange(behind, end) - saved
    return found
