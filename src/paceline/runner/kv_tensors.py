"""The KV cache as tensors: per layer one pool of keys and one of values, cut into blocks.

A pool is [kv heads, blocks, block size, head_dim]: the blocks of a row are gathered by number, and each head's part
then lies in one piece for the matrix product. Swapped-out blocks have separate pools in host memory. As int8 each head
of a token is rounded when it is written, and has a scale.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import KVConfig
from paceline.models.rope import rotate, shift_turn
from paceline.models.spec import FurtherLayer, ModelSpec
from paceline.runner.device_rows import copies_at_once

Index = NDArray[np.int64]


class LayerPools(NamedTuple):
    """Keys and values of one layer."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None  # [kv heads, blocks, block size, 1], of int8
    value_scales: Tensor | None = None

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of blocks, as float32."""
        found = []
        for pool, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            part = pool.index_select(1, blocks)
            found.append(part if scales is None else part.float().mul_(scales.index_select(1, blocks)))
        return found[0], found[1]

    @property
    def memory(self) -> list[Tensor]:
        return [pool for pool in self if pool is not None]


class KVTensors:
    """All pools of one model. Layers of a group share block numbers, not memory."""

    def __init__(
        self,
        spec: ModelSpec,
        config: KVConfig,
        further: Sequence[FurtherLayer] = (),
        dtype: str = "float32",
    ) -> None:
        """`further`: layers of a model that guesses, behind those of the model. `dtype`: float32 or int8."""
        self._ropes = [spec.ropes[rope] for rope in spec.layer_ropes]
        self.block_size = config.block_size
        self.windows = spec.group_windows
        self.layer_groups = (*spec.layer_groups, *(layer.group(self.windows) for layer in further))
        shapes = [(spec.num_kv_heads, spec.head_dim)] * spec.num_layers
        shapes += [(layer.num_kv_heads, layer.head_dim) for layer in further]
        counts = [group.num_blocks or config.num_blocks for group in config.groups]
        assert len(counts) == len(self.windows), "the config has one layer group per window of the model"

        def pool(num_blocks: int, heads: int, dim: int, kind: str) -> Tensor:
            return _zeros((heads, num_blocks, config.block_size, dim), np.dtype(kind))

        def pools(counts: list[int]) -> list[LayerPools]:
            found = []
            for group, shape in zip(self.layer_groups, shapes, strict=True):
                parts = [pool(counts[group], *shape, dtype) for _ in range(2)]
                if dtype == "int8":
                    parts += [pool(counts[group], shape[0], 1, "float32") for _ in range(2)]
                found.append(LayerPools(*parts))
            return found

        self.layers = pools(counts)
        self._host = pools([config.num_host_blocks] * len(counts)) if config.num_host_blocks else []

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store what a step computed: keys and values [tokens, kv heads, head_dim] at flat slots."""
        pools = self.layers[layer]
        for pool, scales, heads in (
            (pools.keys, pools.key_scales, keys),
            (pools.values, pools.value_scales, values),
        ):
            new = heads.transpose(0, 1)
            if scales is not None:
                new, scale = _as_bytes(new)
                scales.flatten(1, 2).index_copy_(1, slots, scale)
            pool.flatten(1, 2).index_copy_(1, slots, new)

    def clear(self, group: int, slots: Index) -> None:
        """Wipe slots: numbers that are not finite must not lie where a later owner's zero weight meets them."""
        at = torch.from_numpy(slots)
        for pool in self._of_group(self.layers, group):
            pool.flatten(1, 2).index_fill_(1, at, 0)

    def wipe(self) -> None:
        """Wipe every block on the device. Host places keep what was swapped out."""
        for pools in self.layers:
            for pool in pools.memory:
                pool.zero_()

    def copy_blocks(self, group: int, source: Index, target: Index) -> None:
        """Copies of a plan, as if done one after the other: a copy may itself be copied in the same plan."""
        origins, targets = copies_at_once(source, target)
        self._move(group, self.layers, origins, self.layers, targets)

    def place(self, group: int, source: Index, target: Index, shift: int) -> None:
        """Copy tokens that follow each other from some slots to others, with their keys turned by `shift` positions."""
        read, write = torch.from_numpy(source), torch.from_numpy(target)
        # Layers of a model that guesses have no rotation here: it has none where tokens are placed.
        for pools, mine, rope in zip(self.layers, self.layer_groups, self._ropes, strict=True):
            if mine != group:
                continue
            assert pools.key_scales is None, "only floats are turned"
            keys, values = pools.keys.flatten(1, 2), pools.values.flatten(1, 2)
            keys[:, write] = rotate(keys[:, read], *shift_turn(rope, shift))
            values[:, write] = values[:, read]

    def swap_out(self, group: int, blocks: Index, places: Index) -> None:
        self._move(group, self.layers, blocks, self._host, places)

    def swap_in(self, group: int, blocks: Index, places: Index) -> None:
        self._move(group, self._host, places, self.layers, blocks)

    def pack(self, place: int, into: NDArray[np.uint8]) -> None:
        """A block in a host place, as bytes."""
        for part, piece in self._pieces(place, into):
            piece[:] = part

    def unpack(self, place: int, source: NDArray[np.uint8]) -> None:
        for part, piece in self._pieces(place, source):
            part[:] = piece

    def _pieces(self, place: int, block: NDArray[np.uint8]) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Keys, values and scales of a layer in a host place, and where they stand in a block of bytes."""
        start = 0
        for pools in self._host:
            for pool in pools.memory:
                part = pool.numpy()[:, place]
                end = start + part.nbytes
                yield part, block[start:end].view(part.dtype).reshape(part.shape)
                start = end

    def _move(
        self, group: int, origin: list[LayerPools], source: Index, goal: list[LayerPools], target: Index
    ) -> None:
        read, write = torch.from_numpy(source), torch.from_numpy(target)
        for old, new in zip(self._of_group(origin, group), self._of_group(goal, group), strict=True):
            new[:, write] = old[:, read]

    def _of_group(self, layers: list[LayerPools], group: int) -> list[Tensor]:
        """Keys and values of every layer of a group, and their scales."""
        return [
            pool
            for pools, mine in zip(layers, self.layer_groups, strict=True)
            if mine == group
            for pool in pools.memory
        ]


def _as_bytes(values: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded, and the scale of each last dimension: the largest is 127. What is not finite shows in the scale."""
    scale = values.abs().amax(dim=-1, keepdim=True) / 127
    steps = values / torch.where(scale > 0, scale, 1.0)
    return torch.nan_to_num(steps, posinf=127, neginf=-127).round_().to(torch.int8), scale


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Tensor:
    """Zeros whose pages the system hands out when they are first written: a cache that is not used costs nothing.

    Pages of 4 KiB, not 2 MiB: each head of each layer begins at a separate place, and with large pages the first
    few blocks would take hundreds of megabytes.
    """
    memory = mmap.mmap(
        -1, max(math.prod(shape) * dtype.itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape))
