"""Where each tensor the decoder wants lies in a file that may call, fuse, stack or order it differently.

A `Piece` is a whole stored tensor, some rows of it, or one entry of a stack. Rows are whole in every format we
read, quantised ones too, so that all of this works on bytes and never decodes. Knows no format's names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.errors import CheckpointError, some_of
from paceline.checkpoint.stored import StoredTensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of the stored tensor `source`: first the entry of the stack, then the rows, then their order."""

    source: str
    entry: int | None = None  # of a stack of equal tensors
    rows: tuple[int, int] | None = None
    of_rows: int = 0  # with `rows`: how many the stored tensor must have
    interleaved_heads: int = 0  # rows of so many heads lie (first half, second half) pair by pair

    def shape(self, stored: Shape) -> Shape | None:
        """The shape of this part of a tensor of shape `stored`; None where there is no such part."""
        if self.entry is not None:
            if len(stored) < 2 or self.entry >= stored[0]:
                return None
            stored = stored[1:]
        if self.rows is not None:
            if not stored or stored[0] != self.of_rows:
                return None
            stored = (self.rows[1] - self.rows[0], *stored[1:])
        if self.interleaved_heads and (not stored or stored[0] % (2 * self.interleaved_heads)):
            return None
        return stored

    def cut(self, name: str, tensor: StoredTensor) -> StoredTensor:
        """This part of `tensor`, which is the stored tensor `source`, as the tensor `name`."""
        shape = self.shape(tensor.shape)
        assert shape is not None, (name, tensor.shape)
        raw = tensor.raw
        if self.entry is not None:
            raw = raw.reshape(tensor.shape[0], -1)[self.entry]
        if self.rows is not None:
            raw = raw.reshape(self.of_rows, -1)[self.rows[0] : self.rows[1]].reshape(-1)
        if self.interleaved_heads:
            raw = _halves_apart(raw, shape[0], self.interleaved_heads)
        return replace(tensor, name=name, shape=shape, raw=raw)


def locate(
    wanted: Iterable[tuple[str, Shape]],
    stored: Mapping[str, Shape],
    places: Callable[[str], Iterable[Piece]],
    ignored: Callable[[str], bool],
    where: str,
) -> dict[str, Piece]:
    """The piece for every wanted tensor: the first of `places(name)` whose source exists.

    Whatever is missing, misshapen or left over is one error that names all of it.
    """
    pieces: dict[str, Piece] = {}
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    for name, shape in wanted:
        piece = next((place for place in places(name) if place.source in stored), None)
        if piece is None:
            missing.append(name)
            continue
        used.add(piece.source)
        pieces[name] = piece
        if piece.shape(stored[piece.source]) != shape:
            misshapen.append(f"{piece.source} {list(stored[piece.source])} (for {name} {list(shape)})")
    extra = [name for name in stored if name not in used and not ignored(name)]
    _refuse(missing, misshapen, extra, where)
    return pieces


def _refuse(missing: list[str], misshapen: list[str], extra: list[str], where: str) -> None:
    faults = []
    if missing:
        faults.append(f"{len(missing)} missing: {some_of(missing)}")
    if misshapen:
        faults.append(f"{len(misshapen)} of another shape: {some_of(misshapen)}")
    if extra:
        faults.append(f"{len(extra)} not part of the model: {some_of(extra)}")
    if faults:
        raise CheckpointError(f"{where}: the tensors do not fit the model described; {'; '.join(faults)}")


def _halves_apart(raw: NDArray[np.uint8], rows: int, heads: int) -> NDArray[np.uint8]:
    """Rows ordered (0, half, 1, half + 1, ...) in each head, put back to (0, 1, ..., half, half + 1, ...)."""
    half = rows // heads // 2
    width = math.prod(raw.shape) // rows
    ordered = raw.reshape(heads, half, 2, width).swapaxes(1, 2)
    result = np.ascontiguousarray(ordered).reshape(-1)
    result.flags.writeable = False
    return result
