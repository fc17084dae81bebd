"""Mixtures of experts on the card."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from paceline.runner.gpu.kernels.expert_product import expert_product
from tests.gpu import kernel_expert_cases as cases
from tests.gpu.kernel_references import reference_expert_product

BF16 = torch.bfloat16


def mixture(
    experts: int, per_token: int, hidden: int, inner: int, dtype: torch.dtype = BF16
) -> cases.Mixture:
    return cases.Mixture(
        device="cuda", dtype=dtype, experts=experts, per_token=per_token, hidden=hidden, inner=inner
    )


@pytest.mark.parametrize(
    "tokens, experts, per_token", [(1, 128, 8), (300, 8, 2), (4096, 128, 8), (77, 60, 4)]
)
@pytest.mark.parametrize("tile_rows", [16, 128])
def test_tokens_are_ordered_by_expert(tokens: int, experts: int, per_token: int, tile_rows: int) -> None:
    chosen, _ = mixture(experts, per_token, 1, 1).choices(tokens, skew=0.02)
    cases.check_plan(chosen.to(torch.int32), experts, tile_rows=tile_rows)
    chosen[0, 0] = -1
    chosen[-1, 0] = experts
    cases.check_plan(chosen, experts, tile_rows=tile_rows)


@pytest.mark.parametrize("tokens", [1, 7, 64, 1000, 3000])
@pytest.mark.parametrize(
    "experts, per_token, hidden, inner", [(128, 8, 1024, 384), (8, 2, 512, 1024), (60, 4, 200, 88)]
)
def test_tokens_go_through_their_experts(
    tokens: int, experts: int, per_token: int, hidden: int, inner: int
) -> None:
    cases.check_product(mixture(experts, per_token, hidden, inner), tokens)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types(dtype: torch.dtype) -> None:
    for tokens in (5, 600):
        cases.check_product(mixture(16, 2, 256, 160, dtype), tokens)


@pytest.mark.parametrize("tokens", [1, 64, 3000])
@pytest.mark.parametrize("kind", ["fp8", "int8", "blocks", "int4"])
def test_experts_of_fewer_bits(tokens: int, kind: str) -> None:
    cases.check_quantized_product(mixture(32, 4, 2048, 768), tokens, kind)
    cases.check_quantized_product(mixture(8, 2, 256, 192), tokens, kind)


def test_all_tokens_at_few_experts() -> None:
    cases.check_product(mixture(64, 2, 512, 256), 2000, skew=20.0)


def test_weights_beyond_two_to_the_31_elements() -> None:
    layer = mixture(140, 2, 2048, 4096)
    cases.check_product(layer, 40, skew=-1.0)  # the last experts
    torch.cuda.empty_cache()


def test_the_same_bits_every_time_and_in_a_graph() -> None:
    layer = mixture(32, 4, 512, 256)
    weights, x = layer.weights(), layer.tokens(200)
    chosen, weight = layer.choices(200)
    buffers = layer.buffers(512, weights)
    first, out = torch.empty_like(x), torch.empty_like(x)
    expert_product(first, x, chosen, weight, weights, buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expert_product(out, x, chosen, weight, weights, buffers)
    for _ in range(10):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)
    other, other_weight = layer.choices(200, skew=-1.0)
    chosen.copy_(other)
    weight.copy_(other_weight)
    graph.replay()
    expected = reference_expert_product(x, other, other_weight, weights)
    cases.assert_close(out, expected, cases.tolerance(BF16))
