"""The question every cost model answers: how long does a step of this shape take?

Owns the shape of a step as a cost model sees it, and the protocol. A shape is a few sums: no rows, no
requests, no blocks, so that any caller can ask about a step it has not planned yet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step does. Tokens computed only to be thrown away (padding) are counted like any other."""

    decode_rows: int = 0  # rows that compute one token
    decode_context: int = 0  # sum of those rows' context lengths: tokens of KV that are read
    prefill_tokens: int = 0  # tokens in spans, of all rows together
    prefill_context_products: int = 0  # sum over span tokens of the context each attends to, itself included
    logit_rows: int = 0  # rows that go through the LM head and are sampled
    copy_bytes: int = 0  # bytes over the host link: swaps in and out
    encode_positions: int = 0  # of an encoder's line, which has two for each of its layers and each unit
    encode_products: int = 0  # pairs of a position and a unit it attends to, as if every layer saw all units
    placed_tokens: int = 0  # whose keys and values are copied from elsewhere

    @property
    def tokens(self) -> int:
        """Tokens that pass through the layers."""
        return self.decode_rows + self.prefill_tokens


class CostModel(Protocol):
    """Predicts the duration of a step. Pure: the same shape always gives the same answer."""

    def step_seconds(self, shape: StepShape) -> float: ...


def span_context_products(start: int, num_tokens: int) -> int:
    """`prefill_context_products` of one span whose first token has `start` tokens before it."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


class PiecewiseLinear:
    """Straight lines through (knot, value); constant before the first knot, `tail_slope` after the last.

    Plain floats and a bisection, because it is evaluated for every simulated step.
    """

    __slots__ = ("_knots", "_slopes", "_values")

    def __init__(self, knots: Sequence[float], values: Sequence[float], tail_slope: float) -> None:
        assert len(knots) == len(values) >= 1
        assert all(left < right for left, right in pairwise(knots))
        between = [(values[i + 1] - values[i]) / (knots[i + 1] - knots[i]) for i in range(len(knots) - 1)]
        # One entry per interval, the first being the constant part, so that a bisection is the index.
        self._knots = tuple(float(knot) for knot in knots)
        self._values = (float(values[0]), *(float(value) for value in values))
        self._slopes = (0.0, *between, tail_slope)

    def __call__(self, x: float) -> float:
        index = bisect_right(self._knots, x)
        origin = self._knots[index - 1] if index else x
        return self._values[index] + self._slopes[index] * (x - origin)


# What a model's steps amount to in arithmetic and in memory traffic, from sums that a scheduler keeps.
#
# Estimates from the model's shape, for the share of a device's peak that is used: every layer is counted as if it
# saw the whole context, and keys and values that prompts read are left out. Knows no checkpoint and no scheduler.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What one of each thing costs."""

    token_flops: float  # of a token in all layers, without attention
    product_flops: float  # of a token's attention to one token of its context
    logit_flops: float  # of a row whose next token is drawn
    kv_token_bytes: float  # keys and values of a token
    step_bytes: float | None  # weights that a step reads; None where that depends on its tokens (experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDone:
    """FLOPs and bytes of memory of all steps so far."""

    flops: float
    read_bytes: float | None
    written_bytes: float


def work_done(
    model: ModelWork, *, steps: int, tokens: int, products: int, decode_context: int, logit_rows: int
) -> WorkDone:
    """The work of all steps so far, from their number and their tokens."""
    flops = tokens * model.token_flops + products * model.product_flops + logit_rows * model.logit_flops
    read_bytes = None
    if model.step_bytes is not None:
        read_bytes = steps * model.step_bytes + decode_context * model.kv_token_bytes
    return WorkDone(flops=flops, read_bytes=read_bytes, written_bytes=tokens * model.kv_token_bytes)
