"""Building a decoder from stored tensors.

How matrices are kept is the storage's business: float32, in which the CPU computes whatever the file holds, or
quantised. Projections that read the same input are put together, so that a step makes fewer, larger products.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.models.decoder import Attention, Decoder, Layer, Parts
from paceline.models.files.stored import StoredTensor, TensorSource, check_finite
from paceline.models.layers import DenseLinear, Embedding, Experts, FeedForward, Linear, RMSNorm
from paceline.models.spec import ModelSpec
from paceline.models.together import Together

_WITH_TENSORS = ("paceline.models.decoder", "paceline.models.layers", "paceline.models.rope")
MAX_BUILDERS = 4  # threads; each holds a matrix or two while it works


class Storage(Protocol):
    """How matrices are kept in memory. Called from several threads at once, for different matrices."""

    def linear(self, weights: Sequence[StoredTensor], bias: Tensor | None) -> Linear:
        """Matrices that read the same input, stacked by rows into one."""
        ...

    def embedding(self, weight: StoredTensor) -> Linear:
        """Token numbers [tokens] to vectors [tokens, hidden]."""
        ...


class DenseStorage:
    """Everything as float32. A matrix that serves as embedding and as output is kept once."""

    def __init__(self, least_rows: int = 1) -> None:
        """`least_rows`: see `DenseLinear`."""
        self.least_rows = least_rows
        self._tables: dict[str, Tensor] = {}

    def linear(self, weights: Sequence[StoredTensor], bias: Tensor | None) -> Linear:
        parts = [
            self._tables[weight.name] if weight.name in self._tables else _float32(weight)
            for weight in weights
        ]
        return DenseLinear(parts[0] if len(parts) == 1 else torch.cat(parts), bias, self.least_rows)

    def embedding(self, weight: StoredTensor) -> Linear:
        return Embedding(self._tables.setdefault(weight.name, _float32(weight)))


def build_decoder(
    source: TensorSource,
    max_positions: int,
    storage: Storage | None = None,
    on_layer: Callable[[int, int], None] | None = None,
    together: Together | None = None,
) -> Decoder:
    """A decoder with the tensors of `source`, kept as `storage` says (float32 when nothing is said).

    `on_layer` is called with the number of layers loaded and of all layers. `together`: see `Decoder`.
    """
    spec = source.spec
    storage = DenseStorage() if storage is None else storage
    builder = _Builder(source, storage)
    # Unpacking and packing are large operations of numpy and torch, which let other threads run.
    with ThreadPoolExecutor(min(MAX_BUILDERS, os.cpu_count() or 1)) as threads:
        ends = threads.submit(builder.ends)  # first, because the largest matrix takes longest
        layers = []
        for layer in threads.map(builder.layer, range(spec.num_layers)):
            layers.append(layer)
            if on_layer is not None:
                on_layer(len(layers), spec.num_layers)
        embedding, head = ends.result()
    parts = Parts(embedding=embedding, layers=layers, norm=builder.norm("model.norm"), head=head)
    return Decoder(spec, parts, max_positions, together)


def move_to(part: object, device: torch.device) -> None:
    """Move the tensors of a decoder, or of a part of one, to a device, in place."""
    for name in getattr(part, "__slots__", None) or list(vars(part)):
        value = getattr(part, name)
        if isinstance(value, Tensor):
            setattr(part, name, value.to(device))
        for each in value if isinstance(value, list) else [value]:
            if type(each).__module__ in _WITH_TENSORS:
                move_to(each, device)


class _Builder:
    """Makes the parts of one decoder by their names."""

    def __init__(self, source: TensorSource, storage: Storage) -> None:
        self._source = source
        self._spec: ModelSpec = source.spec
        self._storage = storage
        self._names = source.names()

    def ends(self) -> tuple[Linear, Linear]:
        """The embedding and the output matrix, which may be one."""
        table = self._source.tensor("model.embed_tokens.weight")
        embedding = self._storage.embedding(table)
        if self._spec.tied_embeddings:
            return embedding, self._storage.linear([table], None)
        return embedding, self.linear("", ("lm_head",))

    def layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        sandwich = self._spec.sandwich_norms
        after_attention = prefix + "post_attention_layernorm"
        return Layer(
            attention=self._attention(prefix + "self_attn."),
            feed_forward=self._experts(prefix + "mlp.")
            if self._spec.has_experts(index)
            else self._feed_forward(prefix + "mlp."),
            norm_before_attention=self.norm(prefix + "input_layernorm"),
            # The name says where it stands, not what it is: without sandwich norms it belongs to the second part.
            norm_before_feed_forward=self.norm(
                prefix + "pre_feedforward_layernorm" if sandwich else after_attention
            ),
            norm_after_attention=self.norm(after_attention) if sandwich else None,
            norm_after_feed_forward=self.norm(prefix + "post_feedforward_layernorm") if sandwich else None,
        )

    def norm(self, name: str) -> RMSNorm:
        weight = _float32(self._source.tensor(name + ".weight"))
        return RMSNorm(weight + self._spec.norm_offset, self._spec.norm_eps)

    def linear(self, prefix: str, names: tuple[str, ...]) -> Linear:
        weights = [self._source.tensor(f"{prefix}{name}.weight") for name in names]
        biases = [f"{prefix}{name}.bias" for name in names]
        bias = None
        if biases[0] in self._names:
            bias = torch.cat([_float32(self._source.tensor(name)) for name in biases])
        return self._storage.linear(weights, bias)

    def _attention(self, prefix: str) -> Attention:
        return Attention(
            qkv=self.linear(prefix, ("q_proj", "k_proj", "v_proj")),
            output=self.linear(prefix, ("o_proj",)),
            head_norm=self._head_norm(prefix) if self._spec.qk_norm else None,
        )

    def _head_norm(self, prefix: str) -> RMSNorm:
        """One weight for each head: those of queries, then those of keys."""
        queries, keys = (self.norm(prefix + name).weight for name in ("q_norm", "k_norm"))
        counts = (self._spec.num_heads, self._spec.num_kv_heads)
        weight = torch.cat([queries.expand(counts[0], -1), keys.expand(counts[1], -1)])
        return RMSNorm(weight, self._spec.norm_eps)

    def _feed_forward(self, prefix: str) -> FeedForward:
        return FeedForward(
            self.linear(prefix, ("gate_proj", "up_proj")),
            self.linear(prefix, ("down_proj",)),
            self._spec.activation,
        )

    def _experts(self, prefix: str) -> Experts:
        experts = self._spec.experts
        assert experts is not None
        return Experts(
            DenseLinear(
                _float32(self._source.tensor(prefix + "gate.weight")),
                least_rows=getattr(self._storage, "least_rows", 1),
            ),
            [self._feed_forward(f"{prefix}experts.{index}.") for index in range(experts.num_experts)],
            experts.per_token,
            normalize=experts.normalize,
        )


def _float32(stored: StoredTensor) -> Tensor:
    values = stored.to_float32()
    check_finite(values, stored.name)
    # A view of the file is read-only, and must not keep the file's pages as the model's only copy.
    return torch.from_numpy(values if values.flags.writeable else np.array(values))
