"""Matrix product of rows and weights of eight bits, for few rows: reads the weights once, by many programs.

Both sides are e4m3 or both int8. A row of weights and a row of inputs have a scale each, which meet the sums at the
end. As in `skinny_product`, the weights are the tall operand of the matrix instruction, the inner dimension may be
split into parts that `residual_norm` sums, and gate and up may go through the activation before they are stored. More
rows go through the same kernel in larger tiles; for e4m3 on a GPU torch's product is faster from 65 rows on, or from
257 where the inner dimension is split.

It must not know the layer; how a shape is cut is a table in this file, never a measurement at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runner.gpu.kernels.scaled_rows import ScaledRows
from paceline.runner.gpu.kernels.skinny_product import (
    MAX_ROWS,
    ProductTuning,
    fitting_parts,
    fitting_tile,
    launch_product,
    product_kernel,
)

_FEWEST_ROWS = 16  # of a matrix instruction
MAX_SPLIT_ROWS = 256  # two tiles of rows, 32 of columns and two parts: one for each multiprocessor of an H200
# What the inner dimension must be a multiple of: entries of eight bits in a matrix instruction.
INNER_STEP = 32


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """`q` [columns, inner] of eight bits times `scale` [columns], float32."""

    q: Tensor
    scale: Tensor


def scaled_tuning(rows: int, columns: int, inner: int, *, narrow: bool = False) -> ProductTuning:
    """How a product is cut; `narrow`: its parts may be summed by the next kernel."""
    if rows > MAX_ROWS:
        tile = 128 if columns % 128 == 0 else fitting_tile(columns)
        return ProductTuning(
            columns=tile,
            inner=128 if inner % 128 == 0 else INNER_STEP,
            parts=fitting_parts(4 if rows <= 128 else 2, inner, 128) if narrow else 1,
            num_warps=8 if tile == 128 else 4,
            rows=128,
        )
    many = 4 if columns <= 2048 or rows <= _FEWEST_ROWS else 2
    parts = fitting_parts(many, inner, 128) if narrow and columns <= 4096 else 1
    step = next((step for step in (256, 128, 64) if inner % (step * parts) == 0), INNER_STEP)
    return ProductTuning(
        columns=fitting_tile(columns), inner=step, parts=parts, num_stages=4 if step > 128 else 6
    )


def is_split(rows: int, columns: int) -> bool:
    """Whether a product whose parts the next kernel sums is faster here than by torch, whose programs are too few."""
    return rows <= MAX_ROWS or (rows <= MAX_SPLIT_ROWS and columns <= 4096)


def scaled_gated_tuning(rows: int, columns: int, inner: int) -> ProductTuning:
    """The same for gate and up, `columns` of each."""
    plain = scaled_tuning(rows, columns, inner)
    return ProductTuning(
        columns=plain.columns,
        inner=min(plain.inner, 128),
        num_stages=4 if rows <= 32 else 3,
        starts_early=columns < 8192,
    )


def scaled_product(
    out: Tensor,
    x: ScaledRows,
    weight: ScaledWeight,
    *,
    tuning: ProductTuning,
    gated: bool = False,
    overlapped: bool = False,
) -> None:
    """`out` = `x` [rows, inner] times `weight` [columns, inner] transposed.

    `out` is [rows, columns] for one part, else float32 [parts, rows, columns]. With `gated`, `weight` is
    [2 * columns, inner], gate first, and `out` = silu(gate) * up. `overlapped`: see overlap.py.
    """
    assert x.q.dtype == weight.q.dtype and weight.q.shape[1] == x.q.shape[1]
    launch_product(
        product_kernel,
        out,
        (x.q, x.scale, weight.q, weight.scale),
        sizes=(*x.q.shape, weight.q.shape[0]),
        tuning=tuning,
        gated=gated,
        overlapped=overlapped,
        STEP=tuning.inner,
        SCALED=True,
        IS_WHOLE=x.q.dtype == torch.int8,
        WAITS_LAST=False,
    )


# -- many rows -----------------------------------------------------------------------------------------------


def scaled_matrix_product(out: Tensor, x: ScaledRows, weight: ScaledWeight) -> Tensor:
    """`out` [rows, columns], bfloat16, by torch's product: for more rows than `scaled_product` is made for."""
    if x.q.dtype == torch.int8 or not x.q.is_cuda:
        columns, inner = weight.q.shape
        scaled_product(out, x, weight, tuning=scaled_tuning(MAX_SPLIT_ROWS, columns, inner))
        return out
    return torch._scaled_mm(
        x.q,
        weight.q.T,
        scale_a=x.scale[:, None],
        scale_b=weight.scale[None, :],
        out_dtype=out.dtype,
        use_fast_accum=True,
        out=out,
    )
