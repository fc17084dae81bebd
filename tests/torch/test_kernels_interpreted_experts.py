"""Mixtures of experts through Triton's interpreter, and against the decoder's; tests/gpu has larger shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.torch.interpreted import exact_fp8, reason_to_skip

if reason := reason_to_skip():
    pytest.skip(reason, allow_module_level=True)

from paceline.models.layers import DenseLinear, Experts, FeedForward
from paceline.runner.gpu.kernels.expert_product import ExpertTuning, expert_product
from tests.gpu import kernel_expert_cases as cases


@pytest.mark.parametrize(
    "tokens, experts, per_token, skew", [(1, 4, 2, 0.0), (40, 6, 2, 0.3), (600, 3, 2, 0.0), (50, 5, 1, 50.0)]
)
def test_tokens_are_ordered_by_expert(tokens: int, experts: int, per_token: int, skew: float) -> None:
    mixture = cases.Mixture(
        device="cpu", dtype=torch.float32, experts=experts, per_token=per_token, hidden=1, inner=1
    )
    chosen, _ = mixture.choices(tokens, skew=skew)
    cases.check_plan(chosen.to(torch.int32), experts, tile_rows=16)
    chosen[0, 0] = -1
    chosen[-1, 0] = experts
    cases.check_plan(chosen, experts, tile_rows=64)


@pytest.mark.parametrize("hidden, inner", [(64, 32), (72, 40)])
@pytest.mark.parametrize("tokens", [1, 20])
def test_tokens_go_through_their_experts(tokens: int, hidden: int, inner: int) -> None:
    mixture = cases.Mixture(
        device="cpu", dtype=torch.float32, experts=5, per_token=2, hidden=hidden, inner=inner
    )
    cases.check_product(mixture, tokens)


def test_tiles_of_other_sizes_and_all_tokens_at_one_expert() -> None:
    mixture = cases.Mixture(device="cpu", dtype=torch.float32, experts=3, per_token=1, hidden=48, inner=32)
    tuning = ExpertTuning(rows=32, columns=16, inner=16, num_warps=1, num_stages=1)
    cases.check_product(mixture, 70, skew=50.0, tuning=tuning)


@pytest.mark.parametrize("normalize", [False, True])
def test_the_layer_of_the_decoder_gives_the_same(normalize: bool) -> None:
    mixture = cases.Mixture(device="cpu", dtype=torch.float32, experts=4, per_token=2, hidden=32, inner=48)
    weights, x = mixture.weights(), mixture.tokens(9)
    router = DenseLinear(torch.randn(4, 32))
    feed_forward = [
        FeedForward(DenseLinear(weights.gate_up.q[expert]), DenseLinear(weights.down.q[expert]), "silu")
        for expert in range(4)
    ]
    expected = Experts(router, feed_forward, 2, normalize=normalize)(x)
    weight, chosen = F.softmax(router(x), dim=-1).topk(2, dim=-1)
    if normalize:
        weight = weight / weight.sum(-1, keepdim=True)
    out = torch.full_like(x, float("nan"))
    expert_product(out, x, chosen, weight.contiguous(), weights, mixture.buffers(9, weights))
    cases.assert_close(out, expected.double(), 1e-5)


@pytest.mark.parametrize("kind", ["fp8", "int8", "blocks", "int4"])
def test_experts_of_fewer_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact_fp8(monkeypatch)
    mixture = cases.Mixture(device="cpu", dtype=torch.float32, experts=4, per_token=2, hidden=128, inner=64)
    cases.check_quantized_product(mixture, 7, kind)
