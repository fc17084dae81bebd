"""Matrix product for 2 to 64 rows (one row: `row_product`): reads the weights once, with many programs at it.
Gate and up of a small model go on to 256 rows, where a launch and its gap cost more than cuBLAS gains.

The weights are the tall operand of the matrix instruction, so that a few rows waste nothing. Where the matrix has too
few columns for the device, the inner dimension is split and the parts, float32, are left to the next kernel to sum
(`residual_norm`): the order is fixed, there are no atomics and no launch more. The product of gate and up goes
through the activation before it is stored.

It must not know the layer; how a shape is cut is a table in this file, never a measurement at start-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.overlap import announce, wait, wait_and_announce

MAX_ROWS = 64
MAX_GATED_ROWS = 256
MAX_PARTS = 4
_FEWEST_ROWS = 16  # of a matrix instruction
_ENOUGH_PROGRAMS = 96  # to read a matrix quickly


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTuning:
    """Columns of the result per program, inner entries per turn, and into how many parts the inner dimension goes."""

    columns: int
    inner: int
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 4
    rows: int = MAX_ROWS  # per program, at most
    fewest_rows: int = _FEWEST_ROWS  # and at least
    # False: it runs so long that programs which start early only take places from those they wait for.
    starts_early: bool = True


def narrow_tuning(columns: int, inner: int) -> ProductTuning | None:
    """How a product back to the model's width is cut, by measurements on an H200; None where cuBLAS is better."""
    parts = 4 if columns <= 2048 else 2
    if columns > 4096 or columns % 64 or inner % (128 * parts):
        return None
    return ProductTuning(columns=64, inner=128, parts=parts)


def wide_tuning(rows: int, columns: int, inner: int) -> ProductTuning | None:
    """The same for queries, keys and values."""
    if rows > 32 or columns < 4096 or columns % 64 or inner % 128:
        return None
    return ProductTuning(columns=64, inner=128, num_stages=6)


def gated_tuning(rows: int, columns: int, inner: int) -> ProductTuning | None:
    """The same for gate and up, `columns` of each."""
    if columns < 2048 or columns % 64 or inner % 128:
        return None
    if rows > MAX_ROWS:
        if columns >= 8192:
            return None
        return ProductTuning(columns=64, inner=64, num_warps=8, num_stages=4, rows=128, starts_early=False)
    if columns < 8192:
        return ProductTuning(columns=64, inner=64, num_stages=6)
    if rows <= _FEWEST_ROWS:
        return ProductTuning(columns=64, inner=128, num_stages=3, starts_early=False)
    return ProductTuning(columns=64, inner=64, num_stages=4 if rows <= 32 else 3, starts_early=False)


def small_tuning(columns: int, inner: int, *, splits: bool = False) -> ProductTuning | None:
    """The same for small matrices, by reckoning: those of a draft head, and of a small model in steps with drafts. What
    counts is that enough programs read them. `splits`: the parts of the inner dimension may be left to the next kernel
    to sum."""
    step = 128 if inner % 128 == 0 else 64
    if inner % step or columns % _FEWEST_ROWS:
        return None
    fitting = [tile for tile in (64, 32, 16) if columns % tile == 0]
    tile = next((tile for tile in fitting if columns // tile >= _ENOUGH_PROGRAMS), fitting[-1])
    parts = next(parts for parts in (MAX_PARTS, 3, 2, 1) if inner % (step * parts) == 0) if splits else 1
    return ProductTuning(columns=tile, inner=step, parts=parts)


def skinny_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    tuning: ProductTuning,
    gated: bool = False,
    overlapped: bool = False,
    waits_last: bool = False,
) -> None:
    """`out` = `x` [rows, inner] times `weight` [columns, inner] transposed.

    `out` is [rows, columns] for one part, else float32 [parts, rows, columns]. With `gated`, `weight` is
    [2 * columns, inner], gate first, and `out` = silu(gate) * up. `overlapped`: see overlap.py; `waits_last`: `x` was
    complete when the kernel in front of this one began, which does not touch `out` either.
    """
    assert len(x) <= (MAX_GATED_ROWS if gated else MAX_ROWS)
    launch_product(
        product_kernel,
        out,
        (x, x, weight, weight),
        sizes=(*x.shape, weight.shape[0]),
        tuning=tuning,
        gated=gated,
        overlapped=overlapped,
        STEP=tuning.inner,
        SCALED=False,
        IS_WHOLE=False,
        WAITS_LAST=waits_last,
    )


def launch_product(
    kernel: Any,
    out: Tensor,
    inputs: Sequence[Tensor],
    *,
    sizes: tuple[int, int, int],
    tuning: ProductTuning,
    gated: bool,
    overlapped: bool,
    **constants: Any,
) -> None:
    """A product as `tuning` cuts it, of `sizes` rows, inner entries and rows of the matrix; `constants` of the kernel
    come beside those that all products have."""
    rows, inner, total = sizes
    columns = total // (2 if gated else 1)
    assert columns % tuning.columns == 0 and inner % (tuning.inner * tuning.parts) == 0
    assert out.is_contiguous() and all(each.is_contiguous() for each in inputs)
    assert tuning.parts == 1 or not gated
    overlapped = overlapped and tuning.starts_early
    row_tile = min(tuning.rows, max(tuning.fewest_rows, triton.next_power_of_2(rows)))
    kernel[(columns // tuning.columns, tuning.parts, triton.cdiv(rows, row_tile))](
        out,
        *inputs,
        rows,
        INNER=inner,
        COLUMNS=columns,
        PARTS=tuning.parts,
        TILE=tuning.columns,
        ROWS=row_tile,
        GATED=gated,
        OVERLAPPED=overlapped,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        launch_pdl=overlapped,
        **constants,
    )


def fitting_tile(columns: int) -> int:
    """Columns per program, at most 64."""
    return next((tile for tile in (64, 32) if columns % tile == 0), 16)


def fitting_parts(most: int, inner: int, step: int) -> int:
    """Into how many parts of whole steps the inner dimension goes, at most `most`."""
    return next((parts for parts in (most, 2) if parts <= most and inner % (step * parts) == 0), 1)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    out,
    x,
    x_scale,
    weight,
    weight_scale,
    rows,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    WAITS_LAST: tl.constexpr,
):
    """With SCALED both sides have a scale per row, which meet the sums at the end; IS_WHOLE: both are int8."""
    SUM: tl.constexpr = tl.int32 if IS_WHOLE else tl.float32
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    part = tl.program_id(1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, STEP)
    weight_at = weight + column.to(tl.int64)[:, None] * INNER + inner[None, :]
    x_at = x + row[:, None] * INNER + inner[None, :]
    if SCALED:
        scale = tl.load(weight_scale + column)
        up_scale = tl.load(weight_scale + COLUMNS + column) if GATED else scale
    acc = tl.zeros([TILE, ROWS], SUM)
    up = tl.zeros([TILE, ROWS], SUM)
    PART: tl.constexpr = INNER // PARTS
    if WAITS_LAST:
        announce(OVERLAPPED)
    else:
        wait_and_announce(OVERLAPPED)
    for start in range(part * PART, (part + 1) * PART, STEP):
        w = tl.load(weight_at + start)
        xs = tl.load(x_at + start, mask=(row < rows)[:, None], other=0.0)
        acc = tl.dot(w, tl.trans(xs), acc, out_dtype=SUM)
        if GATED:
            up = tl.dot(tl.load(weight_at + COLUMNS * INNER + start), tl.trans(xs), up, out_dtype=SUM)
    if SCALED:
        of_row = tl.load(x_scale + row, mask=row < rows, other=0.0)
        acc = acc.to(tl.float32) * scale[:, None] * of_row[None, :]
        up = up.to(tl.float32) * up_scale[:, None] * of_row[None, :]
    store_product(out, acc, up, part, rows, row, column, COLUMNS, GATED)
    if WAITS_LAST:
        wait(OVERLAPPED)


@triton.jit
def store_product(out, acc, up, part, rows, row, column, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """A tile [columns, rows] of a part; with GATED, of silu(acc) * up."""
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    into = out + (part * rows + row[None, :]) * COLUMNS + column[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=(row < rows)[None, :])
