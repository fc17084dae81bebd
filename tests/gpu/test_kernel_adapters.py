"""What adapters add to products, on the card."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.runner.gpu.kernels.adapter_product import adapter_tuning
from tests.gpu import kernel_adapter_cases as cases

BF16 = torch.bfloat16


def product(
    inner: int, widths: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype = BF16
) -> cases.Product:
    return cases.Product(device="cuda", dtype=dtype, inner=inner, widths=widths, ranks=ranks)


def mixed(tokens: int, adapters: int) -> list[int]:
    """Every fifth token has none; the last adapter has one token."""
    found = [-1 if token % 5 == 2 else (token * 7) % max(adapters - 1, 1) for token in range(tokens)]
    return [*found[:-1], adapters - 1]


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, 200, 1000])
@pytest.mark.parametrize(
    "inner, widths", [(4096, (4096, 1024, 1024)), (1024, (3072, 3072)), (14336, (4096,)), (200, (136, 40))]
)
def test_tokens_get_what_their_adapter_adds(
    inner: int, widths: tuple[int, ...], tokens: int, overlapped: bool
) -> None:
    if overlapped and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("kernels start early from Hopper on")
    tuning = adapter_tuning(tokens, BF16)
    made = product(inner, widths, (16,) * 5)
    cases.check_adapter_product(made, mixed(tokens, 5), tuning=tuning, overlapped=overlapped)
    cases.check_adapter_product(made, mixed(tokens, 5), tuning=tuning, parts=True, overlapped=overlapped)


@pytest.mark.parametrize("tokens", [1, 64, 200, 1000])
@pytest.mark.parametrize("inner, width, ranks", [(4096, 14336, (16,) * 5), (200, 136, (16, 64, 32, 16, 16))])
def test_gate_and_up_go_through_the_activation(
    inner: int, width: int, ranks: tuple[int, ...], tokens: int
) -> None:
    made, tuning = product(inner, (width, width), ranks), adapter_tuning(tokens, BF16)
    cases.check_gated_adapters(made, mixed(tokens, 5), tuning=tuning)
    cases.check_gated_adapters(made, mixed(tokens, 5), tuning=tuning, activation="gelu_tanh")
    if torch.cuda.get_device_capability() >= (9, 0):
        cases.check_gated_adapters(made, mixed(tokens, 5), tuning=tuning, overlapped=True)


@pytest.mark.parametrize("tokens", [16, 700])
def test_ranks_of_several_panels(tokens: int) -> None:
    made = product(1024, (512, 256), (16, 64, 32))
    cases.check_adapter_product(made, mixed(tokens, 3), tuning=adapter_tuning(tokens, BF16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(dtype: torch.dtype) -> None:
    for tokens in (5, 600):
        made = product(256, (160, 64), (16, 32), dtype)
        cases.check_adapter_product(made, mixed(tokens, 2), tuning=adapter_tuning(tokens, dtype))
