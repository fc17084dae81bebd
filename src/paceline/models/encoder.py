"""One bidirectional transformer over ragged sequences, as there is one decoder: BERT and XLM-RoBERTa.

All sequences of a step are one flat batch without padding. What ties the tokens of a sequence together is attention,
which takes sequences of equal length together. Float32 on a CPU: the reference for whatever computes it faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.models.files.stored import TensorSource, check_finite
from paceline.models.spec import ModelSpec


@dataclass(slots=True)
class Affine:
    """A product or a norm: a weight and a bias."""

    weight: Tensor
    bias: Tensor

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def norm(self, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, self.bias.shape, self.weight, self.bias, eps)


@dataclass(slots=True)
class EncoderLayer:
    """One layer; its norms stand behind its parts."""

    qkv: Affine  # queries, keys and values as one product
    mixed: Affine
    mixed_norm: Affine
    inner: Affine
    outer: Affine
    outer_norm: Affine


class Encoder:
    """Sequences in, hidden states out."""

    def __init__(self, spec: ModelSpec, source: TensorSource) -> None:
        assert spec.encoder is not None
        self.spec, self._options = spec, spec.encoder
        read = _reader(source)
        self._words = read("embeddings.word_embeddings.weight")
        self._positions = read("embeddings.position_embeddings.weight")[self._options.position_offset :]
        # Nearly all tokens are of the first type; those of the second text of a pair differ from it by this.
        types = read("embeddings.token_type_embeddings.weight")
        self._positions = self._positions + types[0]
        self._second = types[1] - types[0] if len(types) > 1 else None
        self._norm = _affine(read, "embeddings.LayerNorm")
        self._layers = [_layer(read, f"encoder.layer.{index}.") for index in range(spec.num_layers)]
        self._head = [_affine(read, name) for name in self._options.head] if self._options.labels else []

    @torch.inference_mode()
    def forward(
        self, sequences: Sequence[Tensor], beat: Callable[[], None], seconds: Sequence[int] = ()
    ) -> list[Tensor]:
        """Hidden states [tokens, hidden] of each sequence of token ids. `beat` is called for every layer.

        `seconds`: where the second text of each begins, 0 where it is one text; empty: all are.
        """
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        sizes = [len(sequences[index]) for index in order]
        tokens = torch.cat([sequences[index] for index in order])
        places = torch.cat([torch.arange(size) for size in sizes])
        x = self._words[tokens] + self._positions[places]
        if self._second is not None and any(seconds):
            begins = torch.tensor([seconds[index] or len(sequences[index]) for index in order])
            x[places >= torch.repeat_interleave(begins, torch.tensor(sizes))] += self._second
        x = self._norm.norm(x, self.spec.norm_eps)
        stretches = _equal(sizes)
        for layer in self._layers:
            beat()
            x = self._layer(layer, x, stretches)
        found = dict(zip(order, torch.split(x, sizes), strict=True))
        return [found[index] for index in range(len(sequences))]

    @torch.inference_mode()
    def classify(self, state: Tensor, *, raw: bool = False) -> Tensor:
        """Scores of the labels from the state of a sequence's first token; of one label, how much it holds. `raw`:
        without softmax or sigmoid."""
        dense, scores = self._head
        logits = scores.product(torch.tanh(dense.product(state)))
        if raw:
            return logits
        return torch.sigmoid(logits) if len(self._options.labels) == 1 else torch.softmax(logits, dim=-1)

    def _layer(self, layer: EncoderLayer, x: Tensor, stretches: list[tuple[int, int, int]]) -> Tensor:
        eps, heads = self.spec.norm_eps, self.spec.num_heads
        qkv = layer.qkv.product(x)
        mixed = torch.empty_like(x)
        for start, count, size in stretches:
            end = start + count * size
            q, k, v = qkv[start:end].view(count, size, 3, heads, -1).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(q, k, v)
            mixed[start:end] = seen.transpose(1, 2).reshape(count * size, -1)
        x = layer.mixed_norm.norm(x + layer.mixed.product(mixed), eps)
        inner = F.gelu(
            layer.inner.product(x), approximate="tanh" if self.spec.activation == "gelu_tanh" else "none"
        )
        return layer.outer_norm.norm(x + layer.outer.product(inner), eps)


def _equal(sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Where sequences of one length begin, how many there are, and the length; all stand in order of length."""
    found: list[tuple[int, int, int]] = []
    start = 0
    for size in dict.fromkeys(sizes):
        count = sizes.count(size)
        found.append((start, count, size))
        start += count * size
    return found


def _reader(source: TensorSource) -> Callable[[str], Tensor]:
    def read(name: str) -> Tensor:
        values = source.tensor(name).to_float32()
        check_finite(values, name)
        return torch.from_numpy(values.copy())

    return read


def _affine(read: Callable[[str], Tensor], *names: str) -> Affine:
    """One, or several that read the same input."""
    return Affine(
        torch.cat([read(f"{name}.weight") for name in names]),
        torch.cat([read(f"{name}.bias") for name in names]),
    )


def _layer(read: Callable[[str], Tensor], prefix: str) -> EncoderLayer:
    return EncoderLayer(
        qkv=_affine(read, *(f"{prefix}attention.self.{part}" for part in ("query", "key", "value"))),
        mixed=_affine(read, prefix + "attention.output.dense"),
        mixed_norm=_affine(read, prefix + "attention.output.LayerNorm"),
        inner=_affine(read, prefix + "intermediate.dense"),
        outer=_affine(read, prefix + "output.dense"),
        outer_norm=_affine(read, prefix + "output.LayerNorm"),
    )
