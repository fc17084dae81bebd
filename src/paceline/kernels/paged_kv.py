"""Where keys and values of one layer lie; what both attention kernels read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.kernels import BLOCK_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Keys and values, [blocks, kv_heads, BLOCK_SIZE, head_dim] each, and every row's block ids."""

    keys: Tensor
    values: Tensor
    block_table: Tensor  # int32 [rows, blocks of the longest row]

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape and self.keys.shape[2] == BLOCK_SIZE
        assert self.keys.is_contiguous() and self.values.is_contiguous() and self.block_table.stride(1) == 1
