"""What a model's steps amount to in arithmetic and in memory traffic, from sums that a scheduler keeps.

Estimates from the model's shape, for the share of a device's peak that is used: every layer is counted as if it saw
the whole context, and keys and values that prompts read are left out. Knows no checkpoint and no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """What so many steps with so many tokens came to."""
    flops = tokens * model.token_flops + products * model.product_flops + logit_rows * model.logit_flops
    read_bytes = None
    if model.step_bytes is not None:
        read_bytes = steps * model.step_bytes + decode_context * model.kv_token_bytes
    return WorkDone(flops=flops, read_bytes=read_bytes, written_bytes=tokens * model.kv_token_bytes)
