"""Encoders in Hugging Face folders: which options an architecture has, and where its tensors lie.

Each architecture is one entry of `ENCODERS`. Canonical names are BERT's own, without the prefix that a model with a
head puts before them. What a head adds that we do not compute (a language head, a pooler nothing reads) is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.models.files.config_fields import Fields, shown
from paceline.models.spec import EncoderSpec, ModelSpec

MAX_LABELS = 4096
CLASSIFIER = "ForSequenceClassification"
_HEADS = re.compile(
    r"(pooler\.dense|cls|lm_head|classifier|head|decoder)\..*|(embeddings\.)?position_ids|embeddings\.position_ids"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """One architecture."""

    architecture: str
    prefix: str  # of its tensors in a model with a head
    offset_positions: bool = False  # positions begin behind the padding token's number
    is_modern: bool = False  # rotary positions, local layers, gates, norms first, no biases
    # Where a classifier reads from and what makes its scores.
    head: tuple[str, str] = ("pooler.dense", "classifier")


_BERT = EncoderFamily(architecture="bert", prefix="bert.")
_XLM_ROBERTA = EncoderFamily(
    architecture="xlm-roberta",
    prefix="roberta.",
    offset_positions=True,
    head=("classifier.dense", "classifier.out_proj"),
)
_MODERN = EncoderFamily(
    architecture="modernbert", prefix="model.", is_modern=True, head=("head.dense", "classifier")
)
ENCODERS = {
    "BertModel": _BERT,
    f"Bert{CLASSIFIER}": _BERT,
    "XLMRobertaModel": _XLM_ROBERTA,
    f"XLMRoberta{CLASSIFIER}": _XLM_ROBERTA,
    "ModernBertModel": _MODERN,
    f"ModernBert{CLASSIFIER}": _MODERN,
}


def encoder_name(values: Mapping[str, object]) -> str | None:
    """The first architecture of a config.json that is an encoder."""
    named = values.get("architectures")
    names = named if isinstance(named, list) else []
    return next((name for name in names if isinstance(name, str) and name in ENCODERS), None)


def encoder_options(name: str, config: Fields) -> EncoderSpec:
    """What an encoder has beside the sizes of any model."""
    family = ENCODERS[name]
    if family.is_modern:
        return _modern_options(family, config, is_classifier=name.endswith(CLASSIFIER))
    if config.text("position_embedding_type", "absolute") != "absolute":
        config.refuse("position_embedding_type", "must be absolute: relative positions are not supported")
    if config.flag("is_decoder", False) or config.flag("add_cross_attention", False):
        config.refuse("is_decoder", "is true, and a decoder of this architecture is not supported")
    offset = config.integer("pad_token_id", 1, minimum=0) + 1 if family.offset_positions else 0
    return EncoderSpec(
        num_positions=config.integer("max_position_embeddings"),
        position_offset=offset,
        num_types=config.integer("type_vocab_size", 2, maximum=64),
        labels=_labels(config) if name.endswith(CLASSIFIER) else (),
        head=family.head,
        prefix=family.prefix,
    )


def _modern_options(family: EncoderFamily, config: Fields, *, is_classifier: bool) -> EncoderSpec:
    for name in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"):
        if config.flag(name, False):
            config.refuse(name, "is true, and biases of this architecture are not supported")
    pooling, activation = (
        config.text("classifier_pooling", "cls"),
        config.text("classifier_activation", "gelu"),
    )
    if pooling not in ("cls", "mean"):
        config.refuse("classifier_pooling", f"must be cls or mean, not {shown(pooling)}")
    if activation not in ("gelu", "tanh"):
        config.refuse("classifier_activation", f"must be gelu or tanh, not {shown(activation)}")
    # Half of the window stands on each side of a token, which is not counted.
    reach = config.integer("local_attention", 128, minimum=2) // 2
    return EncoderSpec(
        num_positions=config.integer("max_position_embeddings"),
        num_types=0,
        is_biased=False,
        norm_first=True,
        is_gated=True,
        reaches=tuple(reach if is_local else 0 for is_local in local_layers(config)),
        labels=_labels(config) if is_classifier else (),
        head=family.head,
        head_norm="head.norm",
        head_activation=activation,
        head_mean=pooling == "mean",
        prefix=family.prefix,
    )


def local_layers(config: Fields) -> tuple[bool, ...]:
    """Per layer of a modern encoder: whether it sees a window only."""
    layers = config.integer("num_hidden_layers")
    named = config.sequence("layer_types")
    if not named:
        every = config.integer("global_attn_every_n_layers", 3)
        return tuple(layer % every != 0 for layer in range(layers))
    kinds = {"full_attention": False, "sliding_attention": True}
    if len(named) != layers or any(name not in kinds for name in named):
        config.refuse("layer_types", f"must be {layers} times {' or '.join(kinds)}, not {shown(named)}")
    return tuple(kinds[str(name)] for name in named)


_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.+)\.weight")
_MODERN_PARTS = {
    "attention.LayerNorm": "attn_norm",
    "attention.output.dense": "attn.Wo",
    "intermediate.LayerNorm": "mlp_norm",
    "output.dense": "mlp.Wo",
}
# What lies one behind the other in one matrix: its name, and which part of how many.
_MODERN_FUSED = {
    "attention.self.query": ("attn.Wqkv", 0, 3),
    "attention.self.key": ("attn.Wqkv", 1, 3),
    "attention.self.value": ("attn.Wqkv", 2, 3),
    "intermediate.dense": ("mlp.Wi", 0, 2),
    "intermediate.up": ("mlp.Wi", 1, 2),
}


def modern_place(name: str) -> tuple[str, int, int]:
    """Where modern encoders keep a tensor: the name, and which part of how many it is there."""
    match = _LAYER.fullmatch(name)
    if match is None:
        named = {"word_embeddings": "tok_embeddings", "LayerNorm": "norm"}
        first, _, rest = name.removeprefix("embeddings.").partition(".")
        is_embedding = name.startswith("embeddings.") and first in named
        return (f"embeddings.{named[first]}.{rest}" if is_embedding else name), 0, 1
    number, part = match.groups()
    source, index, count = _MODERN_FUSED.get(part) or (_MODERN_PARTS[part], 0, 1)
    return f"layers.{number}.{source}.weight", index, count


def encoder_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that the encoder of `spec` needs, with its shape."""
    encoder = spec.encoder
    assert encoder is not None
    hidden, inner = spec.hidden_size, spec.intermediate_size
    pair = _pair if encoder.is_biased else _alone
    rows = {"word": spec.vocab_size}
    if not spec.ropes:
        rows |= {"position": encoder.num_positions, "token_type": encoder.num_types}
    for table, count in rows.items():
        yield f"embeddings.{table}_embeddings.weight", (count, hidden)
    yield from pair("embeddings.LayerNorm", (hidden,), hidden)
    for layer in range(spec.num_layers):
        prefix = f"encoder.layer.{layer}."
        for part in ("query", "key", "value"):
            yield from pair(f"{prefix}attention.self.{part}", (hidden, hidden), hidden)
        yield from pair(prefix + "attention.output.dense", (hidden, hidden), hidden)
        yield from pair(prefix + "intermediate.dense", (inner, hidden), inner)
        if encoder.is_gated:
            yield from pair(prefix + "intermediate.up", (inner, hidden), inner)
        yield from pair(prefix + "output.dense", (hidden, inner), hidden)
        for norm in layer_norms(spec, layer):
            yield from pair(norm, (hidden,), hidden)
    if encoder.norm_first:
        yield from pair("final_norm", (hidden,), hidden)
    if encoder.labels:
        first, second = encoder.head
        yield from pair(first, (hidden, hidden), hidden)
        if encoder.head_norm:
            yield from pair(encoder.head_norm, (hidden,), hidden)
        yield from _pair(second, (len(encoder.labels), hidden), len(encoder.labels))


def layer_norms(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """The norms of a layer in the order in which they are computed."""
    prefix = f"encoder.layer.{layer}."
    assert spec.encoder is not None
    if not spec.encoder.norm_first:
        return (prefix + "attention.output.LayerNorm", prefix + "output.LayerNorm")
    # What the first layer reads is normed already.
    first = (prefix + "attention.LayerNorm",) if layer else ()
    return (*first, prefix + "intermediate.LayerNorm")


def is_other_head(name: str) -> bool:
    """Whether a tensor belongs to what is not computed here."""
    return _HEADS.fullmatch(name) is not None


def _pair(name: str, shape: tuple[int, ...], width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", (width,)


def _alone(name: str, shape: tuple[int, ...], width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape


def _labels(config: Fields) -> tuple[str, ...]:
    named = config.group("id2label")
    count = len(named.names()) if named is not None else config.integer("num_labels", 2, maximum=MAX_LABELS)
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(count))
    if named.names() != {str(index) for index in range(count)} or count > MAX_LABELS:
        config.refuse("id2label", f"must number its labels from 0, at most {MAX_LABELS}")
    return tuple(named.text(str(index)) for index in range(count))
