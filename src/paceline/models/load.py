"""Building a decoder from stored tensors.

Weights become float32: the CPU computes in it whatever the file holds. Projections that read the same input are
put together into one matrix, so that a step makes fewer, larger products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.checkpoint.spec import ModelSpec
from paceline.checkpoint.stored import StoredTensor, TensorSource
from paceline.models.decoder import Attention, Decoder, Layer, Parts
from paceline.models.layers import DenseLinear, Experts, FeedForward, Linear, RMSNorm

# Matrices that read the same input, stacked by rows, and their biases or None.
MakeLinear = Callable[[Sequence[StoredTensor], Tensor | None], Linear]


def dense_linear(weights: Sequence[StoredTensor], bias: Tensor | None) -> Linear:
    return DenseLinear(torch.cat([_float32(weight) for weight in weights]), bias)


def build_decoder(
    source: TensorSource, max_positions: int, make_linear: MakeLinear = dense_linear
) -> Decoder:
    """A decoder with the tensors of `source`; `make_linear` chooses how matrices are kept."""
    spec = source.spec
    builder = _Builder(source, make_linear)
    embedding = _float32(source.tensor("model.embed_tokens.weight"))
    if spec.tied_embeddings:
        head = make_linear([source.tensor("model.embed_tokens.weight")], None)
        if isinstance(head, DenseLinear):
            head.weight = embedding  # one copy serves both ends
    else:
        head = builder.linear("", ("lm_head",))
    parts = Parts(
        embedding=embedding,
        layers=[builder.layer(index) for index in range(spec.num_layers)],
        norm=builder.norm("model.norm"),
        head=head,
    )
    return Decoder(spec, parts, max_positions)


class _Builder:
    """Makes the parts of one decoder by their names."""

    def __init__(self, source: TensorSource, make_linear: MakeLinear) -> None:
        self._source = source
        self._spec: ModelSpec = source.spec
        self._make_linear = make_linear
        self._names = source.names()

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
        return self._make_linear(weights, bias)

    def _attention(self, prefix: str) -> Attention:
        normed = self._spec.qk_norm
        return Attention(
            qkv=self.linear(prefix, ("q_proj", "k_proj", "v_proj")),
            output=self.linear(prefix, ("o_proj",)),
            q_norm=self.norm(prefix + "q_norm") if normed else None,
            k_norm=self.norm(prefix + "k_norm") if normed else None,
        )

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
            dense_linear([self._source.tensor(prefix + "gate.weight")], None),
            [self._feed_forward(f"{prefix}experts.{index}.") for index in range(experts.num_experts)],
            experts.per_token,
            normalize=experts.normalize,
        )


def _float32(stored: StoredTensor) -> Tensor:
    values = stored.to_float32()
    # A view of the file is read-only, and must not keep the file's pages as the model's only copy.
    return torch.from_numpy(values if values.flags.writeable else np.array(values))
