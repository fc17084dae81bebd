"""The encoder of pictures on the device: `models.encoder` with products of the model's type, in any parts of its line.

What is summed up along the layers is float32. Products are cuBLAS's, the rest are our kernels. Attention of a part
looks at the keys of the whole picture, or of the whole window, which the stage before it has left.

Launching a layer takes longer than computing it where pictures are small. Lines up to some thousand units therefore lie
in buffers of their own, and a layer of them is one graph; on a GPU a part of a line is a number of whole layers.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from paceline.config.engine import EngineConfig, ModelConfig
from paceline.config.sized import with_encoder
from paceline.config.speculative import DraftConfig
from paceline.core.stretch import MediaInput
from paceline.errors import ConfigError
from paceline.models.files.encoder import CONNECTOR, INNER, NORM, PATCHES, TAP, VISION, layer_norms
from paceline.models.files.stored import TensorSource
from paceline.models.layers import DenseLinear
from paceline.models.patches import merged_units, patch_bytes, table_places, unit_cells, window_sizes
from paceline.models.rope import inverse_frequencies
from paceline.models.spec import EncoderSpec, ModelSpec, PatchSpec
from paceline.runner.gpu.build import DeviceStorage
from paceline.runner.gpu.device_encoder import DeviceNorm, DeviceTensors
from paceline.runner.gpu.device_queue import DeviceQueue
from paceline.runner.gpu.kernels.inner_activation import inner_activation
from paceline.runner.gpu.kernels.layer_norm import layer_norm
from paceline.runner.gpu.kernels.ragged_attention import (
    TILE_WIDTH,
    ragged_attention,
    ragged_tiles,
    ragged_tuning,
)
from paceline.runner.gpu.kernels.residual_norm import residual_norm
from paceline.runner.gpu.kernels.rotate_heads import rotate_heads
from paceline.runner.pictures import TIMES, usual_picture
from paceline.runner.sizing import encoder_work

Index = NDArray[np.int64]
WHOLE_TILES = 64  # inner entries
SIZES = (256, 512, 768, 1024, 1536, 2048, 3072, 4096)  # units of lines that are replayed
TILE_SHARE = 4  # units of a tile there is room for, at least
TOKENS = 1024  # of the step that tells what a token of a prompt takes


@dataclass(frozen=True, slots=True)
class PictureLayer:
    """One layer, with norms before its parts."""

    queries: DenseLinear
    keys_values: DenseLinear
    mixed: DenseLinear
    inner: DenseLinear  # and the factor of its gate behind it, where it has one
    outer: DenseLinear
    norms: tuple[DeviceNorm, DeviceNorm]  # of attention and of the feed-forward part
    is_local: bool  # a patch sees its window only
    rope: int


@dataclass(frozen=True, slots=True)
class PictureEnd:
    """Makes vectors of squares of patches."""

    norm: DeviceNorm | None  # of a square
    inner: DenseLinear | None
    outer: DenseLinear


@dataclass(slots=True, eq=False)
class PictureLine:
    """Pictures that are being computed."""

    x: Tensor  # float32 [units, hidden]: hidden states
    queries: Tensor  # [units, heads, head_dim] of the layer under way
    keys_values: Tensor  # [units, 2 * heads, head_dim]
    mixed: Tensor  # as queries
    places: Tensor  # of each unit in the tables of turns
    turns: list[Tensor]  # of each rope: cosines and sines of each unit's pairs
    bounds: Index  # where pictures begin, and the end of the last
    windows: Index  # the same of windows; empty: there are none
    squares: Tensor  # the units of each vector
    deep: list[Tensor] = field(default_factory=list)  # vectors of layers behind which squares become some
    tiles: dict[tuple[bool, int, int], Tensor] = field(default_factory=dict)
    size: int = 0  # units of its buffers, where these are those that graphs read

    @property
    def units(self) -> int:
        return int(self.bounds[-1])


class DevicePictureEncoder:
    """Computes lines (`pictures.PictureEncoder`), in the queue that has been entered."""

    def __init__(
        self, source: TensorSource, *, queue: DeviceQueue, dtype: torch.dtype, graphs: bool = False
    ) -> None:
        spec = source.spec.vision
        assert spec is not None and spec.encoder is not None and spec.encoder.patches is not None
        self.spec: ModelSpec = spec
        self._options: EncoderSpec = spec.encoder
        self.patches: PatchSpec = spec.encoder.patches
        self.dtype, self._queue = dtype, queue
        # Numbers that a token of the decoder turns by; 0: its position.
        self.axes = 3 if source.spec.has_turns else 0
        self._tuning = ragged_tuning(spec.head_dim)
        read = DeviceTensors(source, DeviceStorage(queue.device, dtype, "none"), queue.device, VISION)
        patches = read.values(f"{PATCHES}.weight")
        if self.patches.frames:  # equal ones, of which one is given
            patches = patches.sum(2)
        bias = read.values(f"{PATCHES}.bias").to(queue.device, dtype) if self.patches.has_bias else None
        self._read = DenseLinear(patches.flatten(1).to(queue.device, dtype), bias)
        shape = (1, 3, 1)
        self._mean = torch.tensor(self.patches.mean, device=queue.device).view(shape)
        self._deviation = torch.tensor(self.patches.deviation, device=queue.device).view(shape)
        self._table = read.table("position").float() if self._options.num_positions else None
        self._layers = [self._read_layer(read, layer) for layer in range(spec.num_layers)]
        self._last = read.norm("final_norm") if self._options.norm_first else None
        self._end = self._read_end(read, CONNECTOR)
        self._taps = {
            layer: self._read_end(read, f"{TAP}.{number}") for number, layer in enumerate(self.patches.taps)
        }
        self._speeds = [inverse_frequencies(rope).to(queue.device) for rope in spec.ropes]
        self._axes = [torch.tensor(rope.axes, device=queue.device) for rope in spec.ropes]
        self._kept: dict[int, PictureLine] = {}  # by size, lines that graphs read; they have the same buffers
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by size and layer
        if graphs:
            self._keep()

    def _read_layer(self, read: DeviceTensors, layer: int) -> PictureLayer:
        prefix, options = f"encoder.layer.{layer}.", self._options
        first, second = (read.norm(name) for name in layer_norms(self.spec, layer))
        parts = ("intermediate.dense", *(("intermediate.up",) if options.is_gated else ()))
        inner = [_padded(read.linear(prefix + part), 0) for part in parts]
        biases = [linear.bias for linear in inner if linear.bias is not None]
        return PictureLayer(
            queries=read.linear(prefix + "attention.self.query"),
            keys_values=read.linear(*(f"{prefix}attention.self.{part}" for part in ("key", "value"))),
            mixed=read.linear(prefix + "attention.output.dense"),
            inner=DenseLinear(
                torch.cat([linear.weight for linear in inner]), torch.cat(biases) if biases else None
            ),
            outer=_padded(read.linear(prefix + "output.dense"), 1),
            norms=(first, second),
            is_local=bool(options.local) and options.local[layer],
            rope=self.spec.layer_ropes[layer] if self.spec.ropes else 0,
        )

    def _read_end(self, read: DeviceTensors, name: str) -> PictureEnd:
        norm, inner = f"{name}.{NORM}", f"{name}.{INNER}"
        return PictureEnd(
            read.norm(norm) if read.has(f"{norm}.weight") else None,
            read.linear(inner) if read.has(f"{inner}.weight") else None,
            read.linear(name),
        )

    # -- a line ----------------------------------------------------------------------------------------------

    def begin(self, items: Sequence[MediaInput]) -> PictureLine:
        """The line of a group of pictures, of which nothing is computed yet."""
        patches, heads, dim = self.patches, self.spec.num_heads, self.spec.head_dim
        own = self._sent(np.concatenate([patch_bytes(patches, item) for item in items]))
        values = (own.float() * patches.scale - self._mean) / self._deviation
        x = self._times(values.flatten(1).to(self.dtype), self._read).float()
        if self._table is not None:
            x += torch.cat([self._placed(self._table, item) for item in items])
        cells = self._sent(np.concatenate([unit_cells(patches, item) for item in items], axis=1))
        units = len(x)
        bounds = np.concatenate([[0], np.cumsum([item.units for item in items])])
        squares = [begin + merged_units(patches, item) for begin, item in zip(bounds, items, strict=False)]
        windows: Index = np.zeros(0, np.int64)
        if patches.window:
            sizes = np.concatenate([window_sizes(patches, item) for item in items])
            windows = np.concatenate([[0], np.cumsum(sizes)])
        turns = [
            self._turned(cells, axes, speeds) for axes, speeds in zip(self._axes, self._speeds, strict=True)
        ]
        kept = self._kept_line(x, turns, bounds, windows)
        if kept is not None:
            kept.squares = self._sent(np.concatenate(squares))
            return kept
        return PictureLine(
            x=x,
            queries=x.new_empty(units, heads, dim, dtype=self.dtype),
            keys_values=x.new_empty(units, 2 * heads, dim, dtype=self.dtype),
            mixed=x.new_empty(units, heads, dim, dtype=self.dtype),
            places=torch.arange(units, dtype=torch.int32, device=x.device),
            turns=turns,
            bounds=bounds,
            windows=windows,
            squares=self._sent(np.concatenate(squares)),
        )

    def _turned(self, cells: Tensor, axes: Tensor, speeds: Tensor) -> Tensor:
        angles = cells[axes].T.float() * speeds
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def _placed(self, table: Tensor, item: MediaInput) -> Tensor:
        """What the table of positions adds to the patches of a picture."""
        found, share = table_places(self.patches, item)
        rows = table[self._sent(found)]
        return rows[:, 0] if share is None else (rows * self._sent(share)[:, :, None]).sum(1)

    def advance(self, line: PictureLine, first: int, count: int) -> None:
        """Compute `count` positions from `first` on, which is where the part before ended."""
        units, end = line.units, first + count
        while first < end:
            number, start = divmod(first, 2 * units)
            graph = self._graphs.get((line.size, number))
            if graph is not None and not start and first + 2 * units <= end:
                graph.replay()
                self._tap(line, number)
                first += 2 * units
                continue
            stage, start = divmod(first, units)
            stop = min(units, start + end - first)
            layer = self._layers[stage // 2]
            if stage % 2:
                self._attend(line, layer, start, stop)
                if stop == units:
                    self._tap(line, stage // 2)
            else:
                self._remember(line, layer, start, stop)
            first += stop - start

    def _tap(self, line: PictureLine, layer: int) -> None:
        """A layer is through."""
        if layer in self._taps:
            line.deep.append(self._vectors(line.x, line, self._taps[layer]))

    def vectors(self, line: PictureLine, items: Sequence[MediaInput]) -> list[Tensor]:
        """Those of each picture of a line that is computed, [outputs, values]."""
        states = line.x
        if self._last is not None:
            states = self._normed(line.x, self._last)
        found = torch.cat([self._vectors(states, line, self._end), *line.deep], dim=1)
        return list(torch.split(found, [item.outputs for item in items]))

    def _vectors(self, states: Tensor, line: PictureLine, end: PictureEnd) -> Tensor:
        squares = states[line.squares].flatten(1)
        if end.norm is not None:
            weight, bias = end.norm.weight, end.norm.bias
            squares = F.layer_norm(squares.float(), weight.shape, weight, bias, self.spec.norm_eps)
        squares = squares.to(self.dtype)
        if end.inner is not None:
            squares = F.gelu(self._times(squares, end.inner))
        return self._times(squares, end.outer)

    # -- lines that graphs read --------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Make the buffers, and capture every layer in each of the sizes."""
        heads, dim, device = self.spec.num_heads, self.spec.head_dim, self._queue.device
        most, nothing = SIZES[-1], np.zeros(1, np.int64)
        options: dict[str, Any] = {"dtype": self.dtype, "device": device}
        x = torch.zeros(most, self.spec.hidden_size, device=device)
        queries, mixed = torch.zeros(2, most, heads, dim, **options)
        keys_values = torch.zeros(most, 2 * heads, dim, **options)
        places = torch.arange(most, dtype=torch.int32, device=device)
        turns = [torch.zeros(most, 2 * len(axes), device=device) for axes in self._axes]
        tiles = torch.zeros(2, most // TILE_SHARE, TILE_WIDTH, dtype=torch.int32, device=device)
        for size in SIZES:
            room = {(bool(kind), 0, size): tiles[kind, : size // TILE_SHARE] for kind in (0, 1)}
            self._kept[size] = PictureLine(
                x=x[:size],
                queries=queries[:size],
                keys_values=keys_values[:size],
                mixed=mixed[:size],
                places=places[:size],
                turns=[each[:size] for each in turns],
                bounds=nothing,
                windows=nothing,
                squares=places[:0],
                tiles=room,
                size=size,
            )
        with self._queue.entered():
            for size, line in self._kept.items():
                for layer in (self._layers[0], self._layers[-1]):  # what a capture may not load
                    self._whole_layer(line, layer, size)
        self._queue.drain()
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        gc.disable()  # what is freed during a capture breaks it
        for size, line in self._kept.items():
            for number, layer in enumerate(self._layers):
                graph = torch.cuda.CUDAGraph()
                with (
                    torch.inference_mode(),
                    torch.cuda.graph(graph, pool=pool, stream=self._queue.stream),
                ):
                    self._whole_layer(line, layer, size)
                self._graphs[size, number] = graph
        gc.enable()

    def _whole_layer(self, line: PictureLine, layer: PictureLayer, size: int) -> None:
        self._remember(line, layer, 0, size)
        self._attend(line, layer, 0, size)

    def _kept_line(self, x: Tensor, turns: list[Tensor], bounds: Index, windows: Index) -> PictureLine | None:
        """The next larger line that graphs read, with these units in it; None: there is none that holds them."""
        units = len(x)
        kept = next((line for size, line in self._kept.items() if size >= units), None)
        if kept is None:
            return None
        for is_local, own in ((False, bounds), (True, windows)):
            found = ragged_tiles(own[:-1], np.diff(own), self._tuning.query_rows)
            room = kept.tiles[is_local, 0, kept.size]
            if len(found) > len(room):
                return None
            room.zero_()
            room[: len(found)].copy_(self._sent(found))
        kept.x[:units].copy_(x)
        for into, given in zip(kept.turns, turns, strict=True):
            into[:units].copy_(given)
        return replace(kept, bounds=bounds, windows=windows, deep=[])

    # -- a layer ---------------------------------------------------------------------------------------------

    def _remember(self, line: PictureLine, layer: PictureLayer, start: int, stop: int) -> None:
        """Keys and values of some units."""
        part = line.keys_values[start:stop]
        self._times(self._normed(line.x[start:stop], layer.norms[0]), layer.keys_values, part.flatten(1))
        self._rotate(line, layer, part[:, : self.spec.num_heads], start, stop)

    def _attend(self, line: PictureLine, layer: PictureLayer, start: int, stop: int) -> None:
        """Attention of some units, and what follows it."""
        x, queries = line.x[start:stop], line.queries[start:stop]
        self._times(self._normed(x, layer.norms[0]), layer.queries, queries.flatten(1))
        self._rotate(line, layer, queries, start, stop)
        keys, values = torch.split(line.keys_values, self.spec.num_heads, dim=1)
        tiles = self._tiles(line, layer.is_local, start, stop)
        scale = self.spec.softmax_scale
        ragged_attention(line.mixed, line.queries, keys, values, tiles, scale=scale, tuning=self._tuning)
        update = self._times(line.mixed[start:stop].flatten(1), layer.mixed)
        normed = self._normed(x, layer.norms[1], update)
        inner = self._times(normed, layer.inner)
        narrow = inner.new_empty(len(inner), layer.outer.weight.shape[1])
        inner_activation(narrow, inner, activation=self.spec.activation)
        x += self._times(narrow, layer.outer)

    def _normed(self, x: Tensor, norm: DeviceNorm, update: Tensor | None = None) -> Tensor:
        """The norm of `x`, to which `update` is added."""
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        if self._options.is_rms:
            residual_norm(out, x, update, norm.weight, epsilon=self.spec.norm_eps)
        else:
            eps, keeps_sum = self.spec.norm_eps, update is not None
            layer_norm(out, x, update, norm.weight, norm.bias, epsilon=eps, keeps_sum=keeps_sum)
        return out

    def _rotate(self, line: PictureLine, layer: PictureLayer, heads: Tensor, start: int, stop: int) -> None:
        if line.turns:
            rotate_heads(heads, line.turns[layer.rope], line.places[start:stop])

    def _tiles(self, line: PictureLine, is_local: bool, start: int, stop: int) -> Tensor:
        """Of the queries of some units."""
        known = line.tiles.get((is_local, start, stop))
        if known is not None:
            return known
        bounds = line.windows if is_local else line.bounds
        begins, ends = bounds[:-1], bounds[1:]
        here = (begins < stop) & (ends > start)
        begins, ends = begins[here], ends[here]
        low, high = np.maximum(begins, start), np.minimum(ends, stop)
        tiles = ragged_tiles(low, high - low, self._tuning.query_rows, keys=(begins, ends))
        if start or stop < line.units:  # parts differ from layer to layer
            line.tiles = {key: made for key, made in line.tiles.items() if not key[1]}
        line.tiles[is_local, start, stop] = self._sent(tiles)
        return line.tiles[is_local, start, stop]

    def _times(self, x: Tensor, linear: DenseLinear, into: Tensor | None = None) -> Tensor:
        if linear.bias is not None:
            return torch.addmm(linear.bias, x, linear.weight.T, out=into)
        return torch.mm(x, linear.weight.T, out=into)

    def _sent(self, values: np.ndarray) -> Tensor:
        """Behind what is queued, without waiting."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self._queue.is_gpu:
            host = host.pin_memory()
        return host.to(self._queue.device, non_blocking=True)

    # -- what it takes ---------------------------------------------------------------------------------------

    def position_seconds(self) -> tuple[float, float]:
        """As `pictures.position_seconds`, of whole layers: what keys and values take of one follows from its
        products."""
        queue, item, layers = self._queue, usual_picture(self.patches), self.spec.num_layers
        with queue.entered():
            line = self.begin([item])
        total = 2 * layers * item.units
        line_s = min(queue.seconds(lambda: self.advance(line, 0, total)) for _ in range(TIMES))
        width, inner = self.spec.hidden_size, self.spec.intermediate_size
        keys = 2 * width / (4 * width + (3 if self._options.is_gated else 2) * inner)
        unit_s = line_s / layers / item.units
        return keys * unit_s, (1 - keys) * unit_s


def _padded(linear: DenseLinear, axis: int) -> DenseLinear:
    """With zeros up to a size that products are fast at; they add nothing to what follows."""
    more = -linear.weight.shape[axis] % WHOLE_TILES
    if not more:
        return linear
    weight = F.pad(linear.weight, (0, more) if axis else (0, 0, 0, more))
    bias = linear.bias
    return DenseLinear(weight, bias if axis or bias is None else F.pad(bias, (0, more)))


class Timed(Protocol):
    """What is measured of a runner."""

    def mixed_seconds(self, num_tokens: int, num_decode: int) -> float: ...


def load_eyes(
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    drafts: DraftConfig | None,
    *,
    graphs: bool,
) -> DevicePictureEncoder | None:
    """What encodes a model's pictures, on the device; None: it sees none."""
    if source.spec.vision is None or source.spec.vision.encoder is None:
        return None
    if drafts is not None:
        raise ConfigError(
            "--speculative-config: a model that sees pictures makes no drafts on a GPU; leave it out, or add "
            "--device cpu"
        )
    return DevicePictureEncoder(source, queue=DeviceQueue(device), dtype=dtype, graphs=graphs)


def with_eyes(
    config: EngineConfig, model: ModelConfig, eyes: DevicePictureEncoder | None, runner: Timed | None = None
) -> EngineConfig:
    """With the work of an encoder of pictures, if there is one. Without a runner its prices are not right yet."""
    if eyes is None:
        return config
    token_s = 1.0
    if runner is not None:
        count = min(TOKENS, config.scheduler.max_num_batched_tokens, config.scheduler.max_model_len)
        token_s = runner.mixed_seconds(count, 0) / count
    work = encoder_work(eyes.spec, eyes.position_seconds(), token_s, model.encoder_cache_tokens, config)
    return with_encoder(config, work if work.least == "line" else replace(work, least="layer"))
