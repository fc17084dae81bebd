"""Models that guess the next tokens of a larger one: EAGLE-3 and medusa heads, and small models of the same vocabulary.

All three are asked the same way. A *state* goes with each token: what the large model thought before it (the fused
hidden states of the token before, for an eagle head). `store` takes tokens that are certain and keeps what later
guesses read; `guess` takes one token of each row and gives logits of the token behind it. Keys of a token lie at that
token's slot, in further layers of the large model's blocks, and depend on no later token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.decoder import Decoder
from paceline.models.files.head_folder import EMBEDDING, LAYER, HeadFiles, HeadSpec
from paceline.models.layers import ACTIVATIONS, Linear
from paceline.models.rope import Rotary, rotate
from paceline.models.spec import FurtherLayer

Weights = Mapping[str, Tensor]


class FurtherAttention(Protocol):
    """Attention over the further layers, which are counted from 0."""

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor: ...

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep keys and values without reading any."""
        ...


class DraftNet(Protocol):
    """A model that guesses. Tensors are flat over tokens, as in `Decoder.forward`."""

    name: str
    layers: tuple[FurtherLayer, ...]
    taps: tuple[int, ...]  # hidden states of the large model that it reads: before the layer of this number
    state_size: int
    most: int  # tokens it can guess in a row
    softmax_scale: float
    to_target: NDArray[np.int64] | None  # the large model's number of each token it can guess; None: the same

    def states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """What goes with the token behind each token; `hidden`: of the large model, behind its last norm."""
        ...

    def store(
        self, tokens: Tensor, states: Tensor, positions: Tensor, lengths: Tensor, attend: FurtherAttention
    ) -> None: ...

    def guess(
        self,
        depth: int,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        lengths: Tensor,
        attend: FurtherAttention,
    ) -> tuple[Tensor, Tensor]:
        """Logits of the token behind each, and the state that goes with that one. `depth`: guesses before this one."""
        ...


class EagleHead:
    """Three hidden states fused, the token's embedding beside them, one layer, a reduced vocabulary."""

    name = "eagle"
    layers: tuple[FurtherLayer, ...]
    to_target: NDArray[np.int64] | None
    most = 64

    def __init__(
        self,
        spec: HeadSpec,
        weights: Weights,
        embedding: Linear,
        to_target: NDArray[np.int64],
        positions: int,
    ) -> None:
        layer = spec.layer
        assert layer is not None
        self._layer = layer
        self._weights = weights
        self._embedding = embedding
        if EMBEDDING in weights:
            self._embedding = lambda tokens: F.embedding(tokens, weights[EMBEDDING])
        self._rotary = Rotary(layer.ropes[0], positions)
        self._activation = ACTIVATIONS[layer.activation]
        self.layers = (FurtherLayer(layer.num_kv_heads, layer.head_dim),)
        self.taps = spec.taps
        self.state_size = spec.hidden_size
        self.softmax_scale = layer.softmax_scale
        self.to_target = to_target

    def states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        return F.linear(torch.cat(tuple(tapped), dim=-1), self._weights["fc.weight"])

    def store(
        self, tokens: Tensor, states: Tensor, positions: Tensor, lengths: Tensor, attend: FurtherAttention
    ) -> None:
        # There is one layer: keys and values need nothing that attention gives.
        x = self._input(tokens, states)
        attend.store(0, self._turned(x, "k", positions, lengths), self._part(x, "v"))

    def guess(
        self,
        depth: int,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        lengths: Tensor,
        attend: FurtherAttention,
    ) -> tuple[Tensor, Tensor]:
        x = self._input(tokens, states)
        queries, keys = (self._turned(x, part, positions, lengths) for part in ("q", "k"))
        mixed = attend(0, queries, keys, self._part(x, "v"))
        states = states + F.linear(mixed, self._weights[f"{LAYER}self_attn.o_proj.weight"])
        fed = self._norm(f"{LAYER}post_attention_layernorm", states)
        gate, up = (F.linear(fed, self._weights[f"{LAYER}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        states = states + F.linear(self._activation(gate) * up, self._weights[f"{LAYER}mlp.down_proj.weight"])
        return F.linear(self._norm("norm", states), self._weights["lm_head.weight"]), states

    def _input(self, tokens: Tensor, states: Tensor) -> Tensor:
        embedded = self._norm(f"{LAYER}input_layernorm", self._embedding(tokens))
        return torch.cat((embedded, self._norm(f"{LAYER}hidden_norm", states)), dim=-1)

    def _part(self, x: Tensor, part: str) -> Tensor:
        heads = F.linear(x, self._weights[f"{LAYER}self_attn.{part}_proj.weight"])
        return heads.view(len(x), -1, self._layer.head_dim)

    def _turned(self, x: Tensor, part: str, positions: Tensor, lengths: Tensor) -> Tensor:
        cos, sin = self._rotary.cos_sin(positions, lengths)
        return rotate(self._part(x, part), cos.to(x.device), sin.to(x.device))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(x, (x.shape[-1],), weight, self._layer.norm_eps)


class MedusaHead:
    """A residual block and an output matrix for each token ahead, all from the last hidden state; no keys."""

    name = "medusa"
    layers: tuple[FurtherLayer, ...] = ()
    taps: tuple[int, ...] = ()
    softmax_scale = 1.0
    to_target: NDArray[np.int64] | None

    def __init__(self, spec: HeadSpec, weights: Weights, to_target: NDArray[np.int64]) -> None:
        self._weights = weights
        self.state_size = spec.hidden_size
        self.most = spec.num_heads
        self.to_target = to_target

    def states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        return hidden

    def store(
        self, tokens: Tensor, states: Tensor, positions: Tensor, lengths: Tensor, attend: FurtherAttention
    ) -> None:
        return None

    def guess(
        self,
        depth: int,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        lengths: Tensor,
        attend: FurtherAttention,
    ) -> tuple[Tensor, Tensor]:
        weights, prefix = self._weights, f"medusa_head.{depth}."
        inner = F.linear(states, weights[f"{prefix}0.linear.weight"], weights[f"{prefix}0.linear.bias"])
        return F.linear(states + F.silu(inner), weights[f"{prefix}1.weight"]), states


class DraftModel:
    """A smaller model of the same vocabulary."""

    name = "draft_model"
    taps: tuple[int, ...] = ()
    layers: tuple[FurtherLayer, ...]
    state_size = 0
    most = 64
    to_target: NDArray[np.int64] | None = None

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.spec
        self._decoder = decoder
        self.layers = tuple(FurtherLayer(spec.num_kv_heads, spec.head_dim, window) for window in spec.windows)
        self.softmax_scale = spec.softmax_scale

    def states(self, tapped: Sequence[Tensor], hidden: Tensor) -> Tensor:
        return hidden[:, :0]

    def store(
        self, tokens: Tensor, states: Tensor, positions: Tensor, lengths: Tensor, attend: FurtherAttention
    ) -> None:
        self._decoder.forward(tokens, positions, lengths, attend)

    def guess(
        self,
        depth: int,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        lengths: Tensor,
        attend: FurtherAttention,
    ) -> tuple[Tensor, Tensor]:
        return self._decoder.logits(self._decoder.forward(tokens, positions, lengths, attend)), states


def build_head(files: HeadFiles, embedding: Linear, positions: int) -> EagleHead | MedusaHead:
    """A head with the tensors of a folder; `embedding` is the large model's."""
    weights = {name: torch.from_numpy(np.array(values)) for name, values in files.tensors.items()}
    if files.spec.kind == "medusa":
        return MedusaHead(files.spec, weights, files.to_target)
    return EagleHead(files.spec, weights, embedding, files.to_target, positions)
