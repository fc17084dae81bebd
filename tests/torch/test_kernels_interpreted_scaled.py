"""Rows and products of eight bits through Triton's interpreter; tests/gpu/test_kernel_scaled.py has the real ones."""

from __future__ import annotations

import pytest
import torch

from tests.torch.interpreted import exact_fp8, reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.runner.gpu.kernels.gated_product import Activation
from paceline.runner.gpu.kernels.packed_product import packed_tuning
from paceline.runner.gpu.kernels.row_product import RowTuning, scaled_row_tuning
from paceline.runner.gpu.kernels.scaled_product import scaled_gated_tuning, scaled_tuning
from paceline.runner.gpu.kernels.skinny_product import ProductTuning
from tests.gpu import kernel_scaled_cases as scaled
from tests.gpu.kernel_cases import FP8, Shape

SMALL = Shape(device="cpu", dtype=torch.float32)
KINDS = pytest.mark.parametrize("kind", [FP8, torch.int8], ids=["fp8", "int8"])


@pytest.fixture(autouse=True)
def _casts_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_fp8(monkeypatch)
    torch.manual_seed(5)


@KINDS
def test_rows_get_a_scale_each(kind: torch.dtype) -> None:
    scaled.check_quantize_rows(SMALL, 5, 100, kind)


@KINDS
def test_a_row_that_is_not_finite_stays_so_and_harms_no_other(kind: torch.dtype) -> None:
    scaled.check_rows_that_are_not_finite(SMALL, kind)


@KINDS
@pytest.mark.parametrize("parts", [0, 2])
def test_the_norm_of_eight_bits(kind: torch.dtype, parts: int) -> None:
    scaled.check_norm_of_eight_bits(SMALL, 3, 100, kind, parts=parts)


@KINDS
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_the_activation_of_eight_bits(kind: torch.dtype, activation: Activation) -> None:
    scaled.check_gated_rows(SMALL, 3, 200, kind, activation)


@KINDS
@pytest.mark.parametrize("rows, parts", [(1, 1), (5, 2), (19, 1), (70, 1)])
def test_products(kind: torch.dtype, rows: int, parts: int) -> None:
    tuning = ProductTuning(columns=16, inner=64, parts=parts, num_warps=1, rows=16)
    scaled.check_scaled_product(SMALL, rows, 32, 256, tuning, kind)


@KINDS
def test_the_product_of_many_rows_and_the_one_with_a_gate(kind: torch.dtype) -> None:
    scaled.check_scaled_product(SMALL, 70, 48, 96, None, kind)
    scaled.check_gated_scaled_product(SMALL, 5, 32, 128, scaled_gated_tuning(5, 32, 128), kind)


@KINDS
@pytest.mark.parametrize("has_norm, gated", [(False, False), (True, False), (True, True)])
def test_the_product_of_one_row(kind: torch.dtype, has_norm: bool, gated: bool) -> None:
    scaled.check_scaled_row_product(SMALL, 6, 1120, kind, has_norm=has_norm, gated=gated)
    tuning = RowTuning(step=512, columns=2)
    scaled.check_scaled_row_product(SMALL, 6, 1120, kind, has_norm=has_norm, gated=gated, tuning=tuning)


@pytest.mark.parametrize("group, inner", [(32, 192), (64, 192), (32, 256), (64, 256), (128, 256), (256, 256)])
def test_products_of_four_bits(group: int, inner: int) -> None:
    tuning = ProductTuning(columns=16, inner=64)
    scaled.check_packed_product(SMALL, 5, 32, inner, group, tuning)
    scaled.check_packed_product(SMALL, 3, 16, inner, group, tuning, gated=True)


def test_products_of_four_bits_in_parts() -> None:
    scaled.check_packed_product(SMALL, 19, 32, 512, 128, ProductTuning(columns=16, inner=128, parts=2))


def test_products_of_four_bits_of_more_rows_than_a_program_takes() -> None:
    scaled.check_packed_product(SMALL, 70, 32, 128, 128, ProductTuning(columns=32, inner=128, rows=32))
    # As it is chosen.
    scaled.check_packed_product(SMALL, 70, 128, 256, 64, packed_tuning(70, 128, 256, narrow=True))


@pytest.mark.parametrize("group, narrow, gated", [(128, False, False), (128, True, False), (32, False, True)])
def test_products_of_blocks(group: int, narrow: bool, gated: bool) -> None:
    scaled.check_block_product(SMALL, 5, 32, 256, group, narrow=narrow, gated=gated)


def test_four_bits_come_close() -> None:
    scaled.check_packing(SMALL, 32, 256)


def test_every_shape_is_cut_without_a_rest() -> None:
    shapes = [(6144, 4096), (4096, 14336), (28672, 4096), (960, 576), (576, 1536), (48, 96), (1024, 2048)]
    for columns, inner in shapes:
        for rows in (1, 8, 16, 32, 64, 100, 256):
            for narrow in (False, True):
                cut = scaled_tuning(rows, columns, inner, narrow=narrow)
                assert columns % cut.columns == 0 and inner % (cut.inner * cut.parts) == 0
                assert cut.parts == 1 or narrow
            gated = scaled_gated_tuning(rows, columns, inner)
            assert columns % gated.columns == 0 and inner % gated.inner == 0
        assert columns % scaled_row_tuning(columns, inner).columns == 0
