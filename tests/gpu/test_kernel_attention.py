"""Attention kernels on the card against their float64 references, on fresh random inputs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.runner.gpu.kernels.decode_attention import (
    DecodeTuning,
    allocate_partials,
    allocate_plan,
    decode_attention,
    plan_decode,
)
from paceline.runner.gpu.kernels.prefill_attention import PrefillTuning
from tests.gpu import kernel_cases as cases
from tests.gpu.kernel_references import reference_decode_attention

SKEWED = [1, 0, 64, 65, 4096, 127, 63, 2, 1000, 12_345, 300, 0, 7]


def shape(kv_heads: int = 8, group: int = 2, head_dim: int = 128, num_blocks: int = 0) -> cases.Shape:
    return cases.Shape(
        device="cuda",
        dtype=torch.bfloat16,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        num_blocks=num_blocks,
    )


@pytest.mark.parametrize("slots", [1, 13, 256, 1024])
@pytest.mark.parametrize("window", [0, 200])
def test_a_work_list_covers_what_rows_see(slots: int, window: int) -> None:
    lengths = torch.randint(0, 5000, (slots,)).tolist()
    lengths[0] = 0 if slots > 1 else 1
    cases.check_plan(lengths, "cuda", window=window, target=132)


@pytest.mark.parametrize("group, head_dim", [(1, 64), (2, 128), (4, 128), (8, 64), (3, 128)])
@pytest.mark.parametrize("window", [0, 1000])
def test_decode_of_skewed_empty_and_single_token_rows(group: int, head_dim: int, window: int) -> None:
    cases.check_decode(shape(group=group, head_dim=head_dim), SKEWED, window=window, target_chunks=66)


@pytest.mark.parametrize("group, head_dim", [(1, 64), (2, 128), (4, 128), (8, 64), (3, 128)])
@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("window", [0, 1000])
def test_decode_of_rows_with_drafts(group: int, head_dim: int, width: int, window: int) -> None:
    rows = [(length, 1 + index % width) for index, length in enumerate(SKEWED)]
    cases.check_wide_decode(
        shape(group=group, head_dim=head_dim), rows, width=width, window=window, target_chunks=66
    )


@pytest.mark.parametrize("tile, num_warps, num_stages", [(64, 4, 3), (64, 2, 2), (32, 1, 4), (16, 2, 3)])
def test_decode_with_other_launch_parameters(tile: int, num_warps: int, num_stages: int) -> None:
    tuning = DecodeTuning(tile=tile, num_warps=num_warps, num_stages=num_stages)
    cases.check_decode(shape(), SKEWED, target_chunks=9, tuning=tuning)


def test_decode_from_a_pool_beyond_two_to_the_31_elements() -> None:
    big = shape(num_blocks=2**31 // (8 * 64 * 128) + 100)
    cases.check_decode(big, [1, 700, 64, 129], target_chunks=8)
    cases.check_prefill(big, [(0, 100), (300, 77)])
    torch.cuda.empty_cache()


def test_a_captured_decode_follows_lengths_that_change_on_the_device() -> None:
    layer, device = shape(), "cuda"
    lengths = [5, 900, 64, 2000]
    kv = cases.paged_kv(layer, lengths)
    rows = torch.arange(4, dtype=torch.int32, device=device)
    columns = torch.tensor([4, 300, 64, 1], dtype=torch.int32, device=device)
    query = layer.random(4, layer.heads, layer.head_dim)
    out, log_sum = torch.empty_like(query), torch.empty(4, layer.heads, device=device)
    plan = allocate_plan(4, 16, device=device)
    partials = allocate_partials(plan, heads=layer.heads, kv_heads=layer.kv_heads, head_dim=layer.head_dim)

    def step() -> None:
        plan_decode(plan, rows, columns)
        decode_attention(out, log_sum, query, kv, plan, partials, scale=0.1)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in ([4, 300, 64, 1], [5, 900, 0, 1999], lengths):
        columns.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        expected, _ = reference_decode_attention(query, kv, rows, columns, scale=0.1)
        cases.assert_close(out, expected, layer.tolerance)
        replayed = out.clone()
        step()
        assert torch.equal(out, replayed), "eager and graph give the same bits"


@pytest.mark.parametrize("group, head_dim", [(1, 64), (2, 128), (4, 128), (8, 64), (3, 64)])
@pytest.mark.parametrize("window", [0, 300])
def test_prefill_with_and_without_what_was_before(group: int, head_dim: int, window: int) -> None:
    spans = [(0, 1), (0, 1000), (64, 0), (777, 333), (63, 2), (4000, 65), (0, 64), (128, 128)]
    cases.check_prefill(shape(group=group, head_dim=head_dim), spans, window=window)


@pytest.mark.parametrize("query_rows, num_warps", [(128, 8), (128, 4)])
def test_prefill_with_other_launch_parameters(query_rows: int, num_warps: int) -> None:
    tuning = PrefillTuning(query_rows=query_rows, num_warps=num_warps, num_stages=2)
    cases.check_prefill(shape(), [(0, 500), (100, 30)], tuning=tuning)


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [(64, 8000 // 64 * 64)],
        [(8, 1984)] * 32,
        [(2, 256), (1, 64), (300, 12_800), (17, 320)],
        [(2 + number % 40, 64 * (1 + number * number % 97)) for number in range(32)],
    ],
)
def test_the_list_of_shared_beginnings_covers_them(groups: list[tuple[int, int]]) -> None:
    for group, target in ((4, 33), (2, 33), (1, 4), (8, 264)):
        cases.check_shared_plan(groups, "cuda", group=group, target=target)


@pytest.mark.parametrize("group", [2, 4])
def test_shared_prefixes_are_computed_once_and_joined(group: int) -> None:
    cases.check_cascade(shape(group=group), [(2048, [1, 70, 64, 300, 5] * 8)])
    cases.check_cascade(shape(group=group), [(8000 // 64 * 64, [33] * 64)], target=33)
    many = [(64 * (1 + 3 * index), [1, 70, 300][: 2 + index % 2] * (1 + index % 5)) for index in range(32)]
    cases.check_cascade(shape(group=group), many, alone=[1, 500, 64], target=33)
    cases.check_cascade(shape(group=group), [(64, [1, 2])] * 32, target=1)
