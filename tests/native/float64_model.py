"""A quantised Llama in float64: what the native kernels compute, without their rounding of sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.adapter_files import Adapter
from paceline.models.files.stored import TensorSource
from paceline.runner.native.arena import kinds_of, matrix_names
from paceline.runner.native.layout import Q8_FINE
from tests.native.matrices import group_scales

Doubles = NDArray[np.float64]


class Float64Model:
    """Logits of whole sequences; `rounds_inputs`: inputs of products have eight bits, or sixteen, as in the kernels;
    those of an adapter's have not."""

    def __init__(
        self, source: TensorSource, *, rounds_inputs: bool = True, adapter: Adapter | None = None
    ) -> None:
        spec = source.spec
        assert spec.experts is None and not (spec.qk_norm or spec.qkv_bias or spec.sandwich_norms)
        self._source, self._spec, self._rounds = source, spec, rounds_inputs
        kinds = kinds_of(map(source.tensor, matrix_names(spec)), "auto")
        self._input_bytes = 2 if Q8_FINE in kinds.values() else 1
        self._added = {} if adapter is None else adapter.parts

    def logits(self, tokens: Sequence[int], seen: NDArray[np.bool_] | None = None) -> Doubles:
        """[tokens, vocabulary]; `seen` [tokens, tokens]: which tokens each may see."""
        spec = self._spec
        self._seen = np.ones((len(tokens), len(tokens)), np.bool_) if seen is None else seen
        x = self._weight("model.embed_tokens")[list(tokens)]
        for layer in range(spec.num_layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(layer, prefix + "self_attn.", self._norm(prefix + "input_layernorm", x))
            inner = self._norm(prefix + "post_attention_layernorm", x)
            gate, up = (self._product(f"{prefix}mlp.{part}_proj", inner) for part in ("gate", "up"))
            x = x + self._product(prefix + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)
        head = "model.embed_tokens" if spec.tied_embeddings else "lm_head"
        return self._product(head, self._norm("model.norm", x))

    def _attention(self, layer: int, prefix: str, x: Doubles) -> Doubles:
        spec, count = self._spec, len(x)
        heads = [self._product(f"{prefix}{part}_proj", x).reshape(count, -1, spec.head_dim) for part in "qkv"]
        queries, keys = self._rotated(heads[0]), self._rotated(heads[1])
        group = spec.num_heads // spec.num_kv_heads
        keys, values = keys.repeat(group, axis=1), heads[2].repeat(group, axis=1)
        scores = np.einsum("qhd,khd->hqk", queries, keys) * spec.softmax_scale
        distance = np.arange(count)[:, None] - np.arange(count)
        seen = (distance >= 0) & (distance < (spec.windows[layer] or count)) & self._seen
        weights = np.exp(np.where(seen, scores, -np.inf) - scores.max(axis=-1, keepdims=True))
        found = np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), values)
        return self._product(prefix + "o_proj", found.reshape(count, -1))

    def _rotated(self, heads: Doubles) -> Doubles:
        rope = self._spec.ropes[0]
        half = rope.rotary_dim // 2
        angle = np.outer(np.arange(len(heads)), rope.theta ** (-np.arange(half) / half))[:, None]
        one, other = heads[..., :half], heads[..., half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)

    def _norm(self, name: str, x: Doubles) -> Doubles:
        size = np.sqrt((x**2).mean(axis=-1, keepdims=True) + self._spec.norm_eps)
        found: Doubles = x / size * self._weight(name)
        return found

    def _product(self, name: str, x: Doubles) -> Doubles:
        more: Doubles | float = 0.0
        if name.startswith("model.layers."):
            pair = self._added.get((int(name.split(".")[2]), name.split(".")[-1].removesuffix("_proj")))
            if pair is not None:
                more = x @ pair.a.astype(np.float64).T @ pair.b.astype(np.float64).T
        if self._rounds:
            q, scale = group_scales(x.astype(np.float32), self._input_bytes)
            x = (q * scale[..., None]).reshape(x.shape)
        found: Doubles = x @ self._weight(name).T + more
        return found

    def _weight(self, name: str) -> Doubles:
        return self._source.tensor(f"{name}.weight").to_float32().astype(np.float64)
