"""Encoders in Hugging Face folders: which options an architecture has, and where its tensors lie.

Each architecture is one entry of `ENCODERS`. Canonical names are BERT's own, without the prefix that a model with a
head puts before them. What a head adds that we do not compute (a language head, a pooler nothing reads) is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.models.files.config_fields import Fields
from paceline.models.spec import EncoderSpec, ModelSpec

MAX_LABELS = 4096
CLASSIFIER = "ForSequenceClassification"
_HEADS = re.compile(
    r"(pooler\.dense|cls|lm_head|classifier)\..*|(embeddings\.)?position_ids|embeddings\.position_ids"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFamily:
    """One architecture."""

    architecture: str
    prefix: str  # of its tensors in a model with a head
    offset_positions: bool = False  # positions begin behind the padding token's number
    # Where a classifier reads from and what makes its scores.
    head: tuple[str, str] = ("pooler.dense", "classifier")


_BERT = EncoderFamily(architecture="bert", prefix="bert.")
_XLM_ROBERTA = EncoderFamily(
    architecture="xlm-roberta",
    prefix="roberta.",
    offset_positions=True,
    head=("classifier.dense", "classifier.out_proj"),
)
ENCODERS = {
    "BertModel": _BERT,
    f"Bert{CLASSIFIER}": _BERT,
    "XLMRobertaModel": _XLM_ROBERTA,
    f"XLMRoberta{CLASSIFIER}": _XLM_ROBERTA,
}


def encoder_name(values: Mapping[str, object]) -> str | None:
    """The first architecture of a config.json that is an encoder."""
    named = values.get("architectures")
    names = named if isinstance(named, list) else []
    return next((name for name in names if isinstance(name, str) and name in ENCODERS), None)


def encoder_options(name: str, config: Fields) -> EncoderSpec:
    """What an encoder has beside the sizes of any model."""
    family = ENCODERS[name]
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


def encoder_tensors(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor that the encoder of `spec` needs, with its shape."""
    encoder = spec.encoder
    assert encoder is not None
    hidden, inner = spec.hidden_size, spec.intermediate_size
    rows = {"word": spec.vocab_size, "position": encoder.num_positions, "token_type": encoder.num_types}
    for table, count in rows.items():
        yield f"embeddings.{table}_embeddings.weight", (count, hidden)
    yield from _pair("embeddings.LayerNorm", (hidden,), hidden)
    for layer in range(spec.num_layers):
        prefix = f"encoder.layer.{layer}."
        for part in ("query", "key", "value"):
            yield from _pair(f"{prefix}attention.self.{part}", (hidden, hidden), hidden)
        yield from _pair(prefix + "attention.output.dense", (hidden, hidden), hidden)
        yield from _pair(prefix + "attention.output.LayerNorm", (hidden,), hidden)
        yield from _pair(prefix + "intermediate.dense", (inner, hidden), inner)
        yield from _pair(prefix + "output.dense", (hidden, inner), hidden)
        yield from _pair(prefix + "output.LayerNorm", (hidden,), hidden)
    if encoder.labels:
        first, second = encoder.head
        yield from _pair(first, (hidden, hidden), hidden)
        yield from _pair(second, (len(encoder.labels), hidden), len(encoder.labels))


def is_other_head(name: str) -> bool:
    """Whether a tensor belongs to what is not computed here."""
    return _HEADS.fullmatch(name) is not None


def _pair(name: str, shape: tuple[int, ...], width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", shape
    yield f"{name}.bias", (width,)


def _labels(config: Fields) -> tuple[str, ...]:
    named = config.group("id2label")
    count = len(named.names()) if named is not None else config.integer("num_labels", 2, maximum=MAX_LABELS)
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(count))
    if named.names() != {str(index) for index in range(count)} or count > MAX_LABELS:
        config.refuse("id2label", f"must number its labels from 0, at most {MAX_LABELS}")
    return tuple(named.text(str(index)) for index in range(count))
