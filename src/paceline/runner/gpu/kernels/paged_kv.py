"""Where keys and values of one layer lie; what both attention kernels read.

They have the type of the queries or eight bits (narrow_kv.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Keys and values, [blocks, kv_heads, BLOCK_SIZE, head_dim] each, and every row's block ids."""

    keys: Tensor
    values: Tensor
    block_table: Tensor  # int32 [rows, blocks of the longest row]

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape and self.keys.shape[2] == BLOCK_SIZE
        assert self.keys.dtype == self.values.dtype
        assert self.keys.is_contiguous() and self.values.is_contiguous() and self.block_table.stride(1) == 1


def as_movable(pool: Tensor) -> Tensor:
    """The same memory in a type that torch can index: of numbers of one byte it moves only whole ones."""
    return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool


def read_blocks(pool: Tensor, blocks: Tensor) -> Tensor:
    """What lies in these blocks, in float64; for references."""
    return as_movable(pool)[blocks].view(pool.dtype).double()
