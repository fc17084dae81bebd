"""Residual addition and layer norm in one pass over the row, as encoders have it: mean and spread of what is summed.

With norms behind the parts of a layer, the norm is the next residual: `out` may be `residual`. With norms before them,
`keeps_sum` leaves the sum in `residual`, which may be of a wider type; the norm is taken of the sum as it is stored. It
must not know the layer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_LANES_PER_WARP = 512


def layer_norm(
    out: Tensor,
    residual: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    epsilon: float,
    keeps_sum: bool = False,
) -> None:
    """`out` [tokens, width] = layer norm of `residual` + `update`, times `weight` plus `bias`."""
    tokens, width = residual.shape
    assert out.is_contiguous() and residual.is_contiguous()
    assert update is None or update.is_contiguous()
    lanes = triton.next_power_of_2(width)
    _norm_kernel[(tokens,)](
        out,
        residual,
        residual if update is None else update,
        weight,
        weight if bias is None else bias,
        epsilon,
        HAS_UPDATE=update is not None,
        HAS_BIAS=bias is not None,
        KEEPS_SUM=keeps_sum,
        WIDTH=width,
        LANES=lanes,
        num_warps=min(16, max(1, lanes // _LANES_PER_WARP)),
    )


@triton.jit
def _norm_kernel(
    out,
    residual,
    update,
    weight,
    bias,
    epsilon,
    HAS_UPDATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEPS_SUM: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    lane = tl.arange(0, LANES)
    mask = lane < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + lane
    x = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        x += tl.load(update + at, mask=mask, other=0.0).to(tl.float32)
    if KEEPS_SUM:
        stored = x.to(residual.dtype.element_ty)
        tl.store(residual + at, stored, mask=mask)
        x = stored.to(tl.float32)
    x = tl.where(mask, x - tl.sum(x, 0) / WIDTH, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon)
    x = x * tl.load(weight + lane, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + lane, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, x.to(out.dtype.element_ty), mask=mask)
