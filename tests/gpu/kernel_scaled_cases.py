"""Rows and products of eight bits against their definitions; also interpreted."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.runner.gpu.device_layers import packed, packed_of, quantized
from paceline.runner.gpu.kernels.block_product import (
    BlockWeight,
    block_product,
    block_tuning,
    unpack_blocks,
)
from paceline.runner.gpu.kernels.gated_product import Activation, gated_rows
from paceline.runner.gpu.kernels.packed_product import packed_product, unpack
from paceline.runner.gpu.kernels.residual_norm import residual_norm
from paceline.runner.gpu.kernels.row_product import RowNorm, RowTuning, row_product
from paceline.runner.gpu.kernels.scaled_product import ScaledWeight, scaled_matrix_product, scaled_product
from paceline.runner.gpu.kernels.scaled_rows import (
    EIGHT_BITS,
    ScaledRows,
    allocate_scaled_rows,
    quantize_rows,
)
from paceline.runner.gpu.kernels.skinny_product import ProductTuning
from tests.gpu.kernel_cases import Shape, assert_close
from tests.gpu.kernel_references import (
    reference_gated_activation,
    reference_packed,
    reference_residual_norm,
    reference_scaled_product,
    reference_scaled_row_product,
    reference_scaled_rows,
    reference_skinny_product,
)

NAN = float("nan")


def assert_rows(found: ScaledRows, exact: Tensor) -> None:
    """Scales are those of the definition, and numbers the nearest ones, or the next where two are about as near."""
    expected = reference_scaled_rows(exact, found.q.dtype)
    assert_close(found.scale, expected.scale, 1e-5)
    scaled = exact.double() / expected.scale.double()[:, None]
    further = (found.q.double() - scaled).abs() - (expected.q.double() - scaled).abs()
    assert (further <= 1e-3 * (1 + scaled.abs())).all(), f"{float(further.max())} further than the nearest"


def rows_of(shape: Shape, rows: int, width: int, dtype: torch.dtype) -> ScaledRows:
    return allocate_scaled_rows(rows, width, dtype, torch.device(shape.device))


def check_quantize_rows(shape: Shape, rows: int, width: int, dtype: torch.dtype) -> None:
    x = shape.random(rows, width)
    x[0] = 0.0
    x[-1] *= 1000.0
    out = rows_of(shape, rows, width, dtype)
    quantize_rows(out, x)
    assert_rows(out, x)
    assert (out.q[0].float() == 0).all()
    assert out.q[-1].float().abs().max() == EIGHT_BITS[dtype]


def check_rows_that_are_not_finite(shape: Shape, dtype: torch.dtype) -> None:
    """A NaN or an infinity takes its row with it, and no other."""
    x = shape.random(4, 96)
    x[1, 5], x[3, 90] = NAN, float("inf")
    out = rows_of(shape, 4, 96, dtype)
    quantize_rows(out, x)
    assert out.scale.isfinite().tolist() == [True, False, True, False]
    weight = quantized(shape.random(32, 96), dtype)
    product = torch.zeros(4, 32, device=shape.device, dtype=shape.dtype)
    scaled_product(product, out, weight, tuning=ProductTuning(columns=16, inner=32))
    assert product.isfinite().all(dim=1).tolist() == [True, False, True, False]


def check_norm_of_eight_bits(
    shape: Shape, tokens: int, width: int, dtype: torch.dtype, *, parts: int
) -> None:
    residual, weight = shape.random(tokens, width), shape.random(width)
    update = torch.randn(parts, tokens, width, device=shape.device) if parts else None
    norm, total = reference_residual_norm(residual, update, weight, epsilon=1e-6)
    out = rows_of(shape, tokens, width, dtype)
    residual_norm(out, residual, update, weight, epsilon=1e-6)
    assert_rows(out, norm)
    assert_close(residual, total, shape.tolerance)


def check_gated_rows(
    shape: Shape, tokens: int, width: int, dtype: torch.dtype, activation: Activation = "silu"
) -> None:
    product = shape.random(tokens, 2 * width) * 3
    out = rows_of(shape, tokens, width, dtype)
    gated_rows(out, product, activation=activation)
    assert_rows(out, reference_gated_activation(product, activation=activation))


def _factors(
    shape: Shape, rows: int, columns: int, inner: int, dtype: torch.dtype
) -> tuple[ScaledRows, ScaledWeight]:
    """Rows and weights whose scales differ from row to row."""
    x = shape.random(rows, inner) * torch.rand(rows, 1, device=shape.device).to(shape.dtype)
    weight = shape.random(columns, inner) * torch.rand(columns, 1, device=shape.device).to(shape.dtype)
    return reference_scaled_rows(x, dtype), quantized(weight * inner**-0.5, dtype)


def check_scaled_product(
    shape: Shape, rows: int, columns: int, inner: int, tuning: ProductTuning | None, dtype: torch.dtype
) -> None:
    """Whole, in parts that are summed elsewhere, or (without a tuning) by the product for many rows."""
    x, weight = _factors(shape, rows, columns, inner, dtype)
    whole = tuning is None or tuning.parts == 1
    sizes = (rows, columns) if tuning is None or whole else (tuning.parts, rows, columns)
    out = torch.full(sizes, NAN, device=shape.device, dtype=shape.dtype if whole else torch.float32)
    if tuning is None:
        scaled_matrix_product(out, x, weight)
    else:
        scaled_product(out, x, weight, tuning=tuning)
    assert_close(out if whole else out.sum(0), reference_scaled_product(x, weight), shape.tolerance)


def check_gated_scaled_product(
    shape: Shape, rows: int, columns: int, inner: int, tuning: ProductTuning, dtype: torch.dtype
) -> None:
    x, weight = _factors(shape, rows, 2 * columns, inner, dtype)
    out = torch.full((rows, columns), NAN, device=shape.device, dtype=shape.dtype)
    scaled_product(out, x, weight, tuning=tuning, gated=True)
    assert_close(out, reference_scaled_product(x, weight, gated=True), shape.tolerance)


def check_scaled_row_product(
    shape: Shape,
    columns: int,
    inner: int,
    dtype: torch.dtype,
    *,
    has_norm: bool,
    gated: bool,
    tuning: RowTuning | None = None,
) -> None:
    x, residual, norm_weight = (shape.random(inner) for _ in range(3))
    _, weight = _factors(shape, 1, columns * (2 if gated else 1), inner, dtype)
    norm = None
    if has_norm:
        new = torch.full_like(residual, NAN)
        norm = RowNorm(residual=residual, new_residual=new, weight=norm_weight, epsilon=1e-6)
    out = torch.full((columns,), NAN, dtype=shape.dtype, device=shape.device)
    row_product(out, x, weight, norm=norm, gated=gated, tuning=tuning)
    expected, total = reference_scaled_row_product(x, weight, norm=norm, gated=gated)
    assert_close(out, expected, shape.tolerance)
    if norm is not None:
        assert_close(norm.new_residual, total, shape.tolerance)


# -- four bits -----------------------------------------------------------------------------------------------


def check_packed_product(
    shape: Shape,
    rows: int,
    columns: int,
    inner: int,
    group: int,
    tuning: ProductTuning,
    *,
    gated: bool = False,
) -> None:
    """The product, and the matrix unpacked, against numbers, scales and offsets."""
    total = columns * (2 if gated else 1)
    numbers = torch.randint(0, 16, (total, inner), dtype=torch.uint8, device=shape.device)
    scale = (torch.rand(total, inner // group, device=shape.device) + 0.1) * inner**-0.5 / 5
    offset = -scale * torch.randint(1, 15, scale.shape, device=shape.device)
    weight = packed_of(numbers, scale, offset, shape.dtype)
    assert weight is not None and weight.shape == (total, inner)
    expected = reference_packed(numbers, scale.to(shape.dtype), offset.to(shape.dtype))
    dense = torch.full((total, inner), NAN, device=shape.device, dtype=shape.dtype)
    unpack(dense, weight)
    if shape.dtype == torch.float32:  # its sums are not exact
        assert_close(dense, expected, 1e-6)
    else:
        assert torch.equal(dense, expected.to(shape.dtype))
    x = shape.random(rows, inner)
    sizes = (rows, columns) if tuning.parts == 1 else (tuning.parts, rows, columns)
    out = torch.full(sizes, NAN, device=shape.device, dtype=shape.dtype if len(sizes) == 2 else torch.float32)
    packed_product(out, x, weight, tuning=tuning, gated=gated)
    right = reference_skinny_product(x, expected.to(shape.dtype), gated=gated)
    assert_close(out if len(sizes) == 2 else out.sum(0), right, shape.tolerance)


def check_packing(shape: Shape, columns: int, inner: int) -> None:
    """Four bits of a matrix come as close as a group's range allows, and closer than the whole range would."""
    matrix = shape.random(columns, inner)
    weight = packed(matrix, shape.dtype)
    dense = torch.empty_like(matrix)
    unpack(dense, weight)
    grouped = matrix.double().view(columns, -1, weight.group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = low + ((grouped - low) / step).round() * step
    error, whole = (
        float((part.double().view_as(grouped) - grouped).square().mean()) for part in (dense, plain)
    )
    assert 0 < error < whole


def check_block_product(
    shape: Shape,
    rows: int,
    columns: int,
    inner: int,
    group: int,
    *,
    narrow: bool = False,
    gated: bool = False,
) -> None:
    """The product, and the matrix unpacked, of e4m3 with a scale per group of inputs."""
    total = columns * (2 if gated else 1)
    q = (shape.random(total, inner) * 40).float().clamp(-448, 448).to(torch.float8_e4m3fn)
    # Beyond normal numbers, and the largest.
    q[0, :3] = torch.tensor([2.0**-9, -(2.0**-8), 448.0]).to(q.dtype)
    scale = (torch.rand(inner // group, total, device=shape.device) + 0.1) * inner**-0.5 / 40
    weight = BlockWeight(q, scale)
    exact = q.double() * scale.double().T.repeat_interleave(group, dim=1)
    dense = torch.full((total, inner), NAN, device=shape.device, dtype=shape.dtype)
    unpack_blocks(dense, weight)
    assert_close(dense, exact, shape.tolerance)
    x = shape.random(rows, inner)
    tuning = block_tuning(rows, columns, inner, group, narrow=narrow)
    sizes = (rows, columns) if tuning.parts == 1 else (tuning.parts, rows, columns)
    out = torch.full(sizes, NAN, device=shape.device, dtype=shape.dtype if len(sizes) == 2 else torch.float32)
    block_product(out, x, weight, tuning=tuning, gated=gated)
    right = reference_skinny_product(x, exact, gated=gated)
    assert_close(out if len(sizes) == 2 else out.sum(0), right, shape.tolerance)
