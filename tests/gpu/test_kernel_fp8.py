"""Keys and values of eight bits on the card: attention against float64 over the very numbers that are stored."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("needs a GPU of compute capability 8.9", allow_module_level=True)

from paceline.runner.gpu.kernels.decode_attention import DecodeTuning
from paceline.runner.gpu.kernels.prefill_attention import PrefillTuning
from tests.gpu import kernel_cases as cases

SKEWED = [1, 0, 64, 65, 4096, 127, 63, 2, 1000, 12_345, 300, 0, 7]
DTYPES = [torch.bfloat16, torch.float16]


def shape(
    kv_heads: int = 8,
    group: int = 2,
    head_dim: int = 128,
    num_blocks: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> cases.Shape:
    return cases.Shape(
        device="cuda",
        dtype=dtype,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        num_blocks=num_blocks,
        kv_dtype=cases.FP8,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, head_dim", [(1, 64), (2, 128), (4, 128), (8, 64), (3, 128), (2, 256)])
@pytest.mark.parametrize("window", [0, 1000])
def test_decode(group: int, head_dim: int, window: int, dtype: torch.dtype) -> None:
    layer = shape(group=group, head_dim=head_dim, dtype=dtype)
    cases.check_decode(layer, SKEWED, window=window, target_chunks=66)


@pytest.mark.parametrize(
    "tile, num_warps, num_stages", [(64, 4, 3), (64, 2, 4), (32, 1, 4), (16, 2, 3), (32, 2, 6)]
)
def test_decode_with_other_launch_parameters(tile: int, num_warps: int, num_stages: int) -> None:
    tuning = DecodeTuning(tile=tile, num_warps=num_warps, num_stages=num_stages)
    cases.check_decode(shape(), SKEWED, target_chunks=9, tuning=tuning)


def test_a_pool_beyond_two_to_the_31_elements() -> None:
    big = shape(num_blocks=2**31 // (8 * 64 * 128) + 100)
    cases.check_decode(big, [1, 700, 64, 129], target_chunks=8)
    cases.check_prefill(big, [(0, 100), (300, 77)])
    cases.check_rope_kv_write(big, 100, rotary_dim=128, has_norm=True)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, head_dim", [(1, 64), (2, 128), (4, 128), (8, 64), (2, 32), (2, 256)])
@pytest.mark.parametrize("window", [0, 300])
def test_prefill_with_and_without_what_was_before(
    group: int, head_dim: int, window: int, dtype: torch.dtype
) -> None:
    spans = [(0, 1), (0, 1000), (64, 0), (777, 333), (63, 2), (4000, 65), (0, 64), (128, 128)]
    cases.check_prefill(shape(group=group, head_dim=head_dim, dtype=dtype), spans, window=window)


@pytest.mark.parametrize("query_rows, num_warps", [(128, 8), (128, 4)])
def test_prefill_with_other_launch_parameters(query_rows: int, num_warps: int) -> None:
    tuning = PrefillTuning(query_rows=query_rows, num_warps=num_warps, num_stages=2)
    cases.check_prefill(shape(), [(0, 500), (100, 30)], tuning=tuning)


@pytest.mark.parametrize("group", [2, 4])
def test_shared_prefixes_are_computed_once_and_joined(group: int) -> None:
    cases.check_cascade(shape(group=group), [(2048, [1, 70, 64, 300, 5] * 8), (640, [7, 1])], alone=[100])


@pytest.mark.parametrize(
    "kv_heads, group, head_dim", [(8, 2, 128), (8, 4, 128), (3, 3, 64), (1, 4, 256), (2, 2, 96)]
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_rope_and_kv_write(kv_heads: int, group: int, head_dim: int, has_norm: bool) -> None:
    layer = shape(kv_heads=kv_heads, group=group, head_dim=head_dim)
    for rotary_dim in (head_dim, head_dim // 2):
        for tokens in (1, 333):
            cases.check_rope_kv_write(layer, tokens, rotary_dim=rotary_dim, has_norm=has_norm)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_what_is_beyond_eight_bits_becomes_their_largest(dtype: torch.dtype) -> None:
    cases.check_saturation(shape(dtype=dtype))


def test_queries_in_float32() -> None:
    # Products of float32 are made of tf32, as with keys of float32.
    cases.check_decode(shape(head_dim=64, dtype=torch.float32), SKEWED, target_chunks=66)
    cases.check_prefill(shape(head_dim=64, dtype=torch.float32), [(0, 1000), (777, 333)])
