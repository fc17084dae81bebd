"""The encoder of pictures on the native kernels: `models.encoder` without torch, the same bits in any parts.

A line (see `models.encoder`) is computed some units of one stage at a time, each part of it by one call. What a unit's
numbers are made of is its hidden state and the keys and values of its picture, so that neither the parts nor the other
pictures of a group can change a bit. Patches are read where the first keys need them, and a square becomes a vector as
soon as its last patch is through: what stands before and behind the layers is spread over the line as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.stretch import MediaInput
from paceline.models.files.encoder import CONNECTOR, PATCHES, VISION
from paceline.models.files.stored import StoredTensor, TensorSource
from paceline.models.patches import merged_units, patch_bytes, patch_values, table_places
from paceline.runner.native.arena import build_arena
from paceline.runner.native.checks import Range, aligned
from paceline.runner.native.code import Code
from paceline.runner.native.encoder import EncoderKernels, encoder_of, query_tiles
from paceline.runner.native.layout import KEYS, LAYER, REST, STATES, SUB_BLOCK, VECTORS, kv_head_bytes

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]
Floats = NDArray[np.float32]

MOST_UNITS = 256  # computed together: their numbers stay in a near cache


@dataclass(slots=True, eq=False)
class Line:
    """Pictures that are being computed."""

    x: Floats  # [units, hidden]: hidden states
    patches: Bytes  # [units, 3, size * size]
    sizes: Index  # units of each picture
    starts: Index  # where each begins
    kv: NDArray[np.uint8]  # keys and values of the layer under way, in sub-blocks
    first_subs: Index  # the first sub-block of each picture
    table: Index
    slots: Index  # of each unit
    ends: Index  # of each unit, how many units its picture has
    squares: Index  # [vectors, merge * merge] the units of each vector
    vectors: Floats  # [vectors, width] as far as they are computed


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
        weights, p = self._weights, self._parameters
        names = [VISION + PATCHES + ".weight", VISION + CONNECTOR + ".weight"]
        self._ends, matrices = build_arena(_Flat(self._source), names, quantization="none")
        self._ranges += [Range(name, matrix.at, matrix.size) for name, matrix in matrices.items()]
        first, end = (matrices[name] for name in names)
        # What each place adds to a patch.
        places = weights.read("embeddings.position_embeddings.weight")
        self._places = places + weights.read(PATCHES + ".bias")
        # As the part of a layer that has a product only.
        self._end = np.zeros(len(LAYER), np.int64)
        self._end[LAYER["down"]], self._end[LAYER["down_kind"]] = end.at, end.kind
        self._at_once = max(1, MOST_UNITS // self._patches.merge**2)
        self._made = aligned(self._at_once * end.outputs * 4).view(np.float32).reshape(self._at_once, -1)
        p.set(
            embedding=first.at,
            embedding_kind=first.kind,
            patch_inputs=first.inputs,
            outputs=end.outputs,
            last_norm=weights.vector("final_norm.weight"),
            last_norm_bias=weights.vector("final_norm.bias"),
        )

    # -- lines ---------------------------------------------------------------------------------------------

    def begin(self, items: Sequence[MediaInput]) -> Line:
        """The line of a group of pictures, of which nothing is computed yet."""
        patches, spec = self._patches, self.spec
        sizes = np.array([item.units for item in items])
        subs = -(-sizes // SUB_BLOCK)
        total, starts, first_subs = int(sizes.sum()), np.cumsum(sizes) - sizes, np.cumsum(subs) - subs
        x = aligned(total * spec.hidden_size * 4).view(np.float32).reshape(total, -1)
        places = np.concatenate([table_places(patches, item).rows[:, 0] for item in items])
        np.take(self._places, places, axis=0, out=x)
        squares = [start + merged_units(patches, item) for start, item in zip(starts, items, strict=True)]
        self._make_scratch(int(sizes.max()))
        return Line(
            x=x,
            patches=np.concatenate([patch_bytes(patches, item) for item in items]),
            sizes=sizes,
            starts=starts,
            kv=aligned(int(subs.sum()) * spec.num_heads * kv_head_bytes(spec.head_dim, in_bytes=False)),
            first_subs=first_subs,
            table=np.arange(int(subs.sum() + subs.max())),
            slots=np.repeat(first_subs * SUB_BLOCK - starts, sizes) + np.arange(total),
            ends=np.repeat(sizes, sizes),
            squares=np.concatenate(squares),
            vectors=np.zeros((sum(item.outputs for item in items), patches.width), np.float32),
        )

    def advance(self, line: Line, first: int, count: int) -> None:
        """Compute `count` positions from `first` on, which is where the part before ended."""
        units, end = len(line.x), first + count
        while first < end:
            stage, start = divmod(first, units)
            stop = min(units, start + min(end - first, MOST_UNITS))
            self._compute(line, stage // 2, REST if stage % 2 else KEYS, start, stop)
            if stage == 2 * self.spec.num_layers - 1:
                self._finish(line, start, stop)
            first += stop - start

    def vectors(self, line: Line, items: Sequence[MediaInput]) -> list[Floats]:
        """Those of each picture of a line that is computed, [outputs, width]."""
        return np.split(line.vectors, np.cumsum([item.outputs for item in items])[:-1])

    def _compute(self, line: Line, layer: int, stage: int, start: int, stop: int) -> None:
        """A stage of some units."""
        p, row = self._parameters, self._layers[layer]
        row[LAYER["kv"]], row[LAYER["block_bytes"]] = line.kv.ctypes.data, self._block_bytes
        row[LAYER["table"]], row[LAYER["table_width"]] = line.table.ctypes.data, 1
        row[LAYER["slots"]] = line.slots[start:].ctypes.data
        p.set(stage=stage, num_tokens=stop - start, layers=row.ctypes.data, patches=0)
        p.set(residual=line.x[start:].ctypes.data)
        if stage == REST:
            low, high = np.maximum(line.starts, start), np.minimum(line.starts + line.sizes, stop)
            here = low < high
            tiles = query_tiles((high - low)[here], (low - start)[here], line.first_subs[here])
            p.point("tiles", tiles)
            p.point("ends", line.ends[start:stop])
            p.set(num_tiles=len(tiles))
        elif layer == 0:
            p.point("patches", patch_values(self._patches, line.patches[start:stop]))
        self._call(line)

    def _finish(self, line: Line, start: int, stop: int) -> None:
        """The vectors of squares whose last unit is one of these: all before it are through."""
        last = line.squares[:, -1]
        ready = np.flatnonzero((last >= start) & (last < stop))
        for index in range(0, len(ready), self._at_once):
            part = ready[index : index + self._at_once]
            p, hidden = self._parameters, self.spec.hidden_size
            p.point("chosen_units", line.squares[part].ravel())
            p.set(stage=STATES, num_tokens=line.squares[part].size, residual=line.x.ctypes.data)
            self._call(line)
            kept = {name: p.get(name) for name in ("inner", "input_bytes", "gated", "delta")}
            p.set(stage=VECTORS, num_tokens=len(part), layers=self._end.ctypes.data, gated=p.get("normed"))
            p.set(inner=line.squares.shape[1] * hidden, input_bytes=0, delta=self._made.ctypes.data)
            self._call(line)
            p.set(**kept)
            line.vectors[part] = self._made[: len(part), : line.vectors.shape[1]]

    def _call(self, line: Line) -> None:
        self._line = line
        self._run()

    def _others(self) -> list[Range]:
        line = self._line
        return [
            Range.of("hidden states", line.x, writable=True),
            Range.of("keys and values", line.kv, writable=True),
            Range.of("block table", line.table),
            Range.of("slots", line.slots),
            Range.of("layers", self._layers),
            Range.of("the row of the end", self._end),
            Range.of("vectors", self._made, writable=True),
        ]


class _Flat:
    """A source whose products of pixels are matrices."""

    def __init__(self, source: TensorSource) -> None:
        self._source, self.spec = source, source.spec

    def names(self) -> frozenset[str]:
        return self._source.names()

    def tensor(self, name: str) -> StoredTensor:
        tensor = self._source.tensor(name)
        return replace(tensor, shape=(tensor.shape[0], math.prod(tensor.shape[1:])))
