"""A tensor as it lies in a file: name, shape, type and bytes, and how a model's tensors are asked for.

Names are those of Hugging Face's Llama layout whatever the file calls them, so that the decoder knows one set of
names (see `tensor_names`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """One tensor. `raw` is a read-only view of the file (no copy); `decode` turns it into float32.

    `raw` has one dimension. Rows lie whole, one behind the other, quantised ones too. Where a file keeps rows in
    another order it is a read-only copy, made when the tensor is asked for.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # F32, F16, BF16, or a GGUF type such as Q4_1
    raw: NDArray[np.uint8]
    decode: Callable[[StoredTensor], NDArray[np.float32]]

    def to_float32(self) -> NDArray[np.float32]:
        """The values, in the tensor's shape; a new array, or a view where the file holds float32."""
        return self.decode(self)


def check_finite(values: NDArray[np.float32], name: str) -> None:
    """Refuse values with NaN or infinity among them: a model that has any answers no request.

    A sum tells, at the speed of memory; only one that is not finite is looked at again.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        is_finite = bool(np.isfinite(values.sum()))
    if not is_finite and not np.isfinite(values).all():
        raise CheckpointError(
            f"the tensor {name} holds values that are not finite (NaN or infinity): the model's files are damaged; "
            "download or convert the model again"
        )


class TensorSource(Protocol):
    """Where a model's tensors come from."""

    spec: ModelSpec

    def names(self) -> frozenset[str]: ...

    def tensor(self, name: str) -> StoredTensor: ...


def tensor_names(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor the decoder of `spec` needs, with its shape ([out, in] for matrices)."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        for part, width in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}self_attn.{part}_proj.weight", (width, hidden)
            if spec.qkv_bias:
                yield f"{prefix}self_attn.{part}_proj.bias", (width,)
        yield prefix + "self_attn.o_proj.weight", (hidden, queries)
        if spec.output_bias:
            yield prefix + "self_attn.o_proj.bias", (hidden,)
        if spec.qk_norm:
            yield prefix + "self_attn.q_norm.weight", (spec.head_dim,)
            yield prefix + "self_attn.k_norm.weight", (spec.head_dim,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if spec.sandwich_norms:
            yield prefix + "pre_feedforward_layernorm.weight", (hidden,)
            yield prefix + "post_feedforward_layernorm.weight", (hidden,)
        if spec.experts is not None and spec.has_experts(layer):
            yield prefix + "mlp.gate.weight", (spec.experts.num_experts, hidden)
            for expert in range(spec.experts.num_experts):
                yield from _feed_forward(
                    f"{prefix}mlp.experts.{expert}.", hidden, spec.experts.intermediate_size
                )
        else:
            yield from _feed_forward(prefix + "mlp.", hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not spec.tied_embeddings:
        yield "lm_head.weight", (spec.vocab_size, hidden)


def num_parameters(spec: ModelSpec) -> int:
    """How many values the model's tensors hold."""
    return sum(math.prod(shape) for _, shape in tensor_names(spec))


def _feed_forward(prefix: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (inner, hidden)
    yield prefix + "up_proj.weight", (inner, hidden)
    yield prefix + "down_proj.weight", (hidden, inner)
