"""KV write with rope and norms, residual norm, gated activation and products of our own on the card."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.runner.gpu.kernels.gated_product import Activation
from paceline.runner.gpu.kernels.skinny_product import (
    ProductTuning,
    gated_tuning,
    narrow_tuning,
    small_tuning,
    wide_tuning,
)
from tests.gpu import kernel_cases as cases
from tests.gpu import kernel_small_cases as small

BF16 = torch.bfloat16
PLAIN = cases.Shape(device="cuda", dtype=BF16)


@pytest.mark.parametrize(
    "kv_heads, group, head_dim", [(8, 2, 128), (8, 4, 128), (3, 3, 64), (1, 4, 256), (2, 2, 96)]
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_kv_write(kv_heads: int, group: int, head_dim: int, has_norm: bool) -> None:
    shape = cases.Shape(device="cuda", dtype=BF16, kv_heads=kv_heads, group=group, head_dim=head_dim)
    for rotary_dim in (head_dim, head_dim // 2):
        for tokens in (1, 333):
            cases.check_rope_kv_write(shape, tokens, rotary_dim=rotary_dim, has_norm=has_norm)


@pytest.mark.parametrize("kv_heads, head_dim", [(8, 128), (3, 64), (1, 256), (2, 96)])
def test_placed_keys_are_turned(kv_heads: int, head_dim: int) -> None:
    shape = cases.Shape(device="cuda", dtype=BF16, kv_heads=kv_heads, head_dim=head_dim)
    for rotary_dim in (head_dim, head_dim // 2):
        for tokens in (1, 1111):
            cases.check_place_kv(shape, tokens, rotary_dim=rotary_dim)


def test_placing_in_a_pool_beyond_two_to_the_31_elements() -> None:
    blocks = 2**31 // (8 * 64 * 128) + 100
    shape = cases.Shape(device="cuda", dtype=BF16, kv_heads=8, head_dim=128, num_blocks=blocks)
    cases.check_place_kv(shape, 100, rotary_dim=128)
    torch.cuda.empty_cache()


def test_kv_write_into_a_pool_beyond_two_to_the_31_elements() -> None:
    blocks = 2**31 // (8 * 64 * 128) + 100
    shape = cases.Shape(device="cuda", dtype=BF16, kv_heads=8, head_dim=128, num_blocks=blocks)
    cases.check_rope_kv_write(shape, 100, rotary_dim=128, has_norm=True)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tokens, width", [(1, 1024), (300, 4096), (7, 576), (5, 5120)])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_residual_and_norm(tokens: int, width: int, parts: int) -> None:
    small.check_residual_norm(PLAIN, tokens, width, parts=parts)


@pytest.mark.parametrize("tokens, width", [(1, 3072), (300, 14336), (9, 1536)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(tokens: int, width: int, activation: Activation) -> None:
    small.check_gated_activation(PLAIN, tokens, width, activation)


@pytest.mark.parametrize("rows", [1, 7, 16, 30, 64])
@pytest.mark.parametrize(
    "columns, inner",
    [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024), (4096, 14336), (6144, 4096)],
)
def test_skinny_product(rows: int, columns: int, inner: int) -> None:
    plain = ProductTuning(columns=64, inner=128)
    tunings = [narrow_tuning(columns, inner), wide_tuning(rows, columns, inner), plain]
    for tuning in tunings:
        if tuning is not None:
            small.check_skinny_product(PLAIN, rows, columns, inner, tuning)


@pytest.mark.parametrize("rows", [1, 2, 16, 40, 64])
@pytest.mark.parametrize(
    "columns, inner", [(960, 1152), (384, 1152), (576, 1728), (576, 576), (576, 1536), (8192, 576)]
)
def test_products_of_a_head(rows: int, columns: int, inner: int) -> None:
    for splits in (False, True):
        tuning = small_tuning(columns, inner, splits=splits)
        assert tuning is not None
        small.check_skinny_product(PLAIN, rows, columns, inner, tuning)
    gated = small_tuning(1536, 576)
    assert gated is not None
    small.check_skinny_product(PLAIN, rows, 1536, 576, gated, gated=True)


@pytest.mark.parametrize(
    "columns, inner, rows",
    [
        *((14336, 4096, rows) for rows in (2, 16, 17, 33, 64)),
        *((3072, 1024, rows) for rows in (2, 16, 17, 33, 64, 65, 128, 200, 256)),
    ],
)
def test_gated_skinny_product(columns: int, inner: int, rows: int) -> None:
    tuning = gated_tuning(rows, columns, inner)
    assert tuning is not None
    small.check_skinny_product(PLAIN, rows, columns, inner, tuning, gated=True)


@pytest.mark.parametrize("tokens", [65, 128, 256, 300, 1024, 2100])
@pytest.mark.parametrize("columns, inner", [(14336, 4096), (3072, 1024), (1536, 576)])
def test_gated_product(tokens: int, columns: int, inner: int) -> None:
    small.check_gated_product(PLAIN, tokens, columns, inner)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gated_product_of_the_other_activation(dtype: torch.dtype) -> None:
    shape = cases.Shape(device="cuda", dtype=dtype)
    small.check_gated_product(shape, 300, 2048, 640, "gelu_tanh")


@pytest.mark.parametrize("columns, inner", [(4096, 1024), (1024, 3072), (1000, 576), (6144, 4096)])
@pytest.mark.parametrize("has_norm, gated", [(False, False), (True, False), (True, True), (False, True)])
def test_row_product(columns: int, inner: int, has_norm: bool, gated: bool) -> None:
    cases.check_row_product(PLAIN, columns, inner, has_norm=has_norm, gated=gated)
