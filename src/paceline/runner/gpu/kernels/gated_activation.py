"""activation(gate) * up, from the product that has the gate's columns first and the other half after them.

SwiGLU (sigmoid linear unit) and GeGLU (the tanh form of the Gaussian one); float32 between load and rounding.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.overlap import wait_and_announce

Activation = Literal["silu", "gelu_tanh"]
_COLUMNS = 1024


def gated_activation(
    out: Tensor, product: Tensor, *, activation: Activation = "silu", overlapped: bool = False
) -> None:
    """`out` [tokens, width] of `product` [tokens, 2 * width]. `overlapped`: see overlap.py."""
    tokens, width = out.shape
    assert product.shape[1] == 2 * width and product.stride(1) == 1 and out.stride(1) == 1
    _gate_kernel[(tokens, triton.cdiv(width, _COLUMNS))](
        out,
        product,
        product.stride(0),
        out.stride(0),
        WIDTH=width,
        COLUMNS=_COLUMNS,
        IS_SILU=activation == "silu",
        OVERLAPPED=overlapped,
        num_warps=4,
        launch_pdl=overlapped,
    )


@triton.jit(do_not_specialize=["product_stride", "out_stride"])
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


def reference_gated_activation(product: Tensor, *, activation: Activation = "silu") -> Tensor:
    """The definition in float64."""
    gate, up = product.double().chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up
