"""The small kernels between products, and products of our own, against their definitions; also interpreted."""

from __future__ import annotations

import torch

from paceline.runner.gpu.kernels.gated_product import Activation, gated_activation, gated_product
from paceline.runner.gpu.kernels.residual_norm import residual_norm
from paceline.runner.gpu.kernels.skinny_product import ProductTuning, skinny_product
from tests.gpu.kernel_cases import Shape, assert_close
from tests.gpu.kernel_references import (
    reference_gated_activation,
    reference_gated_product,
    reference_residual_norm,
    reference_skinny_product,
)

NAN = float("nan")


def check_residual_norm(shape: Shape, tokens: int, width: int, *, parts: int) -> None:
    """`parts` 0: nothing to add; 1: an update; more: an update in parts, which are float32."""
    residual, weight = shape.random(tokens, width), shape.random(width)
    update = None
    if parts == 1:
        update = shape.random(tokens, width)
    elif parts:
        update = torch.randn(parts, tokens, width, device=shape.device)
    norm, total = reference_residual_norm(residual, update, weight, epsilon=1e-6)
    out = torch.full_like(residual, NAN)
    residual_norm(out, residual, update, weight, epsilon=1e-6)
    assert_close(out, norm, shape.tolerance)
    assert_close(residual, total, shape.tolerance)


def check_gated_activation(shape: Shape, tokens: int, width: int, activation: Activation) -> None:
    product = shape.random(tokens, 2 * width) * 5
    product[0, :3] = torch.tensor([-300.0, 300.0, 0.0])
    out = torch.full((tokens, width), NAN, device=shape.device, dtype=shape.dtype)
    gated_activation(out, product, activation=activation)
    assert_close(out, reference_gated_activation(product, activation=activation), shape.tolerance)


def check_skinny_product(
    shape: Shape, rows: int, columns: int, inner: int, tuning: ProductTuning, *, gated: bool = False
) -> None:
    """Whole, or in parts that are summed elsewhere."""
    x, weight = shape.random(rows, inner), shape.random(columns * (2 if gated else 1), inner)
    if gated:
        weight *= inner**-0.5  # gates near 1: neither all nothing nor all open
    whole = tuning.parts == 1
    sizes = (rows, columns) if whole else (tuning.parts, rows, columns)
    out = torch.full(sizes, NAN, device=shape.device, dtype=shape.dtype if whole else torch.float32)
    skinny_product(out, x, weight, tuning=tuning, gated=gated)
    expected = reference_skinny_product(x, weight, gated=gated)
    assert_close(out if whole else out.sum(0), expected, shape.tolerance)


def check_gated_product(
    shape: Shape, tokens: int, columns: int, inner: int, activation: Activation = "silu"
) -> None:
    """Rows beyond the tokens stay as they are, though tiles reach over them."""
    x, weight = shape.random(tokens, inner), shape.random(2 * columns, inner) * inner**-0.5
    out = torch.full((tokens + 3, columns), NAN, device=shape.device, dtype=shape.dtype)
    gated_product(out[:tokens], x, weight, activation=activation)
    expected = reference_gated_product(x, weight, activation=activation)
    assert_close(out[:tokens], expected, shape.tolerance)
    assert out[tokens:].isnan().all()
