"""Keys and values of tokens from some slots to others, with keys turned by the difference of their positions.

Rotations add up: a key of position p that is turned by s is the key of position p + s. It is computed in float32 and
rounded once more than a key that was computed at its place; a key of eight bits would lose more than that, and is
refused. Values are copied as they are.

It must not know which rows tokens belong to: slots and turns say everything. A target of -1 is nowhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE


def place_kv(
    keys: Tensor, values: Tensor, sources: Tensor, targets: Tensor, turns: Tensor, rotation: Tensor
) -> None:
    """Fills slots of `keys` and `values` [blocks, kv_heads, BLOCK_SIZE, head_dim], none of which is read too.

    `sources` and `targets` are int64 [tokens] slots; `turns` int32 [tokens] the row of `rotation` float32
    [turns, rotary_dim] of each, cosines of a shift's pairs and then their sines, without any scaling.
    """
    _, kv_heads, block_size, head_dim = keys.shape
    rotary_dim = rotation.shape[1]
    assert keys.is_contiguous() and values.is_contiguous() and rotation.is_contiguous()
    assert keys.dtype == values.dtype and keys.dtype != torch.float8_e4m3fn
    assert block_size == BLOCK_SIZE and rotary_dim % 2 == 0 and rotary_dim <= head_dim
    if not len(sources):
        return
    _place_kernel[(len(sources),)](
        keys,
        values,
        sources,
        targets,
        turns,
        rotation,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        HALF=rotary_dim // 2,
        BLOCK=BLOCK_SIZE,
        HEADS=triton.next_power_of_2(kv_heads),
        HALF_LANES=triton.next_power_of_2(rotary_dim // 2),
        REST_LANES=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        LANES=triton.next_power_of_2(head_dim),
        num_warps=2,
    )


@triton.jit
def _place_kernel(
    keys,
    values,
    sources,
    targets,
    turns,
    rotation,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_LANES: tl.constexpr,
    REST_LANES: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    source, target = tl.load(sources + token), tl.load(targets + token)
    head = tl.arange(0, HEADS)[:, None]
    is_wanted = (head < KV_HEADS) & (target >= 0)
    target = tl.maximum(target, 0)
    read = (source // BLOCK * KV_HEADS + head) * (BLOCK * HEAD_DIM) + source % BLOCK * HEAD_DIM
    write = (target // BLOCK * KV_HEADS + head) * (BLOCK * HEAD_DIM) + target % BLOCK * HEAD_DIM

    half = tl.arange(0, HALF_LANES)[None, :]
    in_half = half < HALF
    turn = rotation + tl.load(turns + token).to(tl.int64) * (2 * HALF) + half
    cosine = tl.load(turn, mask=in_half, other=0.0)
    sine = tl.load(turn + HALF, mask=in_half, other=0.0)
    pairs = in_half & is_wanted
    a = tl.load(keys + read + half, mask=pairs, other=0.0).to(tl.float32)
    b = tl.load(keys + read + HALF + half, mask=pairs, other=0.0).to(tl.float32)
    kind = keys.dtype.element_ty
    tl.store(keys + write + half, (a * cosine - b * sine).to(kind), mask=pairs)
    tl.store(keys + write + HALF + half, (b * cosine + a * sine).to(kind), mask=pairs)
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, REST_LANES)[None, :]
        unturned = (rest < HEAD_DIM) & is_wanted
        tl.store(keys + write + rest, tl.load(keys + read + rest, mask=unturned), mask=unturned)

    lane = tl.arange(0, LANES)[None, :]
    all_of_it = (lane < HEAD_DIM) & is_wanted
    tl.store(values + write + lane, tl.load(values + read + lane, mask=all_of_it), mask=all_of_it)
