"""What adapters add to products, through Triton's interpreter; tests/gpu has larger shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.torch.interpreted import reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.runner.gpu.kernels.adapter_product import AdapterTuning
from tests.gpu import kernel_adapter_cases as cases

SMALL = AdapterTuning(rows=16, inner=32, columns=32, gated_columns=32)
MIXED = [0, -1, 2, 0, 0, 1, -1, 2, 3, 3]


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("inner, widths", [(64, (64, 32, 32)), (48, (40,)), (96, (48, 48))])
def test_tokens_get_what_their_adapter_adds(inner: int, widths: tuple[int, ...], parts: bool) -> None:
    product = cases.Product(
        device="cpu", dtype=torch.float32, inner=inner, widths=widths, ranks=(16, 16, 16, 16)
    )
    cases.check_adapter_product(product, MIXED, tuning=SMALL, parts=parts)


@pytest.mark.parametrize("inner, width", [(64, 64), (48, 40)])
def test_gate_and_up_of_tokens_with_and_without(inner: int, width: int) -> None:
    product = cases.Product(
        device="cpu", dtype=torch.float32, inner=inner, widths=(width, width), ranks=(16, 16, 48, 32)
    )
    cases.check_gated_adapters(product, MIXED, tuning=SMALL)
    cases.check_gated_adapters(product, [-1] * 18 + [1] * 17, tuning=SMALL, activation="gelu_tanh")


def test_a_split_of_several_turns() -> None:
    product = cases.Product(device="cpu", dtype=torch.float32, inner=528, widths=(32,), ranks=(16, 32))
    short = replace(SMALL, inner=16)
    assert short.share(short.splits(3, 1, 528), 528) > 16, "or this says nothing"
    cases.check_adapter_product(product, [0, 1, -1], tuning=short)


def test_ranks_of_several_panels_and_tiles_of_one_adapter() -> None:
    product = cases.Product(device="cpu", dtype=torch.float32, inner=64, widths=(32, 16), ranks=(16, 48, 32))
    cases.check_adapter_product(product, [1] * 20 + [0, 2, -1], tuning=SMALL)


def test_no_token_has_an_adapter() -> None:
    product = cases.Product(device="cpu", dtype=torch.float32, inner=32, widths=(32,), ranks=(16,))
    cases.check_adapter_product(product, [-1, -1], tuning=SMALL)
