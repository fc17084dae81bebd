"""Keys and values of eight bits through Triton's interpreter; tests/gpu/test_kernel_fp8.py has the real kernels."""

from __future__ import annotations

import pytest
import torch

from tests.torch.interpreted import exact_fp8, reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.runner.gpu.kernels.decode_attention import DecodeTuning
from tests.gpu import kernel_cases as cases

SMALL = cases.Shape(device="cpu", dtype=torch.float32, kv_dtype=cases.FP8)
SIXTEEN = [
    cases.Shape(device="cpu", dtype=dtype, kv_dtype=cases.FP8) for dtype in (torch.float16, torch.bfloat16)
]


@pytest.fixture(autouse=True)
def _casts_of_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_fp8(monkeypatch)


@pytest.mark.parametrize("window", [0, 70])
def test_decode_attention(window: int) -> None:
    cases.check_decode(SMALL, [1, 0, 64, 300, 65], window=window, target_chunks=4)


@pytest.mark.parametrize("shape", SIXTEEN, ids=lambda shape: str(shape.dtype))
def test_decode_attention_with_queries_of_sixteen_bits(shape: cases.Shape) -> None:
    cases.check_decode(shape, [130, 33], tuning=DecodeTuning(tile=64))


@pytest.mark.parametrize("window", [0, 70])
def test_prefill_attention_with_and_without_what_was_before(window: int) -> None:
    cases.check_prefill(SMALL, [(0, 1), (0, 70), (130, 67), (64, 0), (63, 2), (200, 9)], window=window)


@pytest.mark.parametrize("shape", SIXTEEN, ids=lambda shape: str(shape.dtype))
def test_prefill_attention_with_queries_of_sixteen_bits(shape: cases.Shape) -> None:
    cases.check_prefill(shape, [(0, 70), (130, 67)])


def test_a_shared_prefix_is_computed_once_and_joined() -> None:
    cases.check_cascade(SMALL, [(128, [1, 70, 64] * 6), (320, [1, 70])])


@pytest.mark.parametrize("rotary_dim, has_norm", [(64, False), (64, True), (32, True)])
def test_rope_and_kv_write(rotary_dim: int, has_norm: bool) -> None:
    cases.check_rope_kv_write(SMALL, 9, rotary_dim=rotary_dim, has_norm=has_norm)


@pytest.mark.parametrize("shape", [SMALL, *SIXTEEN], ids=lambda shape: str(shape.dtype))
def test_what_is_beyond_eight_bits_becomes_their_largest(shape: cases.Shape) -> None:
    cases.check_saturation(shape)
