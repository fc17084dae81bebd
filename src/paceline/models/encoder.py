"""One bidirectional transformer over ragged sequences, as there is one decoder: BERT, XLM-RoBERTa and ModernBERT.

All sequences of a step are one flat batch without padding. What ties the tokens of a sequence together is attention,
which takes sequences of equal length together. Float32 on a CPU, in torch: the reference for the native kernels, and
the way of models that they do not cover.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from paceline.models.files.encoder import layer_norms
from paceline.models.files.stored import TensorSource, check_finite
from paceline.models.layers import ACTIVATIONS
from paceline.models.rope import Rotary, rotate
from paceline.models.spec import ModelSpec

Index = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(slots=True)
class Affine:
    """A product or a norm: a weight, and a bias where there is one."""

    weight: Tensor
    bias: Tensor | None

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, eps)


@dataclass(slots=True)
class EncoderLayer:
    """One layer."""

    qkv: Affine  # queries, keys and values as one product
    mixed: Affine
    inner: Affine
    up: Affine | None
    outer: Affine
    norms: list[Affine | None]  # of attention and of the feed-forward part, before or behind them


class Encoder:
    """Sequences in, hidden states out."""

    def __init__(self, spec: ModelSpec, source: TensorSource) -> None:
        assert spec.encoder is not None
        self.spec, self._options = spec, spec.encoder
        read = _Reader(source)
        self._words = read("embeddings.word_embeddings.weight")
        self._places: Tensor | None = None
        self._second: Tensor | None = None
        if not spec.ropes:
            # Nearly all tokens are of the first type; those of the second text of a pair differ from it by this.
            types = read("embeddings.token_type_embeddings.weight")
            self._places = (
                read("embeddings.position_embeddings.weight")[self._options.position_offset :] + types[0]
            )
            self._second = types[1] - types[0] if len(types) > 1 else None
        self._ropes = [Rotary(rope, spec.max_positions) for rope in spec.ropes]
        self._norm = read.affine("embeddings.LayerNorm")
        self._layers = [self._read_layer(read, layer) for layer in range(spec.num_layers)]
        self._last = read.affine("final_norm") if self._options.norm_first else None

    def _read_layer(self, read: _Reader, layer: int) -> EncoderLayer:
        prefix = f"encoder.layer.{layer}."
        norms: list[Affine | None] = [read.affine(name) for name in layer_norms(self.spec, layer)]
        return EncoderLayer(
            qkv=read.affine(*(f"{prefix}attention.self.{part}" for part in ("query", "key", "value"))),
            mixed=read.affine(prefix + "attention.output.dense"),
            inner=read.affine(prefix + "intermediate.dense"),
            up=read.affine(prefix + "intermediate.up") if self._options.is_gated else None,
            outer=read.affine(prefix + "output.dense"),
            norms=norms if len(norms) == 2 else [None, *norms],
        )

    @torch.inference_mode()
    def forward(
        self, texts: Sequence[Index], beat: Callable[[], None], seconds: Sequence[int] = ()
    ) -> list[Floats]:
        """Hidden states [tokens, hidden] of each sequence of token ids. `beat` is called for every layer.

        `seconds`: where the second text of each begins, 0 where it is one text; empty: all are.
        """
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        sizes = [len(texts[index]) for index in order]
        tokens = torch.from_numpy(np.concatenate([texts[index] for index in order]))
        places = torch.cat([torch.arange(size) for size in sizes])
        x = self._words[tokens]
        if self._places is not None:
            x = x + self._places[places]
        if self._second is not None and any(seconds):
            begins = torch.tensor([seconds[index] or len(texts[index]) for index in order])
            x[places >= torch.repeat_interleave(begins, torch.tensor(sizes))] += self._second
        x = self._norm.norm(x, self.spec.norm_eps)
        turns = [rope.cos_sin(places, places) for rope in self._ropes]
        stretches = _equal(sizes)
        for number, layer in enumerate(self._layers):
            beat()
            turn = turns[self.spec.layer_ropes[number]] if turns else None
            reach = self._options.reaches[number] if self._options.reaches else 0
            x = self._layer(layer, x, stretches, turn, reach)
        if self._last is not None:
            x = self._last.norm(x, self.spec.norm_eps)
        found = dict(zip(order, np.split(x.numpy(), np.cumsum(sizes)[:-1]), strict=True))
        return [found[index] for index in range(len(texts))]

    def _layer(
        self,
        layer: EncoderLayer,
        x: Tensor,
        stretches: list[tuple[int, int, int]],
        turn: tuple[Tensor, Tensor] | None,
        reach: int,
    ) -> Tensor:
        eps = self.spec.norm_eps
        first, second = layer.norms
        if self._options.norm_first:
            x = x + self._mixed(layer, x if first is None else first.norm(x, eps), stretches, turn, reach)
            assert second is not None
            return x + self._fed(layer, second.norm(x, eps))
        assert first is not None and second is not None
        x = first.norm(x + self._mixed(layer, x, stretches, turn, reach), eps)
        return second.norm(x + self._fed(layer, x), eps)

    def _mixed(
        self,
        layer: EncoderLayer,
        x: Tensor,
        stretches: list[tuple[int, int, int]],
        turn: tuple[Tensor, Tensor] | None,
        reach: int,
    ) -> Tensor:
        heads = self.spec.num_heads
        queries, keys, values = layer.qkv.product(x).view(len(x), 3, heads, -1).unbind(1)
        if turn is not None:
            queries, keys = rotate(queries, *turn), rotate(keys, *turn)
        mixed = torch.empty_like(x)
        for start, count, size in stretches:
            end = start + count * size
            q, k, v = (
                part[start:end].view(count, size, heads, -1).transpose(1, 2)
                for part in (queries, keys, values)
            )
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=_near(size, reach))
            mixed[start:end] = seen.transpose(1, 2).reshape(count * size, -1)
        return layer.mixed.product(mixed)

    def _fed(self, layer: EncoderLayer, x: Tensor) -> Tensor:
        inner = ACTIVATIONS[self.spec.activation](layer.inner.product(x))
        if layer.up is not None:
            inner = inner * layer.up.product(x)
        return layer.outer.product(inner)


def _near(size: int, reach: int) -> Tensor | None:
    """Which tokens see each other: those at most `reach` apart; None: all."""
    if reach == 0 or size <= reach + 1:
        return None
    places = torch.arange(size)
    return (places[:, None] - places).abs() <= reach


def _equal(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Where sequences of one length begin, how many there are, and the length; all stand in order of length."""
    found: list[tuple[int, int, int]] = []
    start = 0
    for size in dict.fromkeys(sizes):
        count = sizes.count(size)
        found.append((start, count, size))
        start += count * size
    return found


class _Reader:
    """Tensors of a source by name."""

    def __init__(self, source: TensorSource) -> None:
        self._source, self._names = source, source.names()

    def __call__(self, name: str) -> Tensor:
        values = self._source.tensor(name).to_float32()
        check_finite(values, name)
        return torch.from_numpy(values.copy())

    def affine(self, *names: str) -> Affine:
        """One, or several that read the same input."""
        biases = [self(f"{name}.bias") for name in names if f"{name}.bias" in self._names]
        return Affine(
            torch.cat([self(f"{name}.weight") for name in names]), torch.cat(biases) if biases else None
        )
