"""A cost model as the plain numbers a pace is kept by.

Asks a model about a few steps and writes down the differences, so that whoever composes steps needs no model. Exact
for a model that is linear in context, products and rows; for others it is right around the steps asked about.
"""

from collections.abc import Sequence
from itertools import accumulate

from paceline.config import StepCosts
from paceline.costs.model import CostModel, StepShape

# Sizes between which the time of a step hardly changes on a GPU: whole tiles of its products.
SIZES = (
    256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048, 2304, 2560, 2816, 3072,
    3584, 4096, 5120, 6144, 7168, 8192,
)  # fmt: skip
_CONTEXT, _PRODUCTS, _ROWS = 1 << 17, 1 << 21, 64


def step_costs(model: CostModel, sizes: Sequence[int] = SIZES) -> StepCosts:
    """What `model` says of steps with so many tokens."""

    def seconds(**shape: int) -> float:
        return model.step_seconds(StepShape(**shape))

    base = [seconds(prefill_tokens=size, logit_rows=1) for size in sizes]
    size = max(sizes[len(sizes) // 2], 2 * _ROWS)
    plain_s = seconds(prefill_tokens=size, logit_rows=1)

    def more_s(count: int, **shape: int) -> float:
        return max(0.0, (seconds(**shape) - plain_s) / count)

    return StepCosts(
        sizes=tuple(sizes),
        seconds=tuple(
            accumulate(base, max)
        ),  # a model may make a larger step shorter; a pace cannot use that
        context_s=more_s(_CONTEXT, prefill_tokens=size, logit_rows=1, decode_context=_CONTEXT),
        product_s=more_s(_PRODUCTS, prefill_tokens=size, logit_rows=1, prefill_context_products=_PRODUCTS),
        row_s=more_s(_ROWS, prefill_tokens=size - _ROWS, decode_rows=_ROWS, logit_rows=1 + _ROWS),
    )
