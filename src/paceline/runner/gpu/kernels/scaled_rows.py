"""Rows of eight bits with a scale each: what products of quantised weights take in, made where the rows are made.

A row is its numbers times its scale; the largest of them becomes the largest that eight bits hold (448 in e4m3, 127 in
int8). The scale follows from the row alone, so that a token's numbers do not depend on its neighbours. A row with a
number that is not finite gets a scale that is none either, and so do its products: the step finds it.

It must not know the layer. `residual_norm` and `gated_activation` write such rows themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.overlap import wait_and_announce

EIGHT_BITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest number of each type
_LANES_PER_WARP = 512


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """`q` [rows, width] of eight bits times `scale` [rows], float32."""

    q: Tensor
    scale: Tensor

    def __len__(self) -> int:
        return len(self.q)

    def first(self, count: int) -> ScaledRows:
        return ScaledRows(self.q[:count], self.scale[:count])


def allocate_scaled_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> ScaledRows:
    return ScaledRows(torch.zeros(rows, width, dtype=dtype, device=device), torch.zeros(rows, device=device))


def quantize_rows(out: ScaledRows, x: Tensor, *, overlapped: bool = False) -> None:
    """`out` = `x` [rows, width]. `overlapped`: see overlap.py."""
    rows, width = x.shape
    assert out.q.shape == x.shape and out.q.is_contiguous() and x.stride(1) == 1
    lanes = triton.next_power_of_2(width)
    _quantize_kernel[(rows,)](
        out.q,
        out.scale,
        x,
        x.stride(0),
        WIDTH=width,
        LANES=lanes,
        OVERLAPPED=overlapped,
        num_warps=min(16, max(1, lanes // _LANES_PER_WARP)),
        launch_pdl=overlapped,
    )


@triton.jit
def _quantize_kernel(
    out, out_scale, x, x_stride, WIDTH: tl.constexpr, LANES: tl.constexpr, OVERLAPPED: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    mask = lane < WIDTH
    wait_and_announce(OVERLAPPED)
    values = tl.load(x + row * x_stride + lane, mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(values, out.dtype.element_ty)
    tl.store(out + row * WIDTH + lane, as_eight_bits(values * (1.0 / scale), out.dtype.element_ty), mask=mask)
    tl.store(out_scale + row, scale)


@triton.jit
def row_scale(values, KIND: tl.constexpr):
    """The scale of a row of float32 numbers; of a row that is not finite, NaN."""
    largest = tl.max(tl.abs(values), 0)
    return finite_scale(largest, tl.sum(values * 0.0, 0), KIND)


@triton.jit
def finite_scale(largest, doubt, KIND: tl.constexpr):
    """Of the largest number, and of a sum that is zero where all are finite."""
    most = 448.0 if tl.float8e4nv == KIND else 127.0
    return tl.maximum(largest, 1e-20) / most + doubt


@triton.jit
def as_eight_bits(scaled, KIND: tl.constexpr):
    """Numbers over their scale, rounded to the nearest of eight bits."""
    if tl.float8e4nv == KIND:
        return tl.clamp(scaled, -448.0, 448.0).to(KIND)
    # Adding and taking off 1.5 * 2^23 rounds to the nearest whole number, ties to the even one.
    whole = (scaled + 12582912.0) - 12582912.0
    return tl.clamp(whole, -127.0, 127.0).to(KIND)
