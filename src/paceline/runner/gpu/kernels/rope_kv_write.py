"""From the product of a layer's q, k and v matrices to turned queries and to keys and values in their slots.

One pass over the product: optional RMS norm of each head of q and k, rotation of the first `rotary_dim` entries
(pairs are an entry and the one half a rotation further), and the store of keys and values at 64-bit offsets. All of
it is float32 between one load and one rounding at the end. Keys and values may be kept in fewer bits than queries
(narrow_kv.py).

It must not know which row a token belongs to: positions and slots say everything. A slot of -1 stores nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.narrow_kv import as_stored
from paceline.runner.gpu.kernels.overlap import wait_and_announce


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMS norm over each head. Where a model adds one to its weights, they come here with it added."""

    query_weight: Tensor  # [head_dim]
    key_weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTurns:
    """By what tokens turn, where that is more than their position: a number for each axis."""

    turns: Tensor  # int32 [axes, tokens], with any distance between axes
    axes: Tensor  # int32 [pairs]: by which of these numbers each pair of a head turns


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlaces:
    """Where each token stands in its sequence and in memory."""

    positions: Tensor  # int32 [tokens]
    turned: TokenTurns | None = None  # None: by their positions
    slots: Tensor  # int32 or int64 [tokens]: block * BLOCK_SIZE + place in the block, -1 for nowhere


def rope_kv_write(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    product: Tensor,
    places: TokenPlaces,
    rotation: Tensor,
    *,
    norm: HeadNorm | None = None,
    overlapped: bool = False,
) -> None:
    """Fills `query` [tokens, heads, head_dim] and the slots of `keys` and `values`.

    `product` is [tokens, (heads + 2 kv_heads) * head_dim]; `rotation` float32 [positions, rotary_dim] has the
    cosines of a position's pairs and then their sines, any scaling included. `overlapped`: see overlap.py.
    """
    tokens, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    rotary_dim = rotation.shape[1]
    assert keys.is_contiguous() and values.is_contiguous() and query.stride(1) == head_dim
    assert keys.dtype == values.dtype and keys.dtype in (query.dtype, torch.float8_e4m3fn)
    assert product.stride(1) == 1 and rotation.is_contiguous() and rotary_dim % 2 == 0
    per_program = _heads_per_program(heads, kv_heads)
    turned = places.turned
    assert turned is None or (turned.turns.stride(1) == 1 and len(turned.axes) == rotary_dim // 2)
    _write_kernel[(tokens, (heads + 2 * kv_heads) // per_program)](
        query,
        keys,
        values,
        product,
        places.positions if turned is None else turned.turns,
        places.positions if turned is None else turned.axes,
        places.slots,
        rotation,
        norm.query_weight if norm else rotation,
        norm.key_weight if norm else rotation,
        product.stride(0),
        query.stride(0),
        0 if turned is None else turned.turns.stride(0),
        norm.epsilon if norm else 0.0,
        HAS_NORM=norm is not None,
        HAS_AXES=turned is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        BLOCK=BLOCK_SIZE,
        PER_PROGRAM=per_program,
        HALF_LANES=triton.next_power_of_2(rotary_dim // 2),
        REST_LANES=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        OVERLAPPED=overlapped,
        num_warps=2 if per_program == 8 else 1,
        launch_pdl=overlapped,
    )


def _heads_per_program(heads: int, kv_heads: int) -> int:
    """The largest power of two up to 8 that divides both, so that a program has heads of one kind only."""
    for number in (8, 4, 2):
        if heads % number == 0 and kv_heads % number == 0:
            return number
    return 1


@triton.jit
def _write_kernel(
    query,
    keys,
    values,
    product,
    turns,
    axes,
    slots,
    rotation,
    query_weight,
    key_weight,
    product_stride,
    query_stride,
    turns_stride,
    epsilon,
    HAS_NORM: tl.constexpr,
    HAS_AXES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PER_PROGRAM
    head = first + tl.arange(0, PER_PROGRAM)
    # A head in three parts: its first half, its second half, and what does not turn.
    # Offsets have the shape of the tile from the start: tensors that are widened later move through shared memory.
    half = tl.zeros([PER_PROGRAM, HALF_LANES], tl.int32) + tl.arange(0, HALF_LANES)[None, :]
    rest = tl.zeros([PER_PROGRAM, REST_LANES], tl.int32) + 2 * HALF + tl.arange(0, REST_LANES)[None, :]
    in_half = half < HALF
    in_rest = rest < HEAD_DIM
    if HAS_AXES:
        axis = tl.load(axes + half, mask=in_half, other=0).to(tl.int64)
        position = tl.load(turns + axis * turns_stride + token).to(tl.int64)
    else:
        position = tl.load(turns + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    turn = rotation + position * (2 * HALF) + half
    cosine = tl.load(turn, mask=in_half, other=0.0)
    sine = tl.load(turn + HALF, mask=in_half, other=0.0)
    wait_and_announce(OVERLAPPED)
    source = product + (token * product_stride + head * HEAD_DIM)[:, None]
    a = tl.load(source + half, mask=in_half, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + half, mask=in_half, other=0.0).to(tl.float32)
    HAS_REST: tl.constexpr = 2 * HALF < HEAD_DIM
    c = tl.load(source + rest, mask=in_rest, other=0.0).to(tl.float32) if HAS_REST else a

    is_query = first < HEADS
    is_value = first >= HEADS + KV_HEADS
    if not is_value:
        if HAS_NORM:
            weight = query_weight if is_query else key_weight
            squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
            if HAS_REST:
                squares += tl.sum(c * c, 1)
            inverse = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
            a = a * inverse * tl.load(weight + half, mask=in_half, other=0.0).to(tl.float32)
            b = b * inverse * tl.load(weight + HALF + half, mask=in_half, other=0.0).to(tl.float32)
            if HAS_REST:
                c = c * inverse * tl.load(weight + rest, mask=in_rest, other=0.0).to(tl.float32)
        a, b = a * cosine - b * sine, b * cosine + a * sine

    if keys.dtype.element_ty == query.dtype.element_ty:
        if is_query:
            into = query + (token * query_stride + head * HEAD_DIM)[:, None]
            stored = token >= 0
        else:
            stored = slot >= 0
            place = _place(slot, head - HEADS - (KV_HEADS if is_value else 0), KV_HEADS, HEAD_DIM, BLOCK)
            into = (values if is_value else keys) + place[:, None]
        _store_head(into, a, b, c, half, rest, in_half & stored, in_rest & stored, HALF, HAS_REST)
    elif is_query:  # pointers to two types cannot meet in one store
        query_at = query + (token * query_stride + head * HEAD_DIM)[:, None]
        _store_head(query_at, a, b, c, half, rest, in_half, in_rest, HALF, HAS_REST)
    else:
        is_kept = slot >= 0
        place = _place(slot, head - HEADS - (KV_HEADS if is_value else 0), KV_HEADS, HEAD_DIM, BLOCK)
        kv_at = (values if is_value else keys) + place[:, None]
        _store_head(kv_at, a, b, c, half, rest, in_half & is_kept, in_rest & is_kept, HALF, HAS_REST)


@triton.jit
def _place(slot, kv_head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Where the heads of a slot begin; of one that is nowhere, some place that exists."""
    slot = tl.maximum(slot, 0)
    return ((slot // BLOCK * KV_HEADS + kv_head) * BLOCK + slot % BLOCK) * HEAD_DIM


@triton.jit
def _store_head(into, a, b, c, half, rest, in_half, in_rest, HALF: tl.constexpr, HAS_REST: tl.constexpr):
    kind = into.dtype.element_ty
    tl.store(into + half, as_stored(a, kind), mask=in_half)
    tl.store(into + HALF + half, as_stored(b, kind), mask=in_half)
    if HAS_REST:
        tl.store(into + rest, as_stored(c, kind), mask=in_rest)
