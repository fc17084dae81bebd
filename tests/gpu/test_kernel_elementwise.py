"""KV write with rope and norms, residual norm, gated activation and the skinny product on the card."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.kernels.gated_activation import Activation, gated_activation, reference_gated_activation
from paceline.kernels.residual_norm import reference_residual_norm, residual_norm
from paceline.kernels.skinny_product import (
    ProductTuning,
    gated_tuning,
    narrow_tuning,
    reference_skinny_product,
    skinny_product,
    wide_tuning,
)
from tests.gpu import kernel_cases as cases

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "kv_heads, group, head_dim", [(8, 2, 128), (8, 4, 128), (3, 3, 64), (1, 4, 256), (2, 2, 96)]
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_kv_write(kv_heads: int, group: int, head_dim: int, has_norm: bool) -> None:
    shape = cases.Shape(device="cuda", dtype=BF16, kv_heads=kv_heads, group=group, head_dim=head_dim)
    for rotary_dim in (head_dim, head_dim // 2):
        for tokens in (1, 333):
            cases.check_rope_kv_write(shape, tokens, rotary_dim=rotary_dim, has_norm=has_norm)


def test_kv_write_into_a_pool_beyond_two_to_the_31_elements() -> None:
    blocks = 2**31 // (8 * 64 * 128) + 100
    shape = cases.Shape(device="cuda", dtype=BF16, kv_heads=8, head_dim=128, num_blocks=blocks)
    cases.check_rope_kv_write(shape, 100, rotary_dim=128, has_norm=True)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tokens, width", [(1, 1024), (300, 4096), (7, 576), (5, 5120)])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_residual_and_norm(tokens: int, width: int, parts: int) -> None:
    residual = torch.randn(tokens, width, device="cuda").to(BF16)
    weight = torch.randn(width, device="cuda").to(BF16)
    update = None
    if parts == 1:
        update = torch.randn(tokens, width, device="cuda").to(BF16)
    elif parts:
        update = torch.randn(parts, tokens, width, device="cuda")
    norm, total = reference_residual_norm(residual, update, weight, epsilon=1e-6)
    out = torch.full_like(residual, float("nan"))
    residual_norm(out, residual, update, weight, epsilon=1e-6)
    cases.assert_close(out, norm, 1e-2)
    cases.assert_close(residual, total, 1e-2)


@pytest.mark.parametrize("tokens, width", [(1, 3072), (300, 14336), (9, 1536)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(tokens: int, width: int, activation: Activation) -> None:
    product = (torch.randn(tokens, 2 * width, device="cuda") * 5).to(BF16)
    product[0, :3] = torch.tensor([-300.0, 300.0, 0.0])
    out = torch.full((tokens, width), float("nan"), device="cuda", dtype=BF16)
    gated_activation(out, product, activation=activation)
    cases.assert_close(out, reference_gated_activation(product, activation=activation), 1e-2)


@pytest.mark.parametrize("rows", [1, 7, 16, 30, 64])
@pytest.mark.parametrize(
    "columns, inner",
    [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (4096, 14336), (6144, 4096)],
)
def test_skinny_product(rows: int, columns: int, inner: int) -> None:
    x = torch.randn(rows, inner, device="cuda").to(BF16)
    weight = torch.randn(columns, inner, device="cuda").to(BF16)
    plain = ProductTuning(columns=64, inner=128)
    tunings = [narrow_tuning(columns, inner), wide_tuning(rows, columns, inner), plain]
    for tuning in tunings:
        if tuning is None:
            continue
        whole = tuning.parts == 1
        sizes = (rows, columns) if whole else (tuning.parts, rows, columns)
        out = torch.full(sizes, float("nan"), device="cuda", dtype=BF16 if whole else torch.float32)
        skinny_product(out, x, weight, tuning=tuning)
        found = out if whole else out.sum(0)
        cases.assert_close(found, reference_skinny_product(x, weight), 1e-2)


@pytest.mark.parametrize("rows", [2, 16, 17, 33, 64])
@pytest.mark.parametrize("columns, inner", [(14336, 4096), (3072, 1024)])
def test_gated_skinny_product(rows: int, columns: int, inner: int) -> None:
    x = torch.randn(rows, inner, device="cuda").to(BF16)
    weight = (torch.randn(2 * columns, inner, device="cuda") / 64).to(BF16)
    tuning = gated_tuning(rows, columns, inner)
    assert tuning is not None
    out = torch.full((rows, columns), float("nan"), device="cuda", dtype=BF16)
    skinny_product(out, x, weight, tuning=tuning, gated=True)
    cases.assert_close(out, reference_skinny_product(x, weight, gated=True), 1e-2)


@pytest.mark.parametrize("columns, inner", [(4096, 1024), (1024, 3072), (1000, 576), (6144, 4096)])
@pytest.mark.parametrize("has_norm, gated", [(False, False), (True, False), (True, True), (False, True)])
def test_row_product(columns: int, inner: int, has_norm: bool, gated: bool) -> None:
    shape = cases.Shape(device="cuda", dtype=BF16)
    cases.check_row_product(shape, columns, inner, has_norm=has_norm, gated=gated)
