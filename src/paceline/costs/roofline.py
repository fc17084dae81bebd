"""A cost model from first principles: bytes over bandwidth, products over rate, summed.

Owns the arithmetic of a decoder step (matrix products, attention, elementwise traffic, LM head, copies) for a
model's shape on a device's rates. Parts are added, not overlapped, because that is how one stream runs them.
It knows no scheduler and no requests; everything that does not depend on the step is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from paceline.config.engine import PreemptionCosts, StepCosts
from paceline.costs.cost_model import CostModel, StepShape
from paceline.costs.presets import DeviceSpec, ModelShape, as_held, head_seconds, layers_seconds

_LOGIT_PASSES = 2  # sampling reads the logits about twice; writing them is part of the matrix product


class RooflineParts(NamedTuple):
    """Where the seconds of a step go."""

    fixed_s: float
    matmul_s: float
    elementwise_s: float
    decode_attention_s: float
    prefill_attention_s: float
    head_s: float
    copy_s: float


class Roofline(CostModel):
    """Predicts a step of `model` on `device`."""

    def __init__(self, model: ModelShape, device: DeviceSpec) -> None:
        self.model = as_held(model, device)
        self.device = device
        self._layers_s = layers_seconds(self.model, device)
        self._head_s = head_seconds(self.model, device)
        bandwidth = device.read_bandwidth * device.attention_efficiency
        self._kv_s = self.model.kv_bytes_per_token / bandwidth
        self._product_s = _attention_flops(self.model) / device.attention_flops
        self._elementwise_s = _elementwise_bytes(self.model) / bandwidth
        self._logits_s = _LOGIT_PASSES * self.model.vocab * self.model.dtype_bytes / bandwidth
        self._copy_s = 1.0 / device.host_link_bandwidth

    def step_seconds(self, shape: StepShape) -> float:
        return sum(self.parts(shape))

    def parts(self, shape: StepShape) -> RooflineParts:
        """The same seconds, one number per kind of work."""
        prefill_tokens = shape.prefill_tokens
        tokens = shape.decode_rows + prefill_tokens
        logit_rows = shape.logit_rows
        prefill = 0.0
        if prefill_tokens:
            products = shape.prefill_context_products
            # A short span at the end of a long context is a read of that context, not arithmetic. How many
            # spans there are is not known here, so one read of the mean context is the least it can cost.
            prefill = max(products * self._product_s, products / prefill_tokens * self._kv_s)
        return RooflineParts(
            fixed_s=self.device.fixed_step_s,
            matmul_s=self._layers_s(tokens) if tokens else 0.0,
            elementwise_s=tokens * self._elementwise_s,
            decode_attention_s=shape.decode_context * self._kv_s,
            prefill_attention_s=prefill,
            head_s=self._head_s(logit_rows) + logit_rows * self._logits_s if logit_rows else 0.0,
            copy_s=shape.copy_bytes * self._copy_s,
        )


def _attention_flops(model: ModelShape) -> float:
    """Per token and token of context: a product with the key and one with the value, in every head."""
    return 4.0 * model.layers * model.heads * model.head_dim


def _elementwise_bytes(model: ModelShape) -> float:
    """Bytes a token moves outside matrix products: two norms with their residuals, rotary and the KV write,
    attention's own query and output, and the gate."""
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norms = 8 * model.hidden
    rotary = 2 * (query + 2 * kv) + 2 * kv
    attention = 2 * query
    gate = 3 * model.intermediate
    return float(model.layers * (norms + rotary + attention + gate) * model.dtype_bytes)


# A cost model as the plain numbers a pace is kept by.
#
# Asks a model about a few steps and writes down the differences, so that composing a step needs no model.
# Exact for a model that is linear in context, products and rows; for others it is right around the steps asked
# about.


# Sizes between which the time of a step hardly changes on a GPU: whole tiles of its products.
SIZES = (
    256, 384, 512, 640, 768, 896, 1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048, 2304, 2560, 2816, 3072,
    3584, 4096, 5120, 6144, 7168, 8192,
)  # fmt: skip
_CONTEXT, _PRODUCTS, _ROWS = 1 << 17, 1 << 21, 64


def step_costs(model: CostModel, sizes: Sequence[int] = SIZES) -> StepCosts:
    """What `model` says of steps by their tokens."""

    def seconds(**shape: int) -> float:
        return model.step_seconds(StepShape(**shape))

    base = [seconds(prefill_tokens=size, logit_rows=1) for size in sizes]
    size = max(sizes[len(sizes) // 2], 2 * _ROWS)
    plain_s = seconds(prefill_tokens=size, logit_rows=1)

    def more_s(count: int, **shape: int) -> float:
        return max(0.0, (seconds(**shape) - plain_s) / count)

    return StepCosts(
        sizes=tuple(sizes),
        # A model may make a larger step shorter; a pace cannot use that.
        seconds=tuple(accumulate(base, max)),
        context_s=more_s(_CONTEXT, prefill_tokens=size, logit_rows=1, decode_context=_CONTEXT),
        product_s=more_s(_PRODUCTS, prefill_tokens=size, logit_rows=1, prefill_context_products=_PRODUCTS),
        row_s=more_s(_ROWS, prefill_tokens=size - _ROWS, decode_rows=_ROWS, logit_rows=1 + _ROWS),
    )


# What preemption costs by a model of steps: computing again, copying a block, waiting for a step.
#
# The shape of a large step of prompts and of a full step of decoding stand for all; the scheduler compares, it does
# not bill. Knows no scheduler.


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
