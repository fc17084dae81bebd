"""The KV cache of the CPU step: per layer one array of sub-blocks of 16 tokens (see `layout`).

A block of the scheduler is one or more sub-blocks in one piece, so that copies and swaps move whole pieces.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import KVConfig
from paceline.models.spec import ModelSpec
from paceline.runner.device_rows import copies_at_once
from paceline.runner.native.code import Code
from paceline.runner.native.layout import PLACED_LAYER_BYTES, SUB_BLOCK, kv_head_bytes
from paceline.runner.native.model import shift_turn

Index = NDArray[np.int64]
Pool = NDArray[Any]  # float32, or bytes


class KVPool:
    """Keys and values of all layers. Layers of a group share block numbers, not memory."""

    def __init__(
        self, spec: ModelSpec, config: KVConfig, dtype: str = "float32", code: Code | None = None
    ) -> None:
        """`dtype`: float32, or int8, which is bytes with scales. `code` places tokens."""
        self._spec = spec
        self._code = code
        self.block_size = config.block_size
        self.subs = config.block_size // SUB_BLOCK
        self.windows = spec.group_windows
        self.layer_groups = spec.layer_groups
        self.in_bytes = dtype == "int8"
        of_head = kv_head_bytes(spec.head_dim, in_bytes=self.in_bytes)
        self.sub_bytes = spec.num_kv_heads * of_head
        counts = self._num_blocks = [group.num_blocks or config.num_blocks for group in config.groups]
        assert len(counts) == len(self.windows), "the config has one layer group per window of the model"
        self._dtype = np.dtype(dtype)
        self._shape = (self.subs, spec.num_kv_heads, of_head // self._dtype.itemsize)
        self._dim = spec.head_dim

        def pools(counts: list[int]) -> list[tuple[Pool, mmap.mmap]]:
            return [_zeros((counts[group], *self._shape), self._dtype) for group in spec.layer_groups]

        made = pools(counts)
        self.layers, self._memory = [pool for pool, _ in made], [memory for _, memory in made]
        host = pools([config.num_host_blocks] * len(counts)) if config.num_host_blocks else []
        self._host = [pool for pool, _ in host]

    def num_slots(self, group: int) -> int:
        """Tokens that the blocks of a group hold, the null block's among them."""
        return self._num_blocks[group] * self.block_size

    def clear(self, group: int, slots: Index) -> None:
        """Wipe slots: numbers that are not finite must not lie where a later owner's zero weight meets them."""
        blocks, places = np.divmod(slots, self.block_size)
        subs, tokens = np.divmod(places, SUB_BLOCK)
        for pool in self._of_group(self.layers, group):
            for part in self.by_token(pool):
                part[blocks, subs, tokens] = 0

    def by_token(self, pool: Pool) -> list[Pool]:
        """Views of a layer with one row for each token: keys, values and of bytes their scales,
        [block, sub-block, token, head, ...]."""
        size, quad = self._dim * SUB_BLOCK, 4 if self.in_bytes else 1
        found = [
            pool[..., :size].reshape(*pool.shape[:3], -1, SUB_BLOCK, quad).transpose(0, 1, 4, 2, 3, 5),
            pool[..., size : 2 * size].reshape(*pool.shape[:3], SUB_BLOCK, -1).swapaxes(2, 3),
        ]
        if self.in_bytes:
            scales = pool[..., 2 * size :].reshape(*pool.shape[:3], 2, SUB_BLOCK, 4)
            found.append(scales.transpose(0, 1, 4, 2, 3, 5))
        return found

    def wipe(self) -> None:
        """Wipe every block on the device. Host places keep what was swapped out.

        Pages are given back: the system hands out zeros again, and blocks that were never used cost nothing.
        """
        for pool, memory in zip(self.layers, self._memory, strict=True):
            try:
                memory.madvise(mmap.MADV_DONTNEED)
            except (OSError, AttributeError):  # not on Linux
                pool[:] = 0

    def copy_blocks(self, group: int, source: Index, target: Index) -> None:
        """Copies of a plan, as if done one after the other: a copy may itself be copied in the same plan."""
        origins, targets = copies_at_once(source, target)
        self._move(group, self.layers, origins, self.layers, targets)

    def place(self, group: int, source: Index, target: Index, shift: int) -> None:
        """Copy tokens that follow each other from some slots to others, with their keys turned by `shift` positions."""
        assert self._code is not None and not self.in_bytes, "only floats are turned, by the kernels"
        bound = self.num_slots(group)
        for slots in (source, target):
            if len(slots) and (slots.min() < 0 or slots.max() >= bound):
                raise IndexError(f"slots {slots.min()} to {slots.max()}, and there are {bound}")
        spec = self._spec
        turns = [shift_turn(rope, shift) for rope in spec.ropes]
        pools = zip(self.layers, self.layer_groups, spec.layer_ropes, strict=True)
        layers = np.array(
            [
                (pool.ctypes.data, turns[rope][0].ctypes.data, turns[rope][1].ctypes.data)
                for pool, mine, rope in pools
                if mine == group
            ],
            np.int64,
        )
        assert layers.strides[0] == PLACED_LAYER_BYTES
        source, target = np.ascontiguousarray(source), np.ascontiguousarray(target)
        sizes = (spec.num_kv_heads, spec.head_dim, spec.ropes[0].rotary_dim, self.sub_bytes, len(source))
        tokens = (source.ctypes.data, target.ctypes.data, len(layers), layers.ctypes.data)
        self._code.place(np.array([*sizes, *tokens], np.int64))

    def swap_out(self, group: int, blocks: Index, places: Index) -> None:
        self._move(group, self.layers, blocks, self._host, places)

    def swap_in(self, group: int, blocks: Index, places: Index) -> None:
        self._move(group, self._host, places, self.layers, blocks)

    def pack(self, place: int, into: NDArray[np.uint8]) -> None:
        """A block in a host place, as bytes."""
        start = 0
        for pool in self._host:
            part = pool[place].reshape(-1).view(np.uint8)
            into[start : start + len(part)] = part
            start += len(part)

    def unpack(self, place: int, source: NDArray[np.uint8]) -> None:
        start = 0
        for pool in self._host:
            part = pool[place].reshape(-1).view(np.uint8)
            part[:] = source[start : start + len(part)]
            start += len(part)

    def _move(self, group: int, origin: list[Pool], source: Index, goal: list[Pool], target: Index) -> None:
        if len(source) and min(source.min(), target.min()) < 0:
            raise IndexError(f"blocks {source.tolist()} to {target.tolist()}: a block below 0")
        for old, new in zip(self._of_group(origin, group), self._of_group(goal, group), strict=True):
            new[target] = old[source]

    def _of_group(self, layers: list[Pool], group: int) -> list[Pool]:
        return [pool for pool, mine in zip(layers, self.layer_groups, strict=True) if mine == group]


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Pool, mmap.mmap]:
    """Zeros, and the memory they are in: the system hands out pages when they are first written, so that a cache that
    is not used costs nothing."""
    # A page more than is used: what reads or writes past a layer's blocks does not meet the next one's.
    size = math.prod(shape) * dtype.itemsize + mmap.PAGESIZE
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape), memory
