"""One bidirectional transformer over ragged sequences, as there is one decoder: BERT, XLM-RoBERTa and ModernBERT for
texts; SigLIP and the encoders of Qwen2.5-VL and Qwen3-VL for pictures.

All sequences of a step are one flat batch without padding. What ties the units of a sequence (tokens, patches) together
is attention, which takes sequences of equal length together. The work is a line of 2 x layers x units positions: in
each layer the keys and values of all units, then attention and what follows, unit by unit. Any part of it can be
computed; between two parts hidden states wait in an `EncoderBatch`. Float32 on a CPU, in torch: the reference for the
kernels, and the way of models that they do not cover.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from paceline.core.stretch import MediaInput
from paceline.models.files.encoder import CONNECTOR, INNER, NORM, PATCHES, TAP, layer_norms
from paceline.models.files.stored import TensorSource, check_finite
from paceline.models.layers import ACTIVATIONS
from paceline.models.patches import (
    merged_units,
    patch_bytes,
    patch_values,
    table_places,
    unit_cells,
    window_sizes,
)
from paceline.models.rope import Rotary, cos_sin_of, rotate
from paceline.models.spec import ModelSpec

Index = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class Affine:
    """A product: a weight, and a bias where there is one."""

    weight: Tensor
    bias: Tensor | None

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Norm:
    """Of mean and deviation, or of the root of the mean square only."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_rms: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_rms:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(slots=True)
class Merger:
    """Squares of patches [squares, merge * merge * hidden] to vectors."""

    norm: Norm | None
    inner: Affine | None
    outer: Affine

    def __call__(self, squares: Tensor) -> Tensor:
        if self.norm is not None:
            squares = self.norm(squares)
        if self.inner is not None:
            squares = F.gelu(self.inner.product(squares))
        return self.outer.product(squares)


@dataclass(slots=True)
class EncoderLayer:
    """One layer."""

    queries: Affine
    keys_values: Affine  # as one product
    mixed: Affine
    inner: Affine
    up: Affine | None
    outer: Affine
    norms: list[Norm | None]  # of attention and of the feed-forward part, before or behind them


@dataclass(slots=True)
class EncoderBatch:
    """Sequences that are being computed."""

    x: Tensor  # [units, hidden]: hidden states
    keys: Tensor  # [units, heads, head_dim] of the layer under way
    values: Tensor
    bounds: list[int]  # where sequences begin, and the end of the last
    turns: list[tuple[Tensor, Tensor]]  # of each rope
    # Of pictures: where windows begin, and the end of the last; the units of each vector; vectors of layers behind
    # which squares become some.
    windows: list[int] = field(default_factory=list)
    squares: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))
    deep: list[Tensor] = field(default_factory=list)


class Encoder:
    """Sequences in, hidden states out."""

    def __init__(self, spec: ModelSpec, source: TensorSource, prefix: str = "") -> None:
        """`prefix`: of its tensors in `source`."""
        assert spec.encoder is not None
        self.spec, self._options = spec, spec.encoder
        read = _Reader(source, prefix)
        self._patches: Affine | None = None
        self._end: Merger | None = None
        self._taps: dict[int, Merger] = {}  # by layer
        self._words: Tensor | None = None
        self._places: Tensor | None = None
        self._second: Tensor | None = None
        if self._options.patches is not None:
            patches = read.affine(PATCHES)
            if self._options.patches.frames:  # equal ones, of which one is given
                patches.weight = patches.weight.sum(2)
            self._patches = Affine(patches.weight.flatten(1), patches.bias)
            self._end = self._read_end(read, CONNECTOR)
            for number, layer in enumerate(self._options.patches.taps):
                self._taps[layer] = self._read_end(read, f"{TAP}.{number}")
            if self._options.num_positions:
                self._places = read("embeddings.position_embeddings.weight")
        else:
            self._words = read("embeddings.word_embeddings.weight")
            if not spec.ropes:
                self._read_places(read)
        self._ropes = [] if self._patches else [Rotary(rope, spec.max_positions) for rope in spec.ropes]
        self._norm = self._read_norm(read, "embeddings.LayerNorm") if self._options.embedding_norm else None
        self._layers = [self._read_layer(read, layer) for layer in range(spec.num_layers)]
        self._last = self._read_norm(read, "final_norm") if self._options.norm_first else None

    def _read_places(self, read: _Reader) -> None:
        # Nearly all tokens are of the first type; those of the second text of a pair differ from it by this.
        types = read("embeddings.token_type_embeddings.weight")
        places = read("embeddings.position_embeddings.weight")
        self._places = places[self._options.position_offset :] + types[0]
        self._second = types[1] - types[0] if len(types) > 1 else None

    def _read_layer(self, read: _Reader, layer: int) -> EncoderLayer:
        prefix = f"encoder.layer.{layer}."
        norms: list[Norm | None] = [self._read_norm(read, name) for name in layer_norms(self.spec, layer)]
        return EncoderLayer(
            queries=read.affine(prefix + "attention.self.query"),
            keys_values=read.affine(*(f"{prefix}attention.self.{part}" for part in ("key", "value"))),
            mixed=read.affine(prefix + "attention.output.dense"),
            inner=read.affine(prefix + "intermediate.dense"),
            up=read.affine(prefix + "intermediate.up") if self._options.is_gated else None,
            outer=read.affine(prefix + "output.dense"),
            norms=norms if len(norms) == 2 else [None, *norms],
        )

    def _read_norm(self, read: _Reader, name: str) -> Norm:
        found = read.affine(name)
        return Norm(found.weight, found.bias, self.spec.norm_eps, self._options.is_rms)

    def _read_end(self, read: _Reader, name: str) -> Merger:
        norm, inner = f"{name}.{NORM}", f"{name}.{INNER}"
        return Merger(
            self._read_norm(read, norm) if read.has(norm) else None,
            read.affine(inner) if read.has(inner) else None,
            read.affine(name),
        )

    # -- texts ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self, texts: Sequence[Index], beat: Callable[[], None], seconds: Sequence[int] = ()
    ) -> list[Floats]:
        """Hidden states [tokens, hidden] of each sequence of token ids. `beat` is called for every layer.

        `seconds`: where the second text of each begins, 0 where it is one text; empty: all are.
        """
        assert self._words is not None
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        sizes = [len(texts[index]) for index in order]
        tokens = torch.from_numpy(np.concatenate([texts[index] for index in order]))
        places = torch.cat([torch.arange(size) for size in sizes])
        x = self._words[tokens]
        if self._places is not None:
            x = x + self._places[places]
        if self._second is not None and any(seconds):
            begins = torch.tensor([seconds[index] or len(texts[index]) for index in order])
            x[places >= torch.repeat_interleave(begins, torch.tensor(sizes))] += self._second
        line = self._line(x, sizes, places)
        for layer in range(self.spec.num_layers):
            beat()
            self.advance(line, 2 * layer * len(tokens), 2 * len(tokens))
        x = self._states(line)
        found = dict(zip(order, np.split(x.numpy(), np.cumsum(sizes)[:-1]), strict=True))
        return [found[index] for index in range(len(texts))]

    # -- pictures ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, items: Sequence[MediaInput]) -> EncoderBatch:
        """The line of a group of pictures, of which nothing is computed yet."""
        patches = self._options.patches
        assert patches is not None and self._patches is not None
        values = [patch_values(patches, patch_bytes(patches, item)) for item in items]
        x = torch.cat([self._patches.product(torch.from_numpy(part)) for part in values])
        if self._places is not None:
            x += torch.cat([self._placed(self._places, item) for item in items])
        line = self._line(x, [item.units for item in items], torch.zeros(0))
        cells = [torch.from_numpy(unit_cells(patches, item)) for item in items]
        line.turns = [cos_sin_of(rope, torch.cat(cells, dim=1)) for rope in self.spec.ropes]
        begins = zip(line.bounds[:-1], items, strict=True)
        line.squares = torch.from_numpy(
            np.concatenate([begin + merged_units(patches, item) for begin, item in begins])
        )
        if patches.window:
            sizes = np.concatenate([window_sizes(patches, item) for item in items])
            line.windows = [0, *np.cumsum(sizes).tolist()]
        return line

    def _placed(self, table: Tensor, item: MediaInput) -> Tensor:
        """What the table of positions adds to the patches of a picture."""
        assert self._options.patches is not None
        found, share = table_places(self._options.patches, item)
        rows = table[torch.from_numpy(found)]
        return rows[:, 0] if share is None else (rows * torch.from_numpy(share)[:, :, None]).sum(1)

    @torch.inference_mode()
    def vectors(self, line: EncoderBatch, items: Sequence[MediaInput]) -> list[Floats]:
        """Those of each picture of a line that is computed, [outputs, values]."""
        assert self._end is not None
        ends = [self._end(self._states(line)[line.squares].flatten(1)), *line.deep]
        found: Floats = torch.cat(ends, dim=1).numpy()
        return np.split(found, np.cumsum([item.outputs for item in items])[:-1])

    # -- the line ------------------------------------------------------------------------------------------

    def _line(self, x: Tensor, sizes: Sequence[int], places: Tensor) -> EncoderBatch:
        if self._norm is not None:
            x = self._norm(x)
        keys, values = torch.empty(2, len(x), self.spec.num_heads, self.spec.head_dim)
        bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        return EncoderBatch(x, keys, values, bounds, [rope.cos_sin(places, places) for rope in self._ropes])

    def _states(self, line: EncoderBatch) -> Tensor:
        return line.x if self._last is None else self._last(line.x)

    @torch.inference_mode()
    def advance(self, line: EncoderBatch, first: int, count: int) -> None:
        """Compute `count` positions from `first` on, which is where the part before ended."""
        units, end = len(line.x), first + count
        while first < end:
            stage, start = divmod(first, units)
            stop = min(units, start + end - first)
            if stage % 2:
                self._attend(line, stage // 2, start, stop)
                tap = self._taps.get(stage // 2)
                if tap is not None and stop == units:
                    line.deep.append(tap(line.x[line.squares].flatten(1)))
            else:
                self._remember(line, stage // 2, start, stop)
            first += stop - start

    def _remember(self, line: EncoderBatch, layer: int, start: int, stop: int) -> None:
        """Keys and values of some units."""
        part = self._layers[layer]
        product = part.keys_values.product(self._before(part, line.x[start:stop]))
        keys, values = product.view(stop - start, 2, self.spec.num_heads, -1).unbind(1)
        line.keys[start:stop] = self._turned(line, layer, keys, start, stop)
        line.values[start:stop] = values

    def _attend(self, line: EncoderBatch, layer: int, start: int, stop: int) -> None:
        """Attention of some units, and what follows it."""
        part = self._layers[layer]
        x = line.x[start:stop]
        queries = part.queries.product(self._before(part, x)).view(stop - start, self.spec.num_heads, -1)
        queries = self._turned(line, layer, queries, start, stop)
        x = x + part.mixed.product(self._mixed(line, layer, queries, start, stop))
        first, second = part.norms
        assert second is not None
        if self._options.norm_first:
            line.x[start:stop] = x + self._fed(part, second(x))
        else:
            assert first is not None
            x = first(x)
            line.x[start:stop] = second(x + self._fed(part, x))

    def _before(self, part: EncoderLayer, x: Tensor) -> Tensor:
        """What queries, keys and values are made from."""
        first = part.norms[0] if self._options.norm_first else None
        return x if first is None else first(x)

    def _turned(self, line: EncoderBatch, layer: int, heads: Tensor, start: int, stop: int) -> Tensor:
        if not line.turns:
            return heads
        cos, sin = line.turns[self.spec.layer_ropes[layer]]
        return rotate(heads, cos[start:stop], sin[start:stop])

    def _mixed(self, line: EncoderBatch, layer: int, queries: Tensor, start: int, stop: int) -> Tensor:
        """Values as units `start` to `stop` see them, [units, hidden]."""
        reach = self._options.reaches[layer] if self._options.reaches else 0
        mixed = torch.empty(stop - start, self.spec.hidden_size)
        is_local = bool(self._options.local) and self._options.local[layer]
        for low, high, begin, size in _parts(line.windows if is_local else line.bounds, start, stop):
            count = max(1, (high - low) // size)  # sequences of one length, whole; or a part of one
            shape = (count, -1, self.spec.num_heads, self.spec.head_dim)
            q, k, v = (
                part.view(shape).transpose(1, 2)
                for part in (
                    queries[low - start : high - start],
                    line.keys[begin : begin + count * size],
                    line.values[begin : begin + count * size],
                )
            )
            near = _near(size, reach)
            if near is not None:
                near = near[low - begin : low - begin + q.shape[2]]
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
            mixed[low - start : high - start] = seen.transpose(1, 2).reshape(high - low, -1)
        return mixed

    def _fed(self, layer: EncoderLayer, x: Tensor) -> Tensor:
        inner = ACTIVATIONS[self.spec.activation](layer.inner.product(x))
        if layer.up is not None:
            inner = inner * layer.up.product(x)
        return layer.outer.product(inner)


def _near(size: int, reach: int) -> Tensor | None:
    """Which tokens see each other: those at most `reach` apart; None: all."""
    if reach == 0 or size <= reach + 1:
        return None
    places = torch.arange(size)
    return (places[:, None] - places).abs() <= reach


def _parts(bounds: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Units `start` to `stop` in parts: where it begins and ends, where its sequence begins and how long that is.
    Sequences of one length that lie side by side, all of them whole, are one part."""
    at = bisect_right(bounds, start) - 1
    while start < stop:
        begin, end = bounds[at], bounds[at + 1]
        size = end - begin
        while start == begin and end + size <= stop and bounds[at + 2] - end == size:
            at, end = at + 1, end + size
        yield start, min(end, stop), begin, size
        start, at = min(end, stop), at + 1


class _Reader:
    """Tensors of a source by name."""

    def __init__(self, source: TensorSource, prefix: str = "") -> None:
        self._source, self._names, self._prefix = source, source.names(), prefix

    def __call__(self, name: str) -> Tensor:
        values = self._source.tensor(self._prefix + name).to_float32()
        check_finite(values, name)
        return torch.from_numpy(values.copy())

    def has(self, name: str) -> bool:
        return f"{self._prefix}{name}.weight" in self._names

    def affine(self, *names: str) -> Affine:
        """One, or several that read the same input."""
        biases = [self(f"{name}.bias") for name in names if f"{self._prefix}{name}.bias" in self._names]
        return Affine(
            torch.cat([self(f"{name}.weight") for name in names]), torch.cat(biases) if biases else None
        )
