"""Rotary positions of queries and keys in place, where no keys are kept: encoders.

A row of the table has cosines and then sines of its pairs; which row a token has is the caller's business, so that
positions may be places in a text or places in a picture. An entry is paired with that half a rotation's width behind
it; what lies beyond the rotation stays as it is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 256  # that a program turns together


def rotate_heads(heads: Tensor, table: Tensor, positions: Tensor) -> None:
    """`heads` [tokens, heads, head_dim], with any distance between tokens; `table` float32 [positions, rotary_dim];
    `positions` int32 [tokens]."""
    tokens, number, head_dim = heads.shape
    assert heads.stride()[1:] == (head_dim, 1) and table.is_contiguous() and table.shape[1] <= head_dim
    half = table.shape[1] // 2
    lanes = triton.next_power_of_2(half)
    together = max(1, min(triton.next_power_of_2(number), _PAIRS // lanes))
    _rotate_kernel[(tokens, triton.cdiv(number, together))](
        heads,
        table,
        positions,
        STRIDE=heads.stride(0),
        NUMBER=number,
        HEAD_DIM=head_dim,
        HALF=half,
        LANES=lanes,
        HEADS=together,
        num_warps=1,
    )


@triton.jit
def _rotate_kernel(
    heads,
    table,
    positions,
    STRIDE: tl.constexpr,
    NUMBER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)[None, :]
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    in_half = lane < HALF
    turn = table + tl.load(positions + token).to(tl.int64) * (2 * HALF) + lane
    cosine = tl.load(turn, mask=in_half, other=0.0)
    sine = tl.load(turn + HALF, mask=in_half, other=0.0)
    mask = in_half & (head < NUMBER)
    at = heads + token * STRIDE + head * HEAD_DIM + lane
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (first * cosine - second * sine).to(heads.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (second * cosine + first * sine).to(heads.dtype.element_ty), mask=mask)
