"""Triton kernels, one operation per file: the kernel and a thin wrapper; tests/gpu has the definition of each.

They know tensors and nothing else: no rows of requests, no scheduler, no model. Wrappers allocate nothing unless
they say so and read nothing back, so that every one of them can be captured in a CUDA graph. Importing this package
needs no Triton; importing one of its modules does.

Offsets into keys and values are 64-bit. Counts are never compile-time constants: a batch of another size must not
compile anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

BLOCK_SIZE = 64  # token slots per block of keys and values: one tile of every attention kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedKV:
    """Keys and values of one layer, [blocks, kv_heads, BLOCK_SIZE, head_dim] each, and every row's block ids.

    They have the type of the queries or eight bits (narrow_kv.py).
    """

    keys: Tensor
    values: Tensor
    block_table: Tensor  # int32 [rows, blocks of the longest row]

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape and self.keys.shape[2] == BLOCK_SIZE
        assert self.keys.dtype == self.values.dtype
        assert self.keys.is_contiguous() and self.values.is_contiguous() and self.block_table.stride(1) == 1
