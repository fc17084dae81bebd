"""Matrix times one row, with what comes before and after it: the decode step of a single request.

At one row a layer is a chain of small kernels, each shorter than its launch and its first loads. This one takes in
the residual addition and the norm before a product, or the gate after it, so that a layer has two kernels less and
each reads its weights while the norm is computed. Plain multiplications suffice: the memory is the limit.

It must not know the layer. The residual is read by every program and so written elsewhere than it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.overlap import wait_and_announce


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNorm:
    """`residual` + x becomes `new_residual`, and its RMS norm times `weight` is what is multiplied."""

    residual: Tensor  # [inner]
    new_residual: Tensor  # other memory than `residual`
    weight: Tensor
    epsilon: float


def row_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
    overlapped: bool = False,
) -> None:
    """`out` [columns] = `weight` [columns, inner] times `x` [inner]. `overlapped`: see overlap.py.

    With `gated`, `weight` is [2 * columns, inner], gate first, and `out` = silu(gate) * up.
    """
    columns, inner = out.numel(), x.numel()
    assert weight.shape == (columns * (2 if gated else 1), inner) and weight.is_contiguous()
    step, tile, num_warps = _cut(inner, norm is not None)
    assert x.is_contiguous() and out.is_contiguous() and columns % tile == 0
    _row_kernel[(columns // tile,)](
        out,
        x,
        weight,
        norm.residual if norm else x,
        norm.new_residual if norm else x,
        norm.weight if norm else x,
        norm.epsilon if norm else 0.0,
        INNER=inner,
        COLUMNS=columns,
        TILE=tile,
        STEP=step,
        LANES=triton.next_power_of_2(inner),
        HAS_NORM=norm is not None,
        GATED=gated,
        OVERLAPPED=overlapped,
        num_warps=num_warps,
        launch_pdl=overlapped,
    )


def _cut(inner: int, has_norm: bool) -> tuple[int, int, int]:
    """Inner entries per turn, columns per program and warps, by measurements on an H200."""
    if inner < 4096:
        return (512, 2, 2) if has_norm else (1024, 2, 4)
    return (1024, 4, 4) if has_norm else (2048, 4, 4)


@triton.jit
def _row_kernel(
    out,
    x,
    weight,
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
    OVERLAPPED: tl.constexpr,
):
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    step = tl.arange(0, STEP)
    at = weight + column.to(tl.int64)[:, None] * INNER + step[None, :]
    # The first weights are requested before anything is waited for.
    mask = (step < INNER)[None, :]
    w = tl.load(at, mask=mask, other=0.0)
    w_up = tl.load(at + COLUMNS * INNER, mask=mask, other=0.0) if GATED else w
    wait_and_announce(OVERLAPPED)
    inverse = 1.0
    if HAS_NORM:
        lane = tl.arange(0, LANES)
        present = lane < INNER
        total = tl.load(x + lane, mask=present, other=0.0).to(tl.float32)
        total += tl.load(residual + lane, mask=present, other=0.0).to(tl.float32)
        rounded = total.to(new_residual.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(new_residual + lane, rounded, mask=present)
        total = rounded.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(total * total, 0) / INNER + epsilon)

    acc = tl.zeros([TILE, STEP], tl.float32)
    acc_up = tl.zeros([TILE, STEP], tl.float32)
    for start in tl.static_range(0, INNER, STEP):
        mask = start + step < INNER
        xs = tl.load(x + start + step, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            xs += tl.load(residual + start + step, mask=mask, other=0.0).to(tl.float32)
            xs = xs.to(new_residual.dtype.element_ty).to(tl.float32) * inverse
            xs *= tl.load(norm_weight + start + step, mask=mask, other=0.0).to(tl.float32)
            xs = xs.to(x.dtype.element_ty).to(tl.float32)  # as the norm's output is rounded elsewhere
        if start > 0:
            w = tl.load(at + start, mask=mask[None, :], other=0.0)
            w_up = tl.load(at + COLUMNS * INNER + start, mask=mask[None, :], other=0.0) if GATED else w
        acc += w.to(tl.float32) * xs[None, :]
        if GATED:
            acc_up += w_up.to(tl.float32) * xs[None, :]
    result = tl.sum(acc, 1)
    if GATED:
        result = result / (1.0 + tl.exp(-result)) * tl.sum(acc_up, 1)
    tl.store(out + column, result.to(out.dtype.element_ty))
