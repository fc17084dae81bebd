"""Residual addition and RMS norm in one pass over the row.

The update may come in several float32 parts, as products whose inner dimension was split leave it
(`skinny_product`): they are summed here in a fixed order, so that nothing needs atomics. The norm is taken of the
sum as it is stored, so that the two outputs agree.

The norm may be written in eight bits with a scale per row, for products that take such rows (scaled_rows.py).

It must not know the layer. Where a model adds one to its norm's weights, they come here with it added.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.overlap import wait_and_announce
from paceline.runner.gpu.kernels.scaled_rows import ScaledRows, as_eight_bits, row_scale

_LANES_PER_WARP = 512


def residual_norm(
    out: Tensor | ScaledRows,
    residual: Tensor,
    update: Tensor | None,
    weight: Tensor,
    *,
    epsilon: float,
    overlapped: bool = False,
) -> None:
    """`residual` [tokens, width] += `update` in place, then `out` = its RMS norm times `weight`.

    `update` is [tokens, width], or [parts, tokens, width] to be summed; without it only the norm is computed.
    `overlapped`: see overlap.py.
    """
    tokens, width = residual.shape
    normed = out.q if isinstance(out, ScaledRows) else out
    assert normed.stride(1) == 1 and residual.stride(1) == 1
    parts = 0 if update is None else 1 if update.dim() == 2 else update.shape[0]
    source = residual if update is None else update
    lanes = triton.next_power_of_2(width)
    _norm_kernel[(tokens,)](
        normed,
        out.scale if isinstance(out, ScaledRows) else out,
        residual,
        source,
        weight,
        normed.stride(0),
        residual.stride(0),
        source.stride(-2),
        source.stride(0) if source.dim() == 3 else 0,
        epsilon,
        PARTS=parts,
        WIDTH=width,
        LANES=lanes,
        SCALED=isinstance(out, ScaledRows),
        OVERLAPPED=overlapped,
        num_warps=min(16, max(1, lanes // _LANES_PER_WARP)),
        launch_pdl=overlapped,
    )


@triton.jit
def _norm_kernel(
    out,
    out_scale,
    residual,
    update,
    weight,
    out_stride,
    residual_stride,
    update_stride,
    part_stride,
    epsilon,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = lane < WIDTH
    scale = tl.load(weight + lane, mask=mask, other=0.0).to(tl.float32)
    wait_and_announce(OVERLAPPED)
    into = residual + token * residual_stride + lane
    x = tl.load(into, mask=mask, other=0.0).to(tl.float32)
    if PARTS > 0:
        total = tl.zeros([LANES], tl.float32)
        for part in tl.static_range(PARTS):
            at = update + part * part_stride + token * update_stride + lane
            total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        rounded = (x + total).to(residual.dtype.element_ty)
        tl.store(into, rounded, mask=mask)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x = x * inverse * scale
    if SCALED:
        of_row = row_scale(x, out.dtype.element_ty)
        tl.store(out_scale + token, of_row)
        x = as_eight_bits(x * (1.0 / of_row), out.dtype.element_ty)
    tl.store(out + token * out_stride + lane, x.to(out.dtype.element_ty), mask=mask)
