"""One decoder-only transformer with explicit options: Llama, Mistral, Qwen, Gemma, Phi-3 and their mixtures.

`forward` takes all tokens of a step, whatever rows they belong to, as one flat batch. What ties tokens of a row
together is `attend`, given by the runner: it stores keys and values and reads what each token may see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.adapters import OUTPUT, QKV, StepAdapters
from paceline.models.layers import AddTo, Experts, FeedForward, Linear, RMSNorm
from paceline.models.rope import Rotary, rotate
from paceline.models.spec import ModelSpec
from paceline.models.together import Alone, Together

# layer, queries [tokens, heads, head_dim], keys and values [tokens, kv heads, head_dim] -> [tokens, heads * head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Attention:
    """Projections of one layer's attention."""

    qkv: Linear  # queries, keys and values as one product
    output: Linear
    head_norm: RMSNorm | None = None  # over each head of queries and keys


@dataclass(slots=True)
class Layer:
    """One layer. The two norms behind the parts exist only where the model has them."""

    attention: Attention
    feed_forward: FeedForward | Experts
    norm_before_attention: RMSNorm
    norm_before_feed_forward: RMSNorm
    norm_after_attention: RMSNorm | None = None
    norm_after_feed_forward: RMSNorm | None = None


@dataclass(slots=True)
class Parts:
    """Everything a decoder is made of."""

    embedding: Linear  # token numbers to vectors
    layers: list[Layer]
    norm: RMSNorm
    head: Linear


class SeenPictures(NamedTuple):
    """What a step sees of pictures."""

    tokens: Tensor  # which of the step's stand for vectors
    vectors: Tensor  # what each of them is, and behind it what the first layers add
    # [3, tokens] of all of the step: see `models.patches`; None: they turn by their positions
    turns: Tensor | None


class Decoder:
    """Tokens in, hidden states out; logits only for the tokens that are asked about."""

    def __init__(
        self, spec: ModelSpec, parts: Parts, max_positions: int, together: Together | None = None
    ) -> None:
        """`together`: the ranks of a model of which `parts` are those of one."""
        self.spec = spec
        self.parts = parts
        self._together = Alone() if together is None else together
        self._rotaries = [Rotary(rope, max_positions) for rope in spec.ropes]
        self._heads = [spec.num_heads + spec.num_kv_heads, spec.num_kv_heads]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        lengths: Tensor,
        attend: Attend,
        tapped: dict[int, Tensor] | None = None,
        adapters: StepAdapters | None = None,
        pictures: SeenPictures | None = None,
    ) -> Tensor:
        """Hidden states [tokens, hidden] behind the last norm. `lengths`: see `Rotary.cos_sin`. `tapped`: gets the
        hidden states before the layers it has as keys. `adapters`: of the tokens, where any has one. `pictures`: those
        that rows of the step have."""
        by = None if pictures is None else pictures.turns
        turns = [rotary.cos_sin(positions, lengths, by) for rotary in self._rotaries]
        x = self.parts.embedding(tokens)
        if self.spec.embed_scale != 1.0:
            x = x * self.spec.embed_scale
        if pictures is not None:  # as the encoder made them: no scale
            x[pictures.tokens] = pictures.vectors[:, : self.spec.hidden_size]
        for index, layer in enumerate(self.parts.layers):
            if tapped is not None and index in tapped:
                tapped[index] = x
            cos, sin = turns[self.spec.layer_ropes[index]]
            add = None if adapters is None else partial(adapters.add, index)
            x = self._layer(index, layer, x, cos, sin, attend, add)
            if pictures is not None and index < self.spec.num_deep:
                own = slice((index + 1) * self.spec.hidden_size, (index + 2) * self.spec.hidden_size)
                x[pictures.tokens] += pictures.vectors[:, own]
        if tapped is not None and len(self.parts.layers) in tapped:
            tapped[len(self.parts.layers)] = x
        return self.parts.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._together.gather(self.parts.head(hidden), self.spec.vocab_size)

    def _layer(
        self,
        index: int,
        layer: Layer,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        add: AddTo | None,
    ) -> Tensor:
        mixed = self._attention(index, layer.attention, layer.norm_before_attention(x), cos, sin, attend, add)
        if layer.norm_after_attention is not None:
            mixed = layer.norm_after_attention(mixed)
        x = x + mixed
        feed_forward, normed = layer.feed_forward, layer.norm_before_feed_forward(x)
        if isinstance(feed_forward, FeedForward):
            fed = feed_forward(normed, add)
        else:  # experts have no adapters
            fed = feed_forward(normed)
        fed = self._together.sum(fed)
        if layer.norm_after_feed_forward is not None:
            fed = layer.norm_after_feed_forward(fed)
        return x + fed

    def _attention(
        self,
        index: int,
        part: Attention,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        add: AddTo | None,
    ) -> Tensor:
        # Queries and keys are normed and turned together: the same for both, and half the operations.
        product = part.qkv(x)
        if add is not None:
            add(QKV, x, product)
        heads = product.view(len(x), -1, self.spec.head_dim)
        turning, values = torch.split(heads, self._heads, dim=1)
        if part.head_norm is not None:
            turning = part.head_norm(turning)
        turned = rotate(turning, cos, sin)
        queries, keys = torch.split(turned, [self.spec.num_heads, self.spec.num_kv_heads], dim=1)
        mixed = attend(index, queries, keys, values)
        out = part.output(mixed)
        if add is not None:
            add(OUTPUT, mixed, out)
        return self._together.sum(out)
