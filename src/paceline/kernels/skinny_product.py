# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Matrix product for 2 to 16 rows (one row: `row_product`): reads the weights once, with many programs at it.

The weights are the tall operand of the matrix instruction, so that a few rows waste nothing. Where the matrix has too
few columns for the device, the inner dimension is split and the parts, float32, are left to the next kernel to sum
(`residual_norm`): the order is fixed, there are no atomics and no launch more.

It must not know the layer; how a shape is cut is a table in this file, never a measurement at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.overlap import wait_and_announce

MAX_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTuning:
    """Columns of the result per program, inner entries per turn, and into how many parts the inner dimension goes."""

    columns: int
    inner: int
    parts: int
    num_warps: int
    num_stages: int = 4


def tuning_for(columns: int, inner: int) -> ProductTuning | None:
    """How this shape is cut, by measurements on an H200 for 2 to 16 rows; None where cuBLAS is as fast or faster."""
    if columns > 2048 or inner % 1024:
        return None
    return ProductTuning(columns=64, inner=128, parts=8, num_warps=4, num_stages=3)


def skinny_product(
    out: Tensor, x: Tensor, weight: Tensor, *, tuning: ProductTuning, overlapped: bool = False
) -> None:
    """`out` = `x` [rows, inner] times `weight` [columns, inner] transposed.

    `out` is [rows, columns] for one part, else float32 [parts, rows, columns]. `overlapped`: see overlap.py.
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    assert rows <= MAX_ROWS and columns % tuning.columns == 0 and inner % (tuning.inner * tuning.parts) == 0
    assert weight.is_contiguous() and x.stride(1) == 1 and out.is_contiguous()
    _product_kernel[(columns // tuning.columns, tuning.parts)](
        out,
        x,
        weight,
        rows,
        x.stride(0),
        INNER=inner,
        COLUMNS=columns,
        PARTS=tuning.parts,
        TILE=tuning.columns,
        STEP=tuning.inner,
        ROWS=MAX_ROWS,
        OVERLAPPED=overlapped,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        launch_pdl=overlapped,
    )


@triton.jit(do_not_specialize=["rows", "x_stride"])
def _product_kernel(
    out,
    x,
    weight,
    rows,
    x_stride,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, STEP)
    weight_at = weight + column.to(tl.int64)[:, None] * INNER + inner[None, :]
    x_at = x + row[:, None] * x_stride + inner[None, :]
    acc = tl.zeros([TILE, ROWS], tl.float32)
    PART: tl.constexpr = INNER // PARTS
    wait_and_announce(OVERLAPPED)
    for start in range(part * PART, (part + 1) * PART, STEP):
        w = tl.load(weight_at + start)
        xs = tl.load(x_at + start, mask=(row < rows)[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(xs), acc)
    into = out + (part * rows + row[None, :]) * COLUMNS + column[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=(row < rows)[None, :])


def reference_skinny_product(x: Tensor, weight: Tensor) -> Tensor:
    """The definition in float64."""
    return x.double() @ weight.double().T
