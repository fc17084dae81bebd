"""The activation between the two products of an encoder's feed-forward part, with a gate or without one.

The Gaussian unit is exact where a model was trained with it: the error function, not its tanh form. Decoders have
`gated_product`, which knows no error function and stores less. It must not know the layer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024
_KINDS = ("silu", "gelu_tanh", "gelu")


def inner_activation(out: Tensor, product: Tensor, *, activation: str) -> None:
    """`out` [tokens, width] of `product` [tokens, width], or of [tokens, 2 * width], gate first. Without a gate `out`
    may be `product`."""
    tokens, width = out.shape
    gated = product.shape[1] == 2 * width
    assert gated or product.shape[1] == width
    assert product.is_contiguous() and out.is_contiguous()
    _activate_kernel[(tokens, triton.cdiv(width, _COLUMNS))](
        out,
        product,
        WIDTH=width,
        COLUMNS=_COLUMNS,
        GATED=gated,
        KIND=_KINDS.index(activation),
        num_warps=4,
    )


@triton.jit
def _activate_kernel(
    out, product, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    at = product + token * (2 * WIDTH if GATED else WIDTH) + column
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if KIND == 0:
        x = x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        # x * sigmoid(2 z), the same as x / 2 * (1 + tanh(z)); exp of a large -2z is infinite and fine
        x = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if GATED:
        x *= tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, x.to(out.dtype.element_ty), mask=mask)
