"""The encoder of pictures on the native kernels: `models.encoder` without torch, the same bits in any parts.

A line (see `models.encoder`) is computed some units of one stage at a time, each part of it by one call. What a unit's
numbers are made of is its hidden state and the keys and values of its picture, or of its window, so that neither the
parts nor the other pictures of a group can change a bit. Patches are read where the first keys need them, and a square
becomes a vector as soon as its last patch is through: what stands before and behind the layers is spread over the line
as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.stretch import MediaInput
from paceline.models.files.encoder import CONNECTOR, INNER, NORM, PATCHES, TAP, VISION
from paceline.models.files.stored import StoredTensor, TensorSource, decode_float
from paceline.models.patches import (
    TablePlaces,
    merged_units,
    patch_bytes,
    patch_values,
    table_places,
    unit_cells,
    window_sizes,
)
from paceline.runner.native.arena import Matrix, build_arena
from paceline.runner.native.checks import Range, aligned
from paceline.runner.native.code import Code
from paceline.runner.native.encoder import EncoderKernels, encoder_of, query_tiles
from paceline.runner.native.layout import (
    GELU,
    KEYS,
    LAYER,
    REST,
    STATES,
    SUB_BLOCK,
    VECTORS,
    kv_head_bytes,
)
from paceline.runner.native.model import rope_tables, taken_turns

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]
Floats = NDArray[np.float32]

MOST_UNITS = 256  # computed together: their numbers stay in a near cache
LEAST_SIDE = 128  # positions that tables of turns begin with


@dataclass(slots=True, eq=False)
class Segments:
    """Units that see each other: those of each picture, or of each window."""

    sizes: Index  # units of each
    starts: Index  # where each begins
    first_subs: Index  # its first sub-block of keys and values
    slots: Index  # of each unit
    ends: Index  # of each unit, how many units see each other there

    @classmethod
    def of(cls, sizes: Index) -> Segments:
        subs, starts = -(-sizes // SUB_BLOCK), np.cumsum(sizes) - sizes
        first_subs = np.cumsum(subs) - subs
        slots = np.repeat(first_subs * SUB_BLOCK - starts, sizes) + np.arange(sizes.sum())
        return cls(sizes, starts, first_subs, slots, np.repeat(sizes, sizes))

    @property
    def subs(self) -> int:
        """Sub-blocks of all."""
        return int(self.first_subs[-1]) - (-int(self.sizes[-1]) // SUB_BLOCK)

    def tiles(self, start: int, stop: int) -> Index:
        """Queries of the units `start` to `stop` that attention takes together."""
        low, high = np.maximum(self.starts, start), np.minimum(self.starts + self.sizes, stop)
        here = low < high
        return query_tiles((high - low)[here], (low - start)[here], self.first_subs[here])


@dataclass(slots=True, eq=False)
class PictureBatch:
    """Pictures that are being computed."""

    x: Floats  # [units, hidden]: hidden states
    patches: Bytes  # [units, 3, size * size]
    places: TablePlaces | None  # of units in the table of positions
    cells: Index  # [2, units]: row and column
    # Of each rope cos and sin, [units, pairs], as far as they are worked out.
    turns: list[tuple[Floats, Floats]]
    pictures: Segments
    windows: Segments | None
    kv: NDArray[np.uint8]  # keys and values of the layer under way, in sub-blocks
    table: Index
    squares: Index  # [vectors, merge * merge] the units of each vector
    vectors: Floats  # [vectors, values] as far as they are computed


@dataclass(slots=True, eq=False)
class MergerLayout:
    """What makes vectors of the squares behind a layer."""

    row: Index  # as a layer that has a norm, of squares, and a feed-forward part only
    norm: int  # of units, before they stand in squares; 0: there is none
    norm_bias: int
    bias: Floats | None  # of the vectors
    column: int  # where they begin among the values of a token


class NativePictureEncoder(EncoderKernels):
    """Computes lines (`pictures.PictureEncoder`), in float32 or with weights and inputs of its layers as bytes."""

    def __init__(self, source: TensorSource, code: Code, threads: int, *more: Any, **options: Any) -> None:
        spec = encoder_of(source, VISION)
        assert spec.encoder is not None and spec.encoder.patches is not None
        self._patches, self._source = spec.encoder.patches, source
        super().__init__(source, code, threads, *more, prefix=VISION, **options)
        self._block_bytes = spec.num_heads * kv_head_bytes(self.spec.head_dim, in_bytes=False)
        self._make_rows(MOST_UNITS)

    def _constants(self) -> None:
        weights, p, patches, spec = self._weights, self._parameters, self._patches, self.spec
        ends = [CONNECTOR, *(f"{TAP}.{number}" for number in range(len(patches.taps)))]
        wanted = [PATCHES, *(f"{end}.{INNER}" for end in ends if patches.has_inner), *ends]
        names = [f"{VISION}{name}.weight" for name in wanted]
        self._outer, matrices = build_arena(_Flat(self._source), names, quantization="none")
        self._ranges += [Range(name, matrix.at, matrix.size) for name, matrix in matrices.items()]
        first, last = matrices[names[0]], matrices[names[-1]]
        table, bias = "embeddings.position_embeddings.weight", PATCHES + ".bias"
        self._table = weights.read(table) if weights.has(table) else None
        self._bias = weights.read(bias) if weights.has(bias) else None
        self._ends: dict[int, list[MergerLayout]] = {}  # by the layer that they are behind
        for number, (layer, name) in enumerate(zip((spec.num_layers - 1, *patches.taps), ends, strict=True)):
            self._ends.setdefault(layer, []).append(self._end(name, number * patches.width, matrices))
        # Of `MOST_UNITS` units, in squares: there is room for their states.
        self._at_once, self._square = MOST_UNITS // patches.merge**2, spec.hidden_size * patches.merge**2
        self._at_once = max(1, self._at_once)
        self._inner = aligned(self._at_once * self._square * 4)
        self._made = aligned(self._at_once * last.outputs * 4).view(np.float32).reshape(self._at_once, -1)
        self._turns = [rope_tables(rope, LEAST_SIDE) for rope in spec.ropes]
        p.point("positions", np.arange(MOST_UNITS))  # a unit's turns stand at its place in a part
        p.set(
            embedding=first.at,
            embedding_kind=first.kind,
            patch_inputs=first.inputs,
            outputs=last.outputs,
        )

    def _end(self, name: str, column: int, matrices: dict[str, Matrix]) -> MergerLayout:
        weights, inner, norm = self._weights, f"{name}.{INNER}", f"{name}.{NORM}"
        parts = {"down": matrices[f"{VISION}{name}.weight"]}
        if self._patches.has_inner:
            parts["gate"] = matrices[f"{VISION}{inner}.weight"]
        fields = {
            "gate_bias": weights.vector(inner + ".bias"),
            "norm_before_feed_forward": weights.vector(norm + ".weight"),
            "norm_bias_before_feed_forward": weights.vector(norm + ".bias"),
        }
        for part, matrix in parts.items():
            fields |= {part: matrix.at, f"{part}_kind": matrix.kind}
        row = np.zeros(len(LAYER), np.int64)
        for field, value in fields.items():
            row[LAYER[field]] = value
        of_units = name == CONNECTOR
        return MergerLayout(
            row=row,
            norm=weights.vector("final_norm.weight") if of_units else 0,
            norm_bias=weights.vector("final_norm.bias") if of_units else 0,
            bias=weights.read(name + ".bias") if weights.has(name + ".bias") else None,
            column=column,
        )

    # -- lines ---------------------------------------------------------------------------------------------

    def begin(self, items: Sequence[MediaInput]) -> PictureBatch:
        """The line of a group of pictures, of which nothing is computed yet."""
        patches, spec = self._patches, self.spec
        pictures = Segments.of(np.array([item.units for item in items]))
        windows = None
        if patches.window:
            windows = Segments.of(np.concatenate([window_sizes(patches, item) for item in items]))
        total, subs = sum(item.units for item in items), max(pictures.subs, windows.subs if windows else 0)
        cells = [unit_cells(patches, item) for item in items]
        begins = zip(pictures.starts, items, strict=True)
        self._make_scratch(int(pictures.sizes.max()))
        self._make_turns(1 + max(int(each.max()) for each in cells))
        pairs = [cos.shape[1] for cos, _ in self._turns]
        return PictureBatch(
            x=aligned(total * spec.hidden_size * 4).view(np.float32).reshape(total, -1),
            patches=np.concatenate([patch_bytes(patches, item) for item in items]),
            places=None if self._table is None else _joined([table_places(patches, item) for item in items]),
            cells=np.concatenate(cells, axis=1),
            turns=[
                (np.empty((total, count), np.float32), np.empty((total, count), np.float32))
                for count in pairs
            ],
            pictures=pictures,
            windows=windows,
            kv=aligned(subs * spec.num_heads * kv_head_bytes(spec.head_dim, in_bytes=False)),
            table=np.arange(subs),
            squares=np.concatenate([begin + merged_units(patches, item) for begin, item in begins]),
            vectors=np.zeros((sum(item.outputs for item in items), patches.values), np.float32),
        )

    def _make_turns(self, side: int) -> None:
        """Tables of turns for pictures of so many rows or columns."""
        for index, (rope, (cos, _)) in enumerate(zip(self.spec.ropes, self._turns, strict=True)):
            if len(cos) < side:
                self._turns[index] = rope_tables(rope, 2 * side)

    def advance(self, line: PictureBatch, first: int, count: int) -> None:
        """Compute `count` positions from `first` on, which is where the part before ended."""
        units, end = len(line.x), first + count
        while first < end:
            stage, start = divmod(first, units)
            stop = min(units, start + min(end - first, MOST_UNITS))
            layer, is_rest = divmod(stage, 2)
            if stage == 0:
                self._read(line, start, stop)
            self._compute(line, layer, REST if is_rest else KEYS, start, stop)
            for behind in self._ends.get(layer, ()) if is_rest else ():
                self._finish(line, behind, start, stop)
            first += stop - start

    def vectors(self, line: PictureBatch, items: Sequence[MediaInput]) -> list[Floats]:
        """Those of each picture of a line that is computed, [outputs, values]."""
        return np.split(line.vectors, np.cumsum([item.outputs for item in items])[:-1])

    def _read(self, line: PictureBatch, start: int, stop: int) -> None:
        """What some units have before their patches are added, and how they turn."""
        for rope, tables, (cos, sin) in zip(self.spec.ropes, self._turns, line.turns, strict=True):
            cos[start:stop], sin[start:stop] = taken_turns(tables, rope, line.cells[:, start:stop])
        x = line.x[start:stop]
        if line.places is not None:
            assert self._table is not None
            rows, share = line.places.rows[start:stop], line.places.share
            if share is None:
                np.take(self._table, rows[:, 0], axis=0, out=x)
            else:  # one after the other, so that all processors add in one order
                for place, part in zip(rows.T, share[start:stop].T, strict=True):
                    x += self._table[place] * part[:, None]
        if self._bias is not None:
            x += self._bias

    def _compute(self, line: PictureBatch, layer: int, stage: int, start: int, stop: int) -> None:
        """A stage of some units."""
        p, row, local = self._parameters, self._layers[layer], self._options.local
        seen = line.pictures
        if local and local[layer]:
            assert line.windows is not None
            seen = line.windows
        row[LAYER["kv"]], row[LAYER["block_bytes"]] = line.kv.ctypes.data, self._block_bytes
        row[LAYER["table"]], row[LAYER["table_width"]] = line.table.ctypes.data, 1
        row[LAYER["slots"]] = seen.slots[start:].ctypes.data
        if line.turns:
            cos, sin = line.turns[self.spec.layer_ropes[layer]]
            row[LAYER["cos"]], row[LAYER["sin"]] = cos[start:].ctypes.data, sin[start:].ctypes.data
        p.set(stage=stage, num_tokens=stop - start, layers=row.ctypes.data, patches=0)
        p.set(residual=line.x[start:].ctypes.data)
        if stage == REST:
            tiles = seen.tiles(start, stop)
            p.point("tiles", tiles)
            p.point("ends", seen.ends[start:stop])
            p.set(num_tiles=len(tiles))
        elif layer == 0:
            p.point("patches", patch_values(self._patches, line.patches[start:stop]))
        self._call(line)

    def _finish(self, line: PictureBatch, end: MergerLayout, start: int, stop: int) -> None:
        """The vectors of squares whose last unit is one of these: all before it are through."""
        last = line.squares[:, -1]
        ready = np.flatnonzero((last >= start) & (last < stop))
        for index in range(0, len(ready), self._at_once):
            part = ready[index : index + self._at_once]
            p, units = self._parameters, line.squares[part].ravel()
            p.point("chosen_units", units)
            p.set(stage=STATES, num_tokens=len(units), residual=line.x.ctypes.data)
            p.set(last_norm=end.norm, last_norm_bias=end.norm_bias)
            self._call(line)
            self._make_vectors(line, end, len(part))
            made = self._made[: len(part), : self._patches.width]
            if end.bias is not None:
                made = made + end.bias
            line.vectors[part, end.column : end.column + self._patches.width] = made

    def _make_vectors(self, line: PictureBatch, end: MergerLayout, count: int) -> None:
        """Of squares whose states stand side by side: what a layer feeds forward, in other sizes and in float32."""
        p = self._parameters
        states = p.get("normed")
        values = {
            "layers": end.row.ctypes.data,
            "residual": states,
            "gated": self._inner.ctypes.data if end.row[LAYER["gate"]] else states,
            "delta": self._made.ctypes.data,
            "hidden": self._square,
            "inner": self._square,
            "input_bytes": 0,
            "activation": GELU,
        }
        kept = {name: p.get(name) for name in values}
        try:
            p.set(stage=VECTORS, num_tokens=count, **values)
            self._call(line)
        finally:
            p.set(**kept)

    def _call(self, line: PictureBatch) -> None:
        self._line = line
        self._run()

    def _others(self) -> list[Range]:
        line = self._line
        seen = [line.pictures] if line.windows is None else [line.pictures, line.windows]
        return [
            Range.of("hidden states", line.x, writable=True),
            Range.of("keys and values", line.kv, writable=True),
            Range.of("block table", line.table),
            *(Range.of("slots", each.slots) for each in seen),
            *(Range.of("turns", table) for pair in line.turns for table in pair),
            Range.of("layers", self._layers),
            *(Range.of("the row of an end", end.row) for ends in self._ends.values() for end in ends),
            Range.of("inner layer of an end", self._inner, writable=True),
            Range.of("vectors", self._made, writable=True),
        ]


def _joined(places: list[TablePlaces]) -> TablePlaces:
    """Those of several pictures, one behind the other."""
    shares = [each.share for each in places if each.share is not None]
    return TablePlaces(
        np.concatenate([each.rows for each in places]), np.concatenate(shares) if shares else None
    )


class _Flat:
    """A source whose products of pixels are matrices."""

    def __init__(self, source: TensorSource) -> None:
        self._source, self.spec = source, source.spec

    def names(self) -> frozenset[str]:
        return self._source.names()

    def tensor(self, name: str) -> StoredTensor:
        tensor = self._source.tensor(name)
        if len(tensor.shape) == FRAMED:  # equal frames, of which one is given
            values = np.ascontiguousarray(tensor.to_float32().sum(axis=2)).reshape(tensor.shape[0], -1)
            raw = values.view(np.uint8).reshape(-1)
            return replace(tensor, shape=values.shape, dtype="F32", raw=raw, decode=decode_float)
        return replace(tensor, shape=(tensor.shape[0], math.prod(tensor.shape[1:])))


FRAMED = 5  # dimensions of a product of several frames
