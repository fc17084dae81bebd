"""What preemption costs by a model of steps: computing again, copying a block, waiting for a step.

The shape of a large step of prompts and of a full step of decoding stand for all; the scheduler compares, it does not
bill. Knows no scheduler.
"""

from __future__ import annotations

from paceline.config import PreemptionCosts
from paceline.costs.model import CostModel, StepShape

PROMPT_TOKENS = 2048  # of the step that stands for computing again
CONTEXT = 1024  # tokens that a decoding row reads


def preemption_costs(cost: CostModel, *, block_bytes: int, num_rows: int) -> PreemptionCosts:
    """Costs of one token, one block and one step; `num_rows` are as many as usually decode together."""
    seconds = cost.step_seconds
    empty_s = seconds(StepShape(decode_rows=1))
    prompt_s = seconds(StepShape(decode_rows=1, prefill_tokens=PROMPT_TOKENS)) - empty_s
    far = StepShape(
        decode_rows=1, prefill_tokens=PROMPT_TOKENS, prefill_context_products=PROMPT_TOKENS * CONTEXT
    )
    product_s = (seconds(far) - empty_s - prompt_s) / (PROMPT_TOKENS * CONTEXT)
    copy_s = seconds(StepShape(decode_rows=1, copy_bytes=block_bytes)) - empty_s
    full = StepShape(decode_rows=num_rows, decode_context=num_rows * CONTEXT, logit_rows=num_rows)
    return PreemptionCosts(
        token_s=max(prompt_s, 0.0) / PROMPT_TOKENS,
        product_s=max(product_s, 0.0),
        block_s=max(copy_s, 0.0),
        step_s=seconds(full),
    )
