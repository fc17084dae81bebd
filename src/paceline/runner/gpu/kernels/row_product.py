"""Matrix times one row, with what comes before and after it: the decode step of a single request.

At one row a layer is a chain of small kernels, each shorter than its launch and its first loads. This one takes in
the residual addition and the norm before a product, or the gate after it, so that a layer has two kernels less and
each reads its weights while the norm is computed. Plain multiplications suffice: the memory is the limit.

With weights of eight bits the row comes as it was computed and is rounded to eight bits here, after the norm if there
is one: every program does it for itself, which costs less than a kernel between two others. So one row alone gets the
numbers that it gets beside others.

It must not know the layer. The residual is read by every program and so written elsewhere than it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.overlap import wait_and_announce
from paceline.runner.gpu.kernels.scaled_product import ScaledWeight
from paceline.runner.gpu.kernels.scaled_rows import as_eight_bits, row_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNorm:
    """`residual` + x becomes `new_residual`, and its RMS norm times `weight` is what is multiplied."""

    residual: Tensor  # [inner]
    new_residual: Tensor  # other memory than `residual`
    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTuning:
    """Inner entries per turn and columns per program."""

    step: int
    columns: int
    num_warps: int = 4


def row_tuning(inner: int, *, has_norm: bool) -> RowTuning:
    """How a product is cut, by measurements on an H200."""
    if inner < 4096:
        return RowTuning(step=512, columns=2, num_warps=2) if has_norm else RowTuning(step=1024, columns=2)
    return RowTuning(step=1024 if has_norm else 2048, columns=4)


def scaled_row_tuning(columns: int, inner: int) -> RowTuning:
    """The same with weights of eight bits."""
    tile = next(tile for tile in (4, 2, 1) if columns % tile == 0)
    if inner < 4096:
        return RowTuning(step=min(1024, triton.next_power_of_2(inner)), columns=min(tile, 2))
    return RowTuning(step=2048, columns=tile)


def row_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor | ScaledWeight,
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
    overlapped: bool = False,
    tuning: RowTuning | None = None,
) -> None:
    """`out` [columns] = `weight` [columns, inner] times `x` [inner], which is rounded to eight bits if the weights are.

    With `gated`, `weight` is [2 * columns, inner], gate first, and `out` = silu(gate) * up. `overlapped`: see
    overlap.py.
    """
    columns, inner, scaled = out.numel(), x.numel(), isinstance(weight, ScaledWeight)
    q, scale = (weight.q, weight.scale) if isinstance(weight, ScaledWeight) else (weight, x)
    assert q.shape == (columns * (2 if gated else 1), inner) and q.is_contiguous()
    chosen = scaled_row_tuning(columns, inner) if scaled else row_tuning(inner, has_norm=norm is not None)
    cut = tuning or chosen
    assert x.is_contiguous() and out.is_contiguous() and columns % cut.columns == 0
    _row_kernel[(columns // cut.columns,)](
        out,
        x,
        q,
        scale,
        norm.residual if norm else x,
        norm.new_residual if norm else x,
        norm.weight if norm else x,
        norm.epsilon if norm else 0.0,
        INNER=inner,
        COLUMNS=columns,
        TILE=cut.columns,
        STEP=cut.step,
        LANES=triton.next_power_of_2(inner),
        HAS_NORM=norm is not None,
        GATED=gated,
        SCALED=scaled,
        OVERLAPPED=overlapped,
        num_warps=cut.num_warps,
        launch_pdl=overlapped,
    )


@triton.jit
def _row_kernel(
    out,
    x,
    weight,
    weight_scale,
    residual,
    new_residual,
    norm_weight,
    epsilon,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    LANES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    KIND: tl.constexpr = weight.dtype.element_ty
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    step = tl.arange(0, STEP)
    at = weight + column.to(tl.int64)[:, None] * INNER + step[None, :]
    # The first weights are requested before anything is waited for.
    mask = (step < INNER)[None, :]
    w = tl.load(at, mask=mask, other=0.0)
    w_up = tl.load(at + COLUMNS * INNER, mask=mask, other=0.0) if GATED else w
    if SCALED:
        scale = tl.load(weight_scale + column)
        up_scale = tl.load(weight_scale + COLUMNS + column) if GATED else scale
    wait_and_announce(OVERLAPPED)
    inverse = 1.0
    if HAS_NORM or SCALED:
        lane = tl.arange(0, LANES)
        present = lane < INNER
        total = tl.load(x + lane, mask=present, other=0.0).to(tl.float32)
        if HAS_NORM:
            total += tl.load(residual + lane, mask=present, other=0.0).to(tl.float32)
            rounded = total.to(new_residual.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(new_residual + lane, rounded, mask=present)
            total = rounded.to(tl.float32)
            inverse = tl.rsqrt(tl.sum(total * total, 0) / INNER + epsilon)
        if SCALED:
            if HAS_NORM:
                total = total * inverse * tl.load(norm_weight + lane, mask=present, other=0.0).to(tl.float32)
            of_row = row_scale(total, KIND)
            stretch = 1.0 / of_row

    acc = tl.zeros([TILE, STEP], tl.float32)
    acc_up = tl.zeros([TILE, STEP], tl.float32)
    for start in tl.static_range(0, INNER, STEP):
        mask = start + step < INNER
        xs = tl.load(x + start + step, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            xs += tl.load(residual + start + step, mask=mask, other=0.0).to(tl.float32)
            xs = xs.to(new_residual.dtype.element_ty).to(tl.float32) * inverse
            xs *= tl.load(norm_weight + start + step, mask=mask, other=0.0).to(tl.float32)
            if not SCALED:
                xs = xs.to(x.dtype.element_ty).to(tl.float32)  # as the norm's output is rounded elsewhere
        if SCALED:
            xs = as_eight_bits(xs * stretch, KIND).to(tl.float32)
        if start > 0:
            w = tl.load(at + start, mask=mask[None, :], other=0.0)
            w_up = tl.load(at + COLUMNS * INNER + start, mask=mask[None, :], other=0.0) if GATED else w
        acc += w.to(tl.float32) * xs[None, :]
        if GATED:
            acc_up += w_up.to(tl.float32) * xs[None, :]
    result, up = tl.sum(acc, 1), tl.sum(acc_up, 1)
    if SCALED:
        result *= scale * of_row
        up *= up_scale * of_row
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * up
    tl.store(out + column, result.to(out.dtype.element_ty))
