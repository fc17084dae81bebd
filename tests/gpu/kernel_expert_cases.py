"""Random mixtures of experts and the comparison with their definition; used on the GPU and through the interpreter.

Buffers are NaN before every case, so that whatever is used without having been written shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.runner.gpu.device_layers import (
    DeviceLinear,
    GroupedLinear,
    ScaledLinear,
    dense_matrix,
    packed,
    quantized,
    stacked_matrices,
)
from paceline.runner.gpu.kernels.block_product import BlockWeight
from paceline.runner.gpu.kernels.expert_product import (
    ExpertBuffers,
    ExpertMatrices,
    ExpertTuning,
    ExpertWeights,
    allocate_expert_buffers,
    allocate_expert_plan,
    expert_product,
    plan_experts,
)
from paceline.runner.gpu.kernels.packed_product import PackedWeight
from paceline.runner.gpu.kernels.scaled_product import ScaledWeight
from tests.gpu.kernel_references import reference_expert_product, reference_order


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sizes of a layer and where the case lives."""

    device: str
    dtype: torch.dtype
    experts: int
    per_token: int
    hidden: int
    inner: int

    def weights(self) -> ExpertWeights:
        sizes = (self.experts, 2 * self.inner, self.hidden), (self.experts, self.hidden, self.inner)
        gate_up, down = (
            (torch.randn(size, device=self.device) * size[2] ** -0.5).to(self.dtype) for size in sizes
        )
        return ExpertWeights(gate_up=ExpertMatrices(q=gate_up), down=ExpertMatrices(q=down))

    def tokens(self, number: int) -> Tensor:
        return torch.randn(number, self.hidden, device=self.device).to(self.dtype)

    def choices(self, tokens: int, *, skew: float = 1.0) -> tuple[Tensor, Tensor]:
        """Different experts for each token, with weights that sum to 1; a large skew sends all to the first ones."""
        liked = torch.randn(tokens, self.experts) - skew * torch.arange(self.experts)
        weight, chosen = liked.softmax(-1).topk(self.per_token, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        return chosen.to(self.device), weight.float().to(self.device)

    def buffers(self, tokens: int, weights: ExpertWeights) -> ExpertBuffers:
        buffers = allocate_expert_buffers(tokens, self.per_token, weights, self.device)
        buffers.inner.fill_(float("nan"))
        buffers.product.fill_(float("nan"))
        buffers.plan.order.fill_(2**30)
        buffers.plan.tiles.fill_(2**30)
        return buffers


def check_plan(chosen: Tensor, experts: int, *, tile_rows: int) -> None:
    """The order is the definition's, and tiles cover it, each within one expert."""
    pairs = chosen.numel()
    plan = allocate_expert_plan(pairs + 7, experts, least_rows=min(tile_rows, 16), device=chosen.device)
    for _ in range(2):  # the second time in buffers that have been used
        plan_experts(plan, chosen, tile_rows=tile_rows)
        order, counts = reference_order(chosen, experts)
        assert plan.counts.tolist() == counts
        assert plan.order[: len(order)].tolist() == order
        expected = []
        for expert, number in enumerate(counts):
            first = sum(counts[:expert])
            for begin in range(first, first + number, tile_rows):
                expected.append([expert, begin, min(begin + tile_rows, first + number)])
        assert plan.num_tiles.tolist() == [len(expected)]
        assert plan.tiles[: len(expected)].tolist() == expected
        assert plan.arrived.tolist() == [0]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]


def assert_close(found: Tensor, expected: Tensor, allowed: float) -> None:
    difference = (found.double() - expected).norm(dim=-1)
    error = float((difference / expected.norm(dim=-1).clamp_min(1e-30)).max())  # of the worst token
    assert error < allowed, f"relative error {error:.2e} against {allowed:.0e}"


def check_product(
    mixture: Mixture, tokens: int, *, skew: float = 0.0, tuning: ExpertTuning | None = None
) -> None:
    """Also with a token without experts, and one that has only some of its choices here."""
    weights, x = mixture.weights(), mixture.tokens(tokens)
    chosen, weight = mixture.choices(tokens, skew=skew)
    if tokens > 2:
        chosen[1] = -1
        chosen[2, 0] = mixture.experts
        weight[2, 0] = float("nan")
    buffers = mixture.buffers(tokens + 3, weights)
    out = torch.full_like(x, float("nan"))
    expert_product(out, x, chosen, weight, weights, buffers, tuning=tuning)
    expected = reference_expert_product(x, chosen, weight, weights)
    assert_close(out, expected, tolerance(mixture.dtype))


def check_quantized_product(mixture: Mixture, tokens: int, kind: str) -> None:
    """Experts of e4m3 or int8 with a scale for each row of their matrices, of e4m3 in blocks, and of four bits."""
    plain, x = mixture.weights(), mixture.tokens(tokens)
    chosen, weight = mixture.choices(tokens)
    stacks, exact = [], []
    for stack in (plain.gate_up, plain.down):
        linears = [made(matrix, kind, mixture.dtype) for matrix in stack.q]
        stacks.append(stacked_matrices(linears, mixture.dtype))
        assert stacks[-1].bits == (4 if kind == "int4" else 8) and stacks[-1].shape == stack.q.shape
        exact.append(ExpertMatrices(q=torch.stack([values(linear) for linear in linears])))
    weights = ExpertWeights(gate_up=stacks[0], down=stacks[1])
    buffers = allocate_expert_buffers(tokens, mixture.per_token, weights, mixture.device, mixture.dtype)
    out = torch.full_like(x, float("nan"))
    expert_product(out, x, chosen, weight, weights, buffers)
    right = reference_expert_product(x, chosen, weight, ExpertWeights(gate_up=exact[0], down=exact[1]))
    assert_close(out, right, tolerance(mixture.dtype))


def made(matrix: Tensor, kind: str, dtype: torch.dtype) -> DeviceLinear:
    fp8 = torch.float8_e4m3fn
    if kind == "int4":
        return GroupedLinear(packed(matrix, dtype))
    if kind == "blocks":  # a scale for 32 inputs
        rows, inner = matrix.shape
        found = quantized(matrix.view(-1, 32), fp8)
        return GroupedLinear(
            BlockWeight(found.q.view(rows, inner), found.scale.view(rows, -1).T.contiguous())
        )
    return ScaledLinear(quantized(matrix, fp8 if kind == "fp8" else torch.int8))


def values(linear: DeviceLinear) -> Tensor:
    """What a matrix stands for, in float64; of four bits, as it is unpacked."""
    if isinstance(linear.weight, BlockWeight):
        scale = linear.weight.scale.double().T.repeat_interleave(linear.weight.group, dim=1)
        return linear.weight.q.double() * scale
    if isinstance(linear.weight, ScaledWeight):
        return linear.weight.q.double() * linear.weight.scale.double()[:, None]
    assert isinstance(linear.weight, PackedWeight)
    return dense_matrix(linear, linear.weight.pairs.dtype).double()
