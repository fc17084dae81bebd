"""Matrix product with weights of e4m3 whose scales stand for groups of inputs, for up to 64 rows of 16 bits.

Files in blocks of 128 x 128 are of this kind: a scale belongs to a part of the inner dimension, so it meets the sums of
that part, in float32. Inputs stay as they are. A weight becomes bfloat16 by moving its bits, exactly: its four bits of
exponent are the lowest four of bfloat16's eight, and 2^120 makes up for the other bias. More rows unpack the matrix.

As in `skinny_product`, the weights are the tall operand of the matrix instruction. It must not know the layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.overlap import wait_and_announce
from paceline.runner.gpu.kernels.skinny_product import (
    MAX_ROWS,
    ProductTuning,
    fitting_parts,
    fitting_tile,
    launch_product,
)

_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """`q` [columns, inner] of e4m3 times `scale` [groups, columns], float32."""

    q: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1]

    @property
    def group(self) -> int:
        return self.shape[1] // self.scale.shape[0]


def block_tuning(rows: int, columns: int, inner: int, group: int, *, narrow: bool = False) -> ProductTuning:
    """How a product is cut; `narrow`: its parts may be summed by the next kernel."""
    step = min(group, 128)
    parts = fitting_parts(4 if columns <= 2048 else 2, inner, step) if narrow and columns <= 4096 else 1
    return ProductTuning(
        columns=fitting_tile(columns), inner=step, parts=parts, num_stages=5 if rows <= 32 else 4
    )


def block_product(
    out: Tensor,
    x: Tensor,
    weight: BlockWeight,
    *,
    tuning: ProductTuning,
    gated: bool = False,
    overlapped: bool = False,
) -> None:
    """`out` = `x` [rows, inner] times `weight` [columns, inner] transposed.

    `out` is [rows, columns] for one part, else float32 [parts, rows, columns]. With `gated`, `weight` has 2 * columns,
    gate first, and `out` = silu(gate) * up. `overlapped`: see overlap.py.
    """
    assert len(x) <= MAX_ROWS and x.shape[1] == weight.shape[1] and weight.group % tuning.inner == 0
    launch_product(
        _block_kernel,
        out,
        (x, weight.q, weight.scale),
        sizes=(*x.shape, weight.shape[0]),
        tuning=tuning,
        gated=gated,
        overlapped=overlapped,
        GROUP=weight.group,
        STEP=tuning.inner,
    )


@triton.jit(do_not_specialize=["rows"])
def _block_kernel(
    out,
    x,
    weight,
    scale,
    rows,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    TOTAL: tl.constexpr = 2 * COLUMNS if GATED else COLUMNS
    PART: tl.constexpr = INNER // PARTS
    KIND: tl.constexpr = x.dtype.element_ty
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, STEP)
    weight_at = weight + column.to(tl.int64)[:, None] * INNER + inner[None, :]
    x_at = x + row[:, None] * INNER + inner[None, :]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    up = tl.zeros([TILE, ROWS], tl.float32)
    wait_and_announce(OVERLAPPED)
    for start in range(part * PART, (part + 1) * PART, STEP):
        xs = tl.trans(tl.load(x_at + start, mask=(row < rows)[:, None], other=0.0))
        of_group = scale + start // GROUP * TOTAL + column
        w = widened(tl.load(weight_at + start), KIND)
        acc += tl.dot(w, xs) * tl.load(of_group)[:, None]
        if GATED:
            w = widened(tl.load(weight_at + COLUMNS * INNER + start), KIND)
            up += tl.dot(w, xs) * tl.load(of_group + COLUMNS)[:, None]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    into = out + (part * rows + row[None, :]) * COLUMNS + column[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=(row < rows)[None, :])


@triton.jit
def widened(numbers, KIND: tl.constexpr):
    """Numbers of e4m3 or int8 in a wider type, which holds each of them."""
    if _IS_COMPILED and tl.bfloat16 == KIND and numbers.dtype == tl.float8e4nv:
        wide = tl.inline_asm_elementwise(
            """{
            .reg .b32 pair, sign, scale, zero;
            mov.b32 scale, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            prmt.b32 pair, $2, 0, 0x1404;
            and.b32 sign, pair, 0x80008000;
            and.b32 pair, pair, 0x7F007F00;
            shr.u32 pair, pair, 4;
            or.b32 pair, pair, sign;
            fma.rn.bf16x2 $0, pair, scale, zero;
            prmt.b32 pair, $2, 0, 0x3424;
            and.b32 sign, pair, 0x80008000;
            and.b32 pair, pair, 0x7F007F00;
            shr.u32 pair, pair, 4;
            or.b32 pair, pair, sign;
            fma.rn.bf16x2 $1, pair, scale, zero;
            }""",
            "=r,=r,r",
            [numbers],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = numbers.to(tl.float32).to(KIND)
    return wide


def unpack_blocks(out: Tensor, weight: BlockWeight) -> None:
    """`out` [columns, inner] = the weights."""
    columns, inner = weight.shape
    assert out.shape == (columns, inner) and out.is_contiguous()
    lanes = triton.next_power_of_2(inner)
    _unpack_kernel[(columns,)](
        out,
        weight.q,
        weight.scale,
        columns,
        INNER=inner,
        GROUP=weight.group,
        LANES=lanes,
        num_warps=min(8, max(1, lanes // 512)),
    )


@triton.jit(do_not_specialize=["columns"])
def _unpack_kernel(
    out, weight, scale, columns, INNER: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr
):
    column = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = lane < INNER
    number = tl.load(weight + column * INNER + lane, mask=mask, other=0.0).to(tl.float32)
    of_group = tl.load(scale + (lane // GROUP).to(tl.int64) * columns + column, mask=mask, other=0.0)
    tl.store(out + column * INNER + lane, (number * of_group).to(out.dtype.element_ty), mask=mask)
