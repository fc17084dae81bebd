"""Rows and products of eight bits on the card, at the shapes of 8B and of small models."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU of compute capability 8.9", allow_module_level=True)

from paceline.runner.gpu.kernels.gated_product import Activation
from paceline.runner.gpu.kernels.packed_product import packed_tuning
from paceline.runner.gpu.kernels.scaled_product import scaled_gated_tuning, scaled_tuning
from paceline.runner.gpu.kernels.skinny_product import ProductTuning
from tests.gpu import kernel_scaled_cases as scaled
from tests.gpu.kernel_cases import FP8, Shape

PLAIN = Shape(device="cuda", dtype=torch.bfloat16)
KINDS = pytest.mark.parametrize("kind", [FP8, torch.int8], ids=["fp8", "int8"])


@KINDS
@pytest.mark.parametrize("rows, width", [(1, 4096), (300, 14336), (7, 576)])
def test_rows_get_a_scale_each(kind: torch.dtype, rows: int, width: int) -> None:
    scaled.check_quantize_rows(PLAIN, max(2, rows), width, kind)


@KINDS
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(kind: torch.dtype) -> None:
    scaled.check_rows_that_are_not_finite(PLAIN, kind)


@KINDS
@pytest.mark.parametrize("tokens, width", [(1, 1024), (300, 4096), (7, 576)])
@pytest.mark.parametrize("parts", [0, 1, 4])
def test_the_norm_of_eight_bits(kind: torch.dtype, tokens: int, width: int, parts: int) -> None:
    scaled.check_norm_of_eight_bits(PLAIN, tokens, width, kind, parts=parts)


@KINDS
@pytest.mark.parametrize("tokens, width", [(1, 3072), (300, 14336), (9, 1536)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_of_eight_bits(
    kind: torch.dtype, tokens: int, width: int, activation: Activation
) -> None:
    scaled.check_gated_rows(PLAIN, tokens, width, kind, activation)


@KINDS
@pytest.mark.parametrize("rows", [1, 7, 16, 30, 64, 100, 256])
@pytest.mark.parametrize("columns, inner", [(6144, 4096), (4096, 14336), (1024, 3072), (960, 576)])
def test_products(kind: torch.dtype, rows: int, columns: int, inner: int) -> None:
    for narrow in (False, True):
        tuning = scaled_tuning(rows, columns, inner, narrow=narrow)
        scaled.check_scaled_product(PLAIN, rows, columns, inner, tuning, kind)


@KINDS
@pytest.mark.parametrize("rows", [65, 300, 2048])
@pytest.mark.parametrize("columns, inner", [(6144, 4096), (4096, 14336), (960, 576)])
def test_products_of_many_rows(kind: torch.dtype, rows: int, columns: int, inner: int) -> None:
    scaled.check_scaled_product(PLAIN, rows, columns, inner, None, kind)


@KINDS
@pytest.mark.parametrize("columns, warps, step, stages", [(128, 8, 128, 4), (64, 4, 256, 3)])
def test_products_with_other_launch_parameters(
    kind: torch.dtype, columns: int, warps: int, step: int, stages: int
) -> None:
    tuning = ProductTuning(columns=columns, inner=step, num_warps=warps, num_stages=stages)
    scaled.check_scaled_product(PLAIN, 33, 6144, 4096, tuning, kind)


@KINDS
@pytest.mark.parametrize("rows", [2, 16, 17, 64])
@pytest.mark.parametrize("columns, inner", [(14336, 4096), (3072, 1024), (1536, 576)])
def test_gate_and_up(kind: torch.dtype, rows: int, columns: int, inner: int) -> None:
    tuning = scaled_gated_tuning(rows, columns, inner)
    scaled.check_gated_scaled_product(PLAIN, rows, columns, inner, tuning, kind)


@pytest.mark.parametrize("rows", [1, 7, 16, 30, 64, 65, 300])
@pytest.mark.parametrize(
    "columns, inner, group",
    [(6144, 4096, 128), (4096, 14336, 128), (1024, 3072, 32), (960, 576, 64), (6144, 4096, 4096)],
)
def test_products_of_four_bits(rows: int, columns: int, inner: int, group: int) -> None:
    for narrow in (False, True):
        tuning = packed_tuning(rows, columns, inner, narrow=narrow)
        scaled.check_packed_product(PLAIN, rows, columns, inner, group, tuning)


@pytest.mark.parametrize("rows", [2, 16, 64, 300])
def test_gate_and_up_of_four_bits(rows: int) -> None:
    tuning = packed_tuning(rows, 14336, 4096, gated=True)
    scaled.check_packed_product(PLAIN, rows, 14336, 4096, 128, tuning, gated=True)


@pytest.mark.parametrize("rows", [1, 16, 30, 64])
@pytest.mark.parametrize("columns, inner", [(6144, 4096), (4096, 14336), (960, 640)])
def test_products_of_blocks(rows: int, columns: int, inner: int) -> None:
    for narrow in (False, True):
        scaled.check_block_product(PLAIN, rows, columns, inner, 128, narrow=narrow)
    scaled.check_block_product(PLAIN, rows, columns, inner, 128, gated=True)


def test_four_bits_come_close() -> None:
    scaled.check_packing(PLAIN, 512, 4096)


@KINDS
@pytest.mark.parametrize("columns, inner", [(6144, 4096), (4096, 14336), (1024, 3072), (960, 576)])
@pytest.mark.parametrize("has_norm, gated", [(False, False), (True, False), (True, True)])
def test_the_product_of_one_row(
    kind: torch.dtype, columns: int, inner: int, has_norm: bool, gated: bool
) -> None:
    scaled.check_scaled_row_product(PLAIN, columns, inner, kind, has_norm=has_norm, gated=gated)
