"""A cost model from first principles: bytes over bandwidth, products over rate, summed.

Owns the arithmetic of a step (matrix products, attention, elementwise traffic, LM head, copies, pictures) for a
model's shape on a device's rates. Parts are added, not overlapped, because that is how one stream runs them.
It knows no scheduler and no requests; everything that does not depend on the step is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from paceline.config.encoder import EncoderWork
from paceline.config.engine import PreemptionCosts, StepCosts
from paceline.costs.cost_model import CostModel, StepShape
from paceline.costs.network import CANDIDATE_BYTES, LEAD_S, LINKS, SUMS_PER_LAYER, Link, rank_shape
from paceline.costs.presets import (
    ENCODED_TOKENS,
    ENCODED_UNITS,
    DeviceSpec,
    EncoderShape,
    ModelShape,
    as_held,
    head_seconds,
    layers_seconds,
)
from paceline.errors import InputError

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
    encode_s: float = 0.0
    place_s: float = 0.0
    network_s: float = 0.0  # of several ranks: their sums, gathers, and plans told to them


class Roofline(CostModel):
    """Predicts a step of `model` on `device`, or on several of them that divide it as ranks over `link`."""

    def __init__(
        self, model: ModelShape, device: DeviceSpec, ranks: int = 1, link: Link = LINKS["nvlink4"]
    ) -> None:
        self.model = as_held(rank_shape(model, ranks), device)
        self.device = device
        self.ranks, self.link = ranks, link
        self._layers_s = layers_seconds(self.model, device)
        self._head_s = head_seconds(self.model, device)
        bandwidth = device.read_bandwidth * device.attention_efficiency
        self._kv_s = self.model.kv_bytes_per_token / bandwidth
        self._product_s = _attention_flops(self.model) / device.attention_flops
        self._elementwise_s = _elementwise_bytes(self.model) / bandwidth
        num_logits = self.model.head_vocab or self.model.vocab
        self._logits_s = _LOGIT_PASSES * num_logits * self.model.dtype_bytes / bandwidth
        self._copy_s = 1.0 / (ranks * device.host_link_bandwidth)  # each copies its own part
        self._place_s = 2 * self.model.kv_bytes_per_token / bandwidth  # read and written
        self._position_s = self._encode_product_s = 0.0
        if self.model.encoder is not None:
            self._position_s = _position_seconds(self.model, self.model.encoder, device)
            full_flops = 4.0 * self.model.encoder.hidden * self.model.encoder.full_share
            self._encode_product_s = full_flops / device.attention_flops

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
            encode_s=shape.encode_positions * self._position_s
            + shape.encode_products * self._encode_product_s,
            place_s=shape.placed_tokens * self._place_s,
            network_s=self._network_seconds(tokens, logit_rows) if self.ranks > 1 else 0.0,
        )

    def _network_seconds(self, tokens: int, logit_rows: int) -> float:
        """Sums behind both parts of every layer, and a gather of what each rank found in its part of the vocabulary."""
        sum_s = self.link.sum_seconds(tokens * self.model.hidden * self.model.dtype_bytes, self.ranks)
        gather_s = self.link.gather_seconds(logit_rows * CANDIDATE_BYTES * self.ranks, self.ranks)
        return LEAD_S + SUMS_PER_LAYER * self.model.layers * sum_s + gather_s


def _position_seconds(model: ModelShape, encoder: EncoderShape, device: DeviceSpec) -> float:
    """Of a position of an encoder's line: half of what one layer does with one unit.

    At the rate of layers of this size in a large step, as a group of pictures is one: a single small picture takes
    longer than this by the time in which the weights of the layers are read.
    """
    layer = replace(
        model, layers=1, hidden=encoder.hidden, intermediate=encoder.intermediate, gated=encoder.gated
    )
    layer = replace(layer, heads=encoder.hidden // layer.head_dim, kv_heads=encoder.hidden // layer.head_dim)
    more_s = layers_seconds(layer, device)
    layer_s = (more_s(2.0 * PROMPT_TOKENS) - more_s(PROMPT_TOKENS)) / PROMPT_TOKENS
    products_s = layer_s * encoder.unit_parameters / layer.layer_parameters
    window_flops = 4.0 * encoder.hidden * (1.0 - encoder.full_share) * encoder.window_units
    # Norms with their residuals, queries, keys and values with their rotation, attention's output, the inner layer.
    values = 16 * encoder.hidden + (3 if encoder.gated else 2) * encoder.intermediate
    bandwidth = device.read_bandwidth * device.attention_efficiency
    moved_s = values * model.dtype_bytes / bandwidth
    return (products_s + window_flops / device.attention_flops + moved_s) / 2.0


def _attention_flops(model: ModelShape) -> float:
    """Per token and token of context: a product with the key and one with the value, in every head. Where tokens see
    those behind them too, there are twice as many as a causal sum counts."""
    return (8.0 if model.bidirectional else 4.0) * model.layers * model.heads * model.head_dim


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


# What encoding costs beside tokens of prompts, by a model of steps: rows pay for it in tokens.


PROMPT_TOKENS = 2048  # of the step that stands for prompts
LINE_POSITIONS = 1 << 16  # of the line that stands for all
PAGE_VECTORS = 64


def encoder_work(cost: CostModel, encoder: EncoderShape, *, on_gpu: bool, whole: bool) -> EncoderWork:
    """An encoder as the scheduler knows it. A GPU computes whole layers; `whole`: all of them in one step."""
    seconds = cost.step_seconds
    less, more = (
        seconds(StepShape(prefill_tokens=tokens, logit_rows=1))
        for tokens in (PROMPT_TOKENS, 2 * PROMPT_TOKENS)
    )
    empty_s = seconds(StepShape(decode_rows=1))
    position_s = (
        seconds(StepShape(decode_rows=1, encode_positions=LINE_POSITIONS)) - empty_s
    ) / LINE_POSITIONS
    line = StepShape(decode_rows=1, encode_positions=LINE_POSITIONS, encode_products=LINE_POSITIONS << 10)
    product_s = (seconds(line) - empty_s) / LINE_POSITIONS - position_s
    if position_s <= 0.0 or more <= less:
        raise InputError(
            "the cost model says nothing of pictures: it was fitted to steps without them; use the roofline model"
        )
    return EncoderWork(
        layers=encoder.layers,
        num_pages=ENCODED_TOKENS // PAGE_VECTORS,
        max_units=ENCODED_UNITS if on_gpu else 1024,
        page_vectors=PAGE_VECTORS,
        token_positions=(more - less) / PROMPT_TOKENS / position_s,
        product_share=max(product_s, 0.0) / (1 << 10) / position_s,
        least="line" if whole else "layer" if on_gpu else "position",
    )


# What preemption costs by a model of steps: computing again, copying a block, waiting for a step.
#
# The shape of a large step of prompts and of a full step of decoding stand for all; the scheduler compares, it does
# not bill. Knows no scheduler.


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
