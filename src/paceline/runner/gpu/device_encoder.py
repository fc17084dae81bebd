"""An encoder on the device: all texts of a step as one flat batch without padding, into fixed buffers.

Products are cuBLAS's, the rest are our kernels. Nothing is allocated and nothing is read back, so that small steps can
be captured in graphs: what a step computes lies in one buffer of words, in places that follow from its size alone.
Where norms stand before the parts of a layer, what is summed up along the layers is float32; behind them every norm
begins anew, and what the products read is the state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.files.encoder import layer_norms
from paceline.models.files.stored import TensorSource
from paceline.models.layers import DenseLinear
from paceline.runner.gpu.build import DeviceStorage
from paceline.runner.gpu.forward import rotation_tables
from paceline.runner.gpu.kernels.inner_activation import inner_activation
from paceline.runner.gpu.kernels.layer_norm import layer_norm
from paceline.runner.gpu.kernels.ragged_attention import (
    TILE_WIDTH,
    ragged_attention,
    ragged_tiles,
    ragged_tuning,
)
from paceline.runner.gpu.kernels.rotate_heads import rotate_heads

I32 = NDArray[np.int32]
Index = NDArray[np.int64]
SHORTEST_MEAN = 8  # tokens of the texts that a step which is replayed has room for, on average


@dataclass(frozen=True, slots=True)
class DeviceNorm:
    """Of a layer, or behind the embedding or the last layer."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceEncoderLayer:
    """One layer."""

    qkv: DenseLinear
    mixed: DenseLinear
    inner: DenseLinear  # and the factor of its gate behind it, where it has one
    outer: DenseLinear
    # Of attention and of the feed-forward part, before or behind them.
    norms: tuple[DeviceNorm | None, DeviceNorm]
    reach: int
    rope: int


class DeviceEncoder:
    """Hidden states of a step's tokens."""

    def __init__(
        self,
        source: TensorSource,
        *,
        max_tokens: int,
        max_texts: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        spec, options = source.spec, source.spec.encoder
        assert options is not None
        self.spec, self.dtype, self._options = spec, dtype, options
        self.max_tokens, self.max_texts = max_tokens, max_texts
        self._tuning = ragged_tuning(spec.head_dim)
        read = DeviceTensors(source, DeviceStorage(device, dtype), device)
        self._words = read.table("word")
        self._places: Tensor | None = None
        if not spec.ropes:
            # Each place twice: with the first type, then with the second, so that a token has one row.
            places = read.table("position")[options.position_offset :]
            types = read.table("token_type")
            self._places = torch.cat([places + types[0], places + types[min(1, len(types) - 1)]]).contiguous()
        self._num_places = 0 if self._places is None else len(self._places) // 2
        self._turns = rotation_tables(spec, spec.max_positions, device)
        self._norm = read.norm("embeddings.LayerNorm")
        self._layers = [self._read_layer(read, layer) for layer in range(spec.num_layers)]
        self._last = read.norm("final_norm") if options.norm_first else None
        width, inner, heads = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim

        def room(columns: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(max_tokens, columns, dtype=kind, device=device)

        self._normed, self._update = room(width), room(width)
        self._sum = room(width, torch.float32) if options.norm_first else self._normed
        self._product, self._mixed = room(3 * heads), room(heads)
        self._wide = room(2 * inner if options.is_gated else inner)
        self._narrow = room(inner) if options.is_gated else self._wide
        words = 2 * max_tokens + TILE_WIDTH * self.most_tiles(max_tokens, whole=True)
        self._words_of_step = torch.zeros(words, dtype=torch.int32, device=device)

    def _read_layer(self, read: DeviceTensors, layer: int) -> DeviceEncoderLayer:
        prefix, options = f"encoder.layer.{layer}.", self._options
        norms = [read.norm(name) for name in layer_norms(self.spec, layer)]
        inner = (prefix + "intermediate.dense", prefix + "intermediate.up")
        return DeviceEncoderLayer(
            qkv=read.linear(*(f"{prefix}attention.self.{part}" for part in ("query", "key", "value"))),
            mixed=read.linear(prefix + "attention.output.dense"),
            inner=read.linear(*(inner if options.is_gated else inner[:1])),
            outer=read.linear(prefix + "output.dense"),
            norms=(norms[0] if len(norms) == 2 else None, norms[-1]),
            reach=options.reaches[layer] if options.reaches else 0,
            rope=self.spec.layer_ropes[layer] if self.spec.ropes else 0,
        )

    # -- what a step computes ------------------------------------------------------------------------------------

    def most_tiles(self, num_tokens: int, *, whole: bool = False) -> int:
        """Tiles that a step of these tokens has room for: where it is replayed, of texts that are not all tiny.
        `whole`: of any texts."""
        texts = self.max_texts if whole else num_tokens // SHORTEST_MEAN
        return num_tokens // self._tuning.query_rows + min(texts, self.max_texts)

    def tiles(self, starts: Index, counts: Index) -> I32:
        return ragged_tiles(starts, counts, self._tuning.query_rows)

    def words(
        self, texts: Sequence[Index], seconds: Sequence[int], tiles: I32, num_tokens: int, num_tiles: int
    ) -> I32:
        """What a step of `num_tokens` reads: ids, places and tiles. `seconds`: where the second text of each begins, 0
        where it is one."""
        words = np.zeros(2 * num_tokens + TILE_WIDTH * num_tiles, np.int32)
        words[2 * num_tokens : 2 * num_tokens + tiles.size] = tiles.reshape(-1)
        at = 0
        for text, second in zip(texts, seconds, strict=True):
            end = at + len(text)
            words[at:end] = text
            places = words[num_tokens + at : num_tokens + end]
            places[:] = np.arange(len(text))
            if second and self._places is not None:
                places[second:] += self._num_places
            at = end
        return words

    def put(self, words: Tensor) -> None:
        self._words_of_step[: len(words)].copy_(words)

    # -- computing -----------------------------------------------------------------------------------------------

    def warm_up(self, sizes: Iterable[int]) -> None:
        """Launch the products of one layer as steps of these many tokens do: cuBLAS has a kernel for every few sizes,
        and loading one waits for the device."""
        layer = self._layers[0]
        for size in sizes:
            x = self._normed[:size]
            self._times(x, layer.qkv, self._product)
            self._times(self._mixed[:size], layer.mixed, self._update)
            self._fed(x, layer)

    @property
    def hidden(self) -> Tensor:
        """Where `forward` leaves states."""
        return self._normed

    def forward(self, num_tokens: int, num_tiles: int) -> Tensor:
        """States [tokens, width] of what has been put."""
        given, eps = self._words_of_step, self.spec.norm_eps
        ids, places = given[:num_tokens], given[num_tokens : 2 * num_tokens]
        tiles = given[2 * num_tokens : 2 * num_tokens + TILE_WIDTH * num_tiles].view(-1, TILE_WIDTH)
        x, total, update = (part[:num_tokens] for part in (self._normed, self._sum, self._update))
        torch.index_select(self._words, 0, ids, out=update)
        placed: Tensor | None = None
        if self._places is not None:
            placed = self._product.view(-1)[: num_tokens * self.spec.hidden_size].view_as(x)
            torch.index_select(self._places, 0, places, out=placed)
        self._normalize(x, update, placed, self._norm)
        if self._options.norm_first:
            total.copy_(x)
            self._norms_first(x, total, places, tiles)
            assert self._last is not None
            layer_norm(x, total, update, self._last.weight, self._last.bias, epsilon=eps)
            return x
        for layer in self._layers:
            assert layer.norms[0] is not None
            self._normalize(x, x, self._attended(x, layer, places, tiles), layer.norms[0])
            self._normalize(x, x, self._fed(x, layer), layer.norms[1])
        return x

    def _norms_first(self, x: Tensor, total: Tensor, places: Tensor, tiles: Tensor) -> None:
        """All layers; what the last adds is left in the update."""
        update: Tensor | None = None
        for layer in self._layers:
            if layer.norms[0] is not None:
                self._normalize(x, total, update, layer.norms[0], keeps_sum=update is not None)
            update = self._attended(x, layer, places, tiles)
            self._normalize(x, total, update, layer.norms[1], keeps_sum=True)
            update = self._fed(x, layer)

    def _normalize(
        self, out: Tensor, x: Tensor, update: Tensor | None, norm: DeviceNorm, *, keeps_sum: bool = False
    ) -> None:
        layer_norm(out, x, update, norm.weight, norm.bias, epsilon=self.spec.norm_eps, keeps_sum=keeps_sum)

    def _attended(self, x: Tensor, layer: DeviceEncoderLayer, places: Tensor, tiles: Tensor) -> Tensor:
        heads, head_dim = self.spec.num_heads, self.spec.head_dim
        product = self._times(x, layer.qkv, self._product).view(len(x), 3 * heads, head_dim)
        if self._turns:
            rotate_heads(product[:, : 2 * heads], self._turns[layer.rope], places)
        query, key, value = product.view(len(x), 3, heads, head_dim).unbind(1)
        mixed = self._mixed[: len(x)]
        ragged_attention(
            mixed.view(len(x), heads, head_dim),
            query,
            key,
            value,
            tiles,
            scale=self.spec.softmax_scale,
            reach=layer.reach,
            tuning=self._tuning,
        )
        return self._times(mixed, layer.mixed, self._update)

    def _fed(self, x: Tensor, layer: DeviceEncoderLayer) -> Tensor:
        wide, narrow = self._times(x, layer.inner, self._wide), self._narrow[: len(x)]
        inner_activation(narrow, wide, activation=self.spec.activation)
        return self._times(narrow, layer.outer, self._update)

    def _times(self, x: Tensor, linear: DenseLinear, into: Tensor) -> Tensor:
        out = into[: len(x)]
        if linear.bias is not None:
            return torch.addmm(linear.bias, x, linear.weight.T, out=out)
        return torch.mm(x, linear.weight.T, out=out)


class DeviceTensors:
    """Tensors of a source by name, on the device. `prefix`: of their names in `source`."""

    def __init__(
        self, source: TensorSource, storage: DeviceStorage, device: torch.device, prefix: str = ""
    ) -> None:
        self._source, self._storage, self._device = source, storage, device
        self._names, self._prefix = source.names(), prefix

    def has(self, name: str) -> bool:
        return self._prefix + name in self._names

    def table(self, name: str) -> Tensor:
        stored = self._source.tensor(f"{self._prefix}embeddings.{name}_embeddings.weight")
        return cast(DenseLinear, self._storage.embedding(stored)).weight

    def linear(self, *names: str) -> DenseLinear:
        """Products that read the same input, as one."""
        weights = [self._source.tensor(f"{self._prefix}{name}.weight") for name in names]
        found = [f"{name}.bias" for name in names if self.has(f"{name}.bias")]
        bias = torch.cat([self.values(name) for name in found]) if found else None
        return cast(DenseLinear, self._storage.linear(weights, bias))

    def norm(self, name: str) -> DeviceNorm:
        """In float32: it is small."""
        bias = self.values(f"{name}.bias").to(self._device) if self.has(f"{name}.bias") else None
        return DeviceNorm(self.values(f"{name}.weight").to(self._device), bias)

    def values(self, name: str) -> Tensor:
        """In float32, on the host."""
        return torch.from_numpy(np.array(self._source.tensor(self._prefix + name).to_float32()))
