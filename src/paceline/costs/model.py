"""The question every cost model answers: how long does a step of this shape take?

Owns the shape of a step as a cost model sees it, and the protocol. A shape is six sums: no rows, no
requests, no blocks, so that any caller can ask about a step it has not planned yet.
"""

from dataclasses import dataclass
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
