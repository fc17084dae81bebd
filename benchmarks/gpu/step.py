"""A whole decode step of a model's shape, kernel after kernel in one graph: what the card allows without a host.

Random weights and keys, greedy rows at one context length. No engine: positions do not move, and
nothing is read back. It says what the engine's step can reach, and how much of it is not matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.card import graph_microseconds
from benchmarks.gpu.cases import BF16, MULTIPROCESSORS, normal, sampling_columns
from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV
from paceline.runner.gpu.kernels.decode_attention import (
    allocate_partials,
    allocate_plan,
    decode_attention,
    decode_tuning,
    plan_decode,
)
from paceline.runner.gpu.kernels.gated_product import gated_activation, gated_product, is_worth_gating
from paceline.runner.gpu.kernels.gumbel_sampling import allocate_candidates, sample
from paceline.runner.gpu.kernels.residual_norm import residual_norm
from paceline.runner.gpu.kernels.rope_kv_write import HeadNorm, TokenPlaces, rope_kv_write
from paceline.runner.gpu.kernels.row_product import RowNorm, row_product
from paceline.runner.gpu.kernels.skinny_product import (
    MAX_GATED_ROWS,
    MAX_PARTS,
    MAX_ROWS,
    gated_tuning,
    narrow_tuning,
    skinny_product,
    wide_tuning,
)

EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    name: str
    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    kv_heads: int = 8
    head_dim: int = 128


SMALL = ModelShape(name="0.6B", layers=28, width=1024, heads=16, inner=3072, vocabulary=151_936)
LARGE = ModelShape(name="8B", layers=32, width=4096, heads=32, inner=14_336, vocabulary=128_256)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor


class DecodeStep:
    """Buffers of one step, and the step itself."""

    def __init__(
        self,
        model: ModelShape,
        rows: int,
        *,
        context: int = 144,
        overlapped: bool = False,
    ) -> None:
        self.model, self.rows, self.overlapped = model, rows, overlapped
        width, inner, heads = model.width, model.inner, model.heads
        kv_heads, dim = model.kv_heads, model.head_dim
        self.weights = [
            LayerWeights(
                qkv=normal((heads + 2 * kv_heads) * dim, width),
                output=normal(width, heads * dim),
                gate_up=normal(2 * inner, width),
                down=normal(width, inner),
            )
            for _ in range(model.layers)
        ]
        self.head = normal(model.vocabulary, width)
        self.norm = normal(width)
        self.head_norm = HeadNorm(query_weight=normal(dim), key_weight=normal(dim), epsilon=EPSILON)
        per_row = context // BLOCK_SIZE + 1
        self.table = torch.randperm(rows * per_row).to(torch.int32).view(rows, per_row).cuda()
        sizes = (rows * per_row, kv_heads, BLOCK_SIZE, dim)
        self.kv = [
            PagedKV(keys=normal(*sizes), values=normal(*sizes), block_table=self.table) for _ in self.weights
        ]
        self.slot_rows = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.lengths = torch.full((rows,), context, dtype=torch.int32, device="cuda")
        last = context - 1
        slots = self.table[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE
        self.places = TokenPlaces(positions=self.lengths - 1, slots=slots)
        self.rotation = torch.rand(context + 1, dim, device="cuda")
        self._allocate()

    def _allocate(self) -> None:
        model, rows = self.model, self.rows
        heads, dim = model.heads, model.head_dim
        tuning = replace(decode_tuning(rows), overlapped=self.overlapped)
        self.tuning = tuning
        self.plan = allocate_plan(rows, tuning.target_chunks(MULTIPROCESSORS, model.kv_heads))
        self.partials = allocate_partials(self.plan, heads=heads, kv_heads=model.kv_heads, head_dim=dim)
        self.hidden, self.residual, self.other = (normal(rows, model.width) for _ in range(3))
        self.product = normal(rows, (heads + 2 * model.kv_heads) * dim)
        self.query, self.attended = (normal(rows, heads, dim) for _ in range(2))
        self.log_sum = torch.empty(rows, heads, device="cuda")
        self.wide, self.narrow = normal(rows, 2 * model.inner), normal(rows, model.inner)
        self.parts = torch.zeros(MAX_PARTS, rows, model.width, device="cuda")
        self.logits = normal(rows, model.vocabulary)
        self.candidates = allocate_candidates(rows, model.vocabulary)
        self.tokens = torch.zeros(rows, dtype=torch.int32, device="cuda")
        self.finite = torch.zeros(rows, dtype=torch.uint8, device="cuda")
        self.columns = sampling_columns(rows, 0.0)

    def __call__(self) -> None:
        plan_decode(self.plan, self.slot_rows, self.lengths)
        layer = self._layer_of_one_row if self.rows == 1 else self._layer
        update: Tensor = self.hidden
        for weights, kv in zip(self.weights, self.kv, strict=True):
            update = layer(weights, kv, update)
        residual_norm(
            self.other, self.residual, update, self.norm, epsilon=EPSILON, overlapped=self.overlapped
        )
        if self.rows == 1:
            row_product(self.logits[0], self.other[0], self.head, overlapped=self.overlapped)
        else:
            torch.mm(self.other, self.head.T, out=self.logits)
        sample(self.tokens, self.finite, self.logits, self.columns, self.candidates)

    def _attend(self, kv: PagedKV) -> Tensor:
        norm, overlapped = self.head_norm, self.overlapped
        product, places = self.product, self.places
        rope_kv_write(
            self.query, kv.keys, kv.values, product, places, self.rotation, norm=norm, overlapped=overlapped
        )
        out, query, partials = self.attended, self.query, self.partials
        scale = self.model.head_dim**-0.5
        decode_attention(out, self.log_sum, query, kv, self.plan, partials, scale=scale, tuning=self.tuning)
        return self.attended.view(self.rows, -1)

    def _layer(self, weights: LayerWeights, kv: PagedKV, update: Tensor) -> Tensor:
        overlapped = self.overlapped
        residual_norm(self.other, self.residual, update, self.norm, epsilon=EPSILON, overlapped=overlapped)
        self._queries(weights.qkv)
        update = self._narrow_product(self._attend(kv), weights.output)
        residual_norm(self.other, self.residual, update, self.norm, epsilon=EPSILON, overlapped=overlapped)
        self._gate(weights.gate_up)
        return self._narrow_product(self.narrow, weights.down)

    def _queries(self, weight: Tensor) -> None:
        tuning = wide_tuning(self.rows, *weight.shape) if self.rows <= MAX_ROWS else None
        if tuning is None:
            torch.mm(self.other, weight.T, out=self.product)
        else:
            skinny_product(self.product, self.other, weight, tuning=tuning, overlapped=self.overlapped)

    def _gate(self, weight: Tensor) -> None:
        columns, inner = self.model.inner, self.model.width
        tuning = gated_tuning(self.rows, columns, inner) if self.rows <= MAX_GATED_ROWS else None
        if tuning is not None:
            skinny_product(
                self.narrow, self.other, weight, tuning=tuning, gated=True, overlapped=self.overlapped
            )
        elif is_worth_gating(self.rows, columns, inner, MULTIPROCESSORS):
            gated_product(self.narrow, self.other, weight)
        else:
            torch.mm(self.other, weight.T, out=self.wide)
            gated_activation(self.narrow, self.wide, overlapped=self.overlapped)

    def _narrow_product(self, x: Tensor, weight: Tensor) -> Tensor:
        tuning = narrow_tuning(*weight.shape) if self.rows <= MAX_ROWS else None
        if tuning is None:
            return torch.mm(x, weight.T, out=self.hidden)
        parts = self.parts[: tuning.parts]
        skinny_product(parts, x, weight, tuning=tuning, overlapped=self.overlapped)
        return parts

    def _layer_of_one_row(self, weights: LayerWeights, kv: PagedKV, update: Tensor) -> Tensor:
        overlapped, hidden = self.overlapped, self.hidden[0]
        norm = self._row_norm(self.residual, self.other)
        row_product(self.product[0], update[0], weights.qkv, norm=norm, overlapped=overlapped)
        row_product(hidden, self._attend(kv)[0], weights.output, overlapped=overlapped)
        back = self._row_norm(self.other, self.residual)
        row_product(self.narrow[0], hidden, weights.gate_up, norm=back, gated=True, overlapped=overlapped)
        row_product(hidden, self.narrow[0], weights.down, overlapped=overlapped)
        return self.hidden

    def _row_norm(self, residual: Tensor, into: Tensor) -> RowNorm:
        return RowNorm(residual=residual[0], new_residual=into[0], weight=self.norm, epsilon=EPSILON)


def step_milliseconds(model: ModelShape, rows: int, *, overlapped: bool = False) -> float:
    step = DecodeStep(model, rows, overlapped=overlapped)
    assert step.logits.dtype == BF16
    return graph_microseconds([step], milliseconds=150) / 1000
