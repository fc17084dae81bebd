"""The KV cache as tensors: per layer one pool of keys and one of values, cut into blocks.

A pool is [kv heads, blocks, block size, head_dim]: the blocks of a row are gathered by number, and each head's part
then lies in one piece for the matrix product. Swapped-out blocks have separate pools in host memory.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import KVConfig
from paceline.models.spec import FurtherLayer, ModelSpec
from paceline.runner.device_rows import copies_at_once

Index = NDArray[np.int64]


class LayerPools(NamedTuple):
    """Keys and values of one layer."""

    keys: Tensor
    values: Tensor


class KVTensors:
    """All pools of one model. Layers of a group share block numbers, not memory."""

    def __init__(self, spec: ModelSpec, config: KVConfig, further: Sequence[FurtherLayer] = ()) -> None:
        """`further`: layers of a model that guesses, behind those of the model."""
        self.block_size = config.block_size
        self.windows = spec.group_windows
        self.layer_groups = (*spec.layer_groups, *(layer.group(self.windows) for layer in further))
        shapes = [(spec.num_kv_heads, spec.head_dim)] * spec.num_layers
        shapes += [(layer.num_kv_heads, layer.head_dim) for layer in further]
        counts = [group.num_blocks or config.num_blocks for group in config.groups]
        assert len(counts) == len(self.windows), "the config has one layer group per window of the model"

        def pool(num_blocks: int, shape: tuple[int, int]) -> Tensor:
            return _zeros((shape[0], num_blocks, config.block_size, shape[1]))

        def pools(counts: list[int]) -> list[LayerPools]:
            return [
                LayerPools(pool(counts[group], shape), pool(counts[group], shape))
                for group, shape in zip(self.layer_groups, shapes, strict=True)
            ]

        self.layers = pools(counts)
        self._host = pools([config.num_host_blocks] * len(counts)) if config.num_host_blocks else []

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store what a step computed: keys and values [tokens, kv heads, head_dim] at flat slots."""
        for pool, new in zip(self.layers[layer], (keys, values), strict=True):
            pool.flatten(1, 2).index_copy_(1, slots, new.transpose(0, 1))

    def clear(self, group: int, slots: Index) -> None:
        """Wipe slots: numbers that are not finite must not lie where a later owner's zero weight meets them."""
        at = torch.from_numpy(slots)
        for pool in self._of_group(self.layers, group):
            pool.flatten(1, 2).index_fill_(1, at, 0.0)

    def wipe(self) -> None:
        """Wipe every block on the device. Host places keep what was swapped out."""
        for pools in self.layers:
            for pool in pools:
                pool.zero_()

    def copy_blocks(self, group: int, source: Index, target: Index) -> None:
        """Copies of a plan, as if done one after the other: a copy may itself be copied in the same plan."""
        origins, targets = copies_at_once(source, target)
        self._move(group, self.layers, origins, self.layers, targets)

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

    def _pieces(
        self, place: int, block: NDArray[np.uint8]
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Keys and values of a layer in a host place, and where they stand in a block of bytes."""
        words, start = block.view(np.float32), 0
        for pools in self._host:
            for pool in pools:
                part = pool.numpy()[:, place]
                yield part, words[start : start + part.size].reshape(part.shape)
                start += part.size

    def _move(
        self, group: int, origin: list[LayerPools], source: Index, goal: list[LayerPools], target: Index
    ) -> None:
        read, write = torch.from_numpy(source), torch.from_numpy(target)
        for old, new in zip(self._of_group(origin, group), self._of_group(goal, group), strict=True):
            new[:, write] = old[:, read]

    def _of_group(self, layers: list[LayerPools], group: int) -> list[Tensor]:
        """Keys and values of every layer of a group."""
        return [
            pool
            for pools, mine in zip(layers, self.layer_groups, strict=True)
            if mine == group
            for pool in pools
        ]


def _zeros(shape: tuple[int, ...]) -> Tensor:
    """Zeros whose pages the system hands out when they are first written: a cache that is not used costs nothing.

    Pages of 4 KiB, not 2 MiB: each head of each layer begins at a separate place, and with large pages the first
    few blocks would take hundreds of megabytes.
    """
    memory = mmap.mmap(-1, max(math.prod(shape) * 4, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.float32, math.prod(shape)).reshape(shape))
