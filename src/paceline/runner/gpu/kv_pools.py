"""Keys and values on the device: one tensor per group of layers, whose parts are the pools of these layers.

A pool is [blocks, kv heads, block size, head_dim]; copies between blocks are plain torch operations in the stream of
the steps. They move bytes and need not know what type is stored. What lies in a block beyond its row's tokens is never
read, so nothing is wiped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.spec import ModelSpec
from paceline.config import KVConfig
from paceline.core.plan import BlockCopies
from paceline.kernels import BLOCK_SIZE
from paceline.kernels.paged_kv import PagedKV


def device_block_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers of all groups, with keys and values stored as `dtype`."""
    return spec.num_layers * 2 * BLOCK_SIZE * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class KVPools:
    """All pools of one model, with the block tables of its rows."""

    def __init__(
        self, spec: ModelSpec, config: KVConfig, tables: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        assert config.block_size == BLOCK_SIZE, f"kernels are made for blocks of {BLOCK_SIZE} tokens"
        device, block = tables[0].device, (spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        pools: list[Tensor] = []
        for index, group in enumerate(config.groups):
            shape = (2 * spec.layer_groups.count(index), group.num_blocks or config.num_blocks, *block)
            pools.append(torch.zeros(shape, dtype=dtype, device=device))
        parts = [iter(pool.unbind()) for pool in pools]
        self.layers = [
            PagedKV(keys=next(parts[group]), values=next(parts[group]), block_table=tables[group])
            for group in spec.layer_groups
        ]
        # Per group every block with its keys and values in all layers, in words: [blocks, 2 * layers, words ...].
        self.blocks = [pool.view(torch.int64).transpose(0, 1) for pool in pools]

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies of a plan, as if done one after the other: a copy may itself be copied in the same plan."""
        for group in np.unique(copies.group).tolist():
            mine = copies.group == group
            origins: dict[int, int] = {}
            for read, write in zip(copies.source[mine].tolist(), copies.target[mine].tolist(), strict=True):
                origins[write] = origins.get(read, read)
            blocks = self.blocks[group]
            blocks[on_device(list(origins), blocks)] = blocks[on_device(list(origins.values()), blocks)]


def on_device(numbers: Sequence[int], where: Tensor) -> Tensor:
    """Numbers that go where a tensor lies, without waiting for what that device is doing."""
    pinned = torch.tensor(numbers, dtype=torch.int64, pin_memory=where.is_cuda)
    return pinned.to(where.device, non_blocking=True)
