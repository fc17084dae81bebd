"""activation(gate) * up: of a product that was stored, or of gate and up of many tokens before they are stored.

SwiGLU (sigmoid linear unit) and GeGLU (the tanh form of the Gaussian one), in float32 until the result is rounded.

In `gated_product`, what gate and up would write, twice the inner width of every token, is never written nor read
again. A program computes the same tile of gate and up, so that tokens are read once for both; the weights are the tall
operand of the matrix instruction, and the copy engine feeds it. Neighbours go through a few tiles of tokens before they
move on to other columns, so that what they read together stays in the cache.

For few rows see `skinny_product`. It must not know the layer; where it is better than cuBLAS is a rule in this file.
"""

from __future__ import annotations

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.runner.gpu.kernels.overlap import wait_and_announce
from paceline.runner.gpu.kernels.scaled_rows import ScaledRows, as_eight_bits, row_scale
from paceline.runner.gpu.kernels.skinny_product import MAX_ROWS

Activation = Literal["silu", "gelu_tanh"]
_GATE_COLUMNS = 1024


def gated_activation(
    out: Tensor, product: Tensor, *, activation: Activation = "silu", overlapped: bool = False
) -> None:
    """`out` [tokens, width] of `product` [tokens, 2 * width], gate first. `overlapped`: see overlap.py."""
    tokens, width = out.shape
    assert product.shape[1] == 2 * width and product.stride(1) == 1 and out.stride(1) == 1
    _gate_kernel[(tokens, triton.cdiv(width, _GATE_COLUMNS))](
        out,
        product,
        product.stride(0),
        out.stride(0),
        WIDTH=width,
        COLUMNS=_GATE_COLUMNS,
        IS_SILU=activation == "silu",
        OVERLAPPED=overlapped,
        num_warps=4,
        launch_pdl=overlapped,
    )


@triton.jit
def _gate_kernel(
    out,
    product,
    product_stride,
    out_stride,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SILU: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    at = product + token * product_stride + column
    wait_and_announce(OVERLAPPED)
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = activate(gate, IS_SILU) * up
    tl.store(out + token * out_stride + column, result.to(out.dtype.element_ty), mask=mask)


def gated_rows(
    out: ScaledRows, product: Tensor, *, activation: Activation = "silu", overlapped: bool = False
) -> None:
    """The same in eight bits with a scale per row: one program has a whole row, to know its largest number."""
    tokens, width = out.q.shape
    assert product.shape[1] == 2 * width and product.stride(1) == 1 and out.q.is_contiguous()
    lanes = triton.next_power_of_2(width)
    _gate_rows_kernel[(tokens,)](
        out.q,
        out.scale,
        product,
        product.stride(0),
        WIDTH=width,
        LANES=lanes,
        IS_SILU=activation == "silu",
        OVERLAPPED=overlapped,
        num_warps=min(32, max(1, lanes // 512)),
        launch_pdl=overlapped,
    )


@triton.jit
def _gate_rows_kernel(
    out,
    out_scale,
    product,
    product_stride,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    IS_SILU: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = lane < WIDTH
    at = product + token * product_stride + lane
    wait_and_announce(OVERLAPPED)
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    result = activate(gate, IS_SILU) * up
    scale = row_scale(result, out.dtype.element_ty)
    tl.store(
        out + token * WIDTH + lane, as_eight_bits(result * (1.0 / scale), out.dtype.element_ty), mask=mask
    )
    tl.store(out_scale + token, scale)


@triton.jit
def activate(gate, IS_SILU: tl.constexpr):
    """The activation of float32 numbers."""
    if IS_SILU:
        active = gate / (1.0 + tl.exp(-gate))
    else:
        # gelu(x) = x * sigmoid(2 z), the same as x / 2 * (1 + tanh(z)); exp of a large -2z is infinite and fine
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-2.0 * inner))
    return active


# Chosen on an H200 (docs/measurements/). Tiles of 256 tokens and 64 columns are as fast alone and slower in a step.
_TOKENS, _COLUMNS, _STEP = 128, 128, 64
_WARPS, _STAGES = 8, 4
_GROUP = 8  # tiles of tokens that programs go through before they move on to other columns
_WORTH_IT = 1.2  # of what the last round leaves idle; above, cuBLAS and the activation after it are faster
SHARED_BYTES = _STAGES * _STEP * (_TOKENS + 2 * _COLUMNS) * 2 + 1024  # of a program, and barriers


def can_be_gated(columns: int, inner: int) -> bool:
    """Whether tiles cut a product of this shape without a rest."""
    return columns % _COLUMNS == 0 and inner % _STEP == 0


def is_worth_gating(tokens: int, columns: int, inner: int, multiprocessors: int) -> bool:
    """Whether this is faster than cuBLAS and the activation after it, by measurements on an H200 (docs/measurements/).

    One program runs on a multiprocessor at a time. What the device could compute in the rounds this takes is held
    against what there is to compute, in pieces of 64 tokens, as others cut them too.
    """
    if tokens <= MAX_ROWS or not can_be_gated(columns, inner):
        return False
    programs = triton.cdiv(tokens, _TOKENS) * (columns // _COLUMNS)
    possible = triton.cdiv(programs, multiprocessors) * multiprocessors * _TOKENS * _COLUMNS
    return bool(possible <= _WORTH_IT * triton.cdiv(tokens, 64) * 64 * columns)


def gated_product(out: Tensor, x: Tensor, weight: Tensor, *, activation: Activation = "silu") -> None:
    """`out` [tokens, columns] = activation(gate) * up of `x` [tokens, inner] and `weight` [2 * columns, inner]."""
    tokens, inner = x.shape
    columns = weight.shape[0] // 2
    assert out.shape == (tokens, columns) and can_be_gated(columns, inner)
    token_tiles = triton.cdiv(tokens, _TOKENS)
    _product_kernel[(token_tiles * (columns // _COLUMNS),)](
        TensorDescriptor.from_tensor(out, [_TOKENS, _COLUMNS]),
        TensorDescriptor.from_tensor(x, [_TOKENS, _STEP]),
        TensorDescriptor.from_tensor(weight, [_COLUMNS, _STEP]),
        token_tiles,
        INNER=inner,
        COLUMNS=columns,
        TILE=_COLUMNS,
        TOKENS=_TOKENS,
        STEP=_STEP,
        GROUP=_GROUP,
        IS_SILU=activation == "silu",
        num_warps=_WARPS,
        num_stages=_STAGES,
    )


@triton.jit(do_not_specialize=["token_tiles"])
def _product_kernel(
    out,
    x,
    weight,
    token_tiles,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    per_group = GROUP * (COLUMNS // TILE)
    first = tl.program_id(0) // per_group * GROUP
    in_group = tl.program_id(0) % per_group
    tall = tl.minimum(token_tiles - first, GROUP)
    token = (first + in_group % tall) * TOKENS
    column = in_group // tall * TILE
    gate = tl.zeros([TILE, TOKENS], tl.float32)
    up = tl.zeros([TILE, TOKENS], tl.float32)
    for at in range(0, INNER, STEP):
        xs = x.load([token, at]).T
        gate = tl.dot(weight.load([column, at]), xs, gate)
        up = tl.dot(weight.load([COLUMNS + column, at]), xs, up)
    out.store([token, column], (activate(gate, IS_SILU) * up).T.to(out.dtype))
