"""Encoders in Hugging Face folders: which options an architecture has, and where its tensors lie.

Each architecture is one entry of `ENCODERS`. Canonical names are BERT's own, without the prefix that a model with a
head puts before them. What a head adds that we do not compute (a language head, a pooler nothing reads) is left alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.models.files.config_fields import Fields, shown
from paceline.models.spec import EncoderSpec, ModelSpec, PatchSpec

MAX_LABELS = 4096
MAX_SIDE = 16_384  # pixels of a picture
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
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
_ANY_LAYER = re.compile(r"encoder\.layer\.(\d+)\.(.+)")
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
    hidden, inner, patches = spec.hidden_size, spec.intermediate_size, encoder.patches
    pair = _pair if encoder.is_biased else _alone
    norm = _alone if encoder.is_rms else pair
    rows = {} if patches else {"word": spec.vocab_size}
    if patches or not spec.ropes:
        rows |= {"position": encoder.num_positions, "token_type": encoder.num_types}
    for table, count in rows.items():
        if count:
            yield f"embeddings.{table}_embeddings.weight", (count, hidden)
    if patches:
        yield from _picture_ends(patches, hidden)
    if encoder.embedding_norm:
        yield from norm("embeddings.LayerNorm", (hidden,), hidden)
    for layer in range(spec.num_layers):
        prefix = f"encoder.layer.{layer}."
        for part in ("query", "key", "value"):
            yield from pair(f"{prefix}attention.self.{part}", (hidden, hidden), hidden)
        yield from pair(prefix + "attention.output.dense", (hidden, hidden), hidden)
        yield from pair(prefix + "intermediate.dense", (inner, hidden), inner)
        if encoder.is_gated:
            yield from pair(prefix + "intermediate.up", (inner, hidden), inner)
        yield from pair(prefix + "output.dense", (hidden, inner), hidden)
        for name in layer_norms(spec, layer):
            yield from norm(name, (hidden,), hidden)
    if encoder.norm_first:
        yield from norm("final_norm", (hidden,), hidden)
    if encoder.labels:
        first, second = encoder.head
        yield from pair(first, (hidden, hidden), hidden)
        if encoder.head_norm:
            yield from norm(encoder.head_norm, (hidden,), hidden)
        yield from _pair(second, (len(encoder.labels), hidden), len(encoder.labels))


def _picture_ends(patches: PatchSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What reads patches, and what makes vectors of squares of them."""
    shape = (hidden, 3, *((patches.frames,) if patches.frames else ()), patches.size, patches.size)
    yield from (_pair if patches.has_bias else _alone)(PATCHES, shape, hidden)
    square = hidden * patches.merge**2
    if not patches.has_inner:
        yield f"{CONNECTOR}.weight", (patches.width, square)
        return
    for end in (CONNECTOR, *(f"{TAP}.{number}" for number in range(len(patches.taps)))):
        if end != CONNECTOR:
            yield from _pair(f"{end}.{NORM}", (square,), square)
        yield from _pair(f"{end}.{INNER}", (square, square), square)
        yield from _pair(end, (patches.width, square), patches.width)


def layer_norms(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """The norms of a layer in the order in which they are computed."""
    prefix = f"encoder.layer.{layer}."
    assert spec.encoder is not None
    if not spec.encoder.norm_first:
        return (prefix + "attention.output.LayerNorm", prefix + "output.LayerNorm")
    # What the first layer reads may be normed already.
    first = (prefix + "attention.LayerNorm",) if layer or not spec.encoder.embedding_norm else ()
    return (*first, prefix + "intermediate.LayerNorm")


# Encoders of pictures, beside a decoder.
#
# Their canonical names are those of other encoders, behind `vision.`.


VISION = "vision."
PATCHES, CONNECTOR, TAP = "embeddings.patch_embedding", "connector", "tap"
NORM, INNER = "norm", "inner"  # behind the name of an end
_SIGLIP_PARTS = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.LayerNorm": "layer_norm1",
    "intermediate.LayerNorm": "layer_norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
_SIGLIP_ENDS = {
    "final_norm": "post_layernorm",
    "embeddings.position_embeddings": "embeddings.position_embedding",
}
_QWEN_PARTS = {
    "attention.output.dense": "attn.proj",
    "attention.LayerNorm": "norm1",
    "intermediate.LayerNorm": "norm2",
}
_QWEN_ENDS = {PATCHES: "patch_embed.proj", "embeddings.position_embeddings": "pos_embed"}
_QWEN25_PARTS = {
    **_QWEN_PARTS,
    "intermediate.dense": "mlp.gate_proj",
    "intermediate.up": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
}
_QWEN25_ENDS = {
    **_QWEN_ENDS,
    "final_norm": "merger.ln_q",
    f"{CONNECTOR}.{INNER}": "merger.mlp.0",
    CONNECTOR: "merger.mlp.2",
}
_QWEN3_PARTS = {**_QWEN_PARTS, "intermediate.dense": "mlp.linear_fc1", "output.dense": "mlp.linear_fc2"}
_QWEN3_ENDS = {
    **_QWEN_ENDS,
    "final_norm": "merger.norm",
    f"{CONNECTOR}.{INNER}": "merger.linear_fc1",
    CONNECTOR: "merger.linear_fc2",
}
_TAPPED = re.compile(rf"{TAP}\.(\d+)(\.{NORM}|\.{INNER})?")
_TAPPED_PARTS = {f".{NORM}": "norm", f".{INNER}": "linear_fc1", None: "linear_fc2"}
_QWEN_FUSED = {"attention.self.query": 0, "attention.self.key": 1, "attention.self.value": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """The encoder of pictures of one architecture."""

    heads: str = "num_heads"  # what its files call their number
    layers: str = "depth"
    defaults: Mapping[str, object]  # where its files have no value


SIGLIP, QWEN25_VL, QWEN3_VL = "siglip", "qwen2.5-vl", "qwen3-vl"
VISION_FAMILIES = {
    SIGLIP: VisionFamily(
        heads="num_attention_heads",
        layers="num_hidden_layers",
        defaults={
            "hidden_size": 1152,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_channels": 3,
            "image_size": 224,
            "patch_size": 32,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        },
    ),
    QWEN25_VL: VisionFamily(
        defaults={
            "depth": 32,
            "hidden_size": 3584,
            "hidden_act": "silu",
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "layer_norm_eps": 1e-6,
        }
    ),
    QWEN3_VL: VisionFamily(
        defaults={
            "depth": 27,
            "hidden_size": 1152,
            "hidden_act": "gelu_pytorch_tanh",
            "intermediate_size": 4304,
            "num_heads": 16,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
            "layer_norm_eps": 1e-6,
        }
    ),
}


def vision_options(
    family: str, config: Fields, outer: Fields, processor: Fields | None, width: int
) -> EncoderSpec:
    """What an encoder of pictures has beside the sizes of any model. `width`: of the decoder."""
    if family == SIGLIP:
        return _siglip_options(config, outer, processor, width)
    return _qwen_options(config, processor, width, is_newest=family == QWEN3_VL)


def _qwen_options(config: Fields, processor: Fields | None, width: int, *, is_newest: bool) -> EncoderSpec:
    size, merge = (
        config.integer("patch_size", maximum=MAX_SIDE),
        config.integer("spatial_merge_size", 2, maximum=64),
    )
    if config.integer("in_channels", config.integer("in_chans", 3)) != 3:
        config.refuse("in_channels", "must be 3")
    if config.integer("out_hidden_size", width) != width:
        config.refuse("out_hidden_size", f"is not the hidden_size of the language model, {width}")
    layers, rows = config.integer("depth"), 0
    taps: tuple[int, ...] = ()
    window = 0
    local: tuple[bool, ...] = ()
    if is_newest:
        rows, taps = config.integer("num_position_embeddings"), _layers(config, "deepstack_visual_indexes")
        side = math.isqrt(rows)
        if side**2 != rows or side < merge:
            config.refuse("num_position_embeddings", f"of {rows} is no square of places of a picture")
    else:
        window = config.integer("window_size") // merge // size
        if window == 0:
            config.refuse("window_size", f"is less than {merge} patches of {size} pixels")
        side, whole = 4 * window * merge, _layers(config, "fullatt_block_indexes")
        local = tuple(layer not in whole for layer in range(layers))
    # As the processors of these families have it where a folder has none.
    usual = {} if is_newest else {"mean": CLIP_MEAN, "deviation": CLIP_DEVIATION}
    return EncoderSpec(
        num_positions=rows,
        num_types=0,
        norm_first=True,
        embedding_norm=False,
        is_rms=not is_newest,
        is_gated=not is_newest,
        local=local,
        patches=PatchSpec(
            size=size,
            side=side,
            merge=merge,
            width=width,
            frames=config.integer("temporal_patch_size", 2, maximum=64),
            has_bias=is_newest,
            in_squares=True,
            window=window,
            is_interpolated=is_newest,
            has_inner=True,
            taps=taps,
            **(usual | _pixel_range(processor)),
        ),
    )


def _layers(config: Fields, name: str) -> tuple[int, ...]:
    """Numbers of layers, in order."""
    count, named = config.integer("depth"), config.sequence(name)
    found = [each for each in named if type(each) is int and 0 <= each < count]
    if len(found) != len(named) or found != sorted(set(found)):
        config.refuse(name, f"must number some of {count} layers from 0, in order, not {shown(named)}")
    return tuple(found)


def _siglip_options(config: Fields, outer: Fields, processor: Fields | None, width: int) -> EncoderSpec:
    size, pixels = config.integer("patch_size"), config.integer("image_size", maximum=MAX_SIDE)
    if config.integer("num_channels") != 3:
        config.refuse("num_channels", "must be 3")
    merge, side = outer.integer("scale_factor", 2), pixels // size
    if side == 0 or side % merge:
        outer.refuse("scale_factor", f"of {merge} does not divide the {side} patches of a side of a picture")
    return EncoderSpec(
        num_positions=side**2,
        num_types=0,
        norm_first=True,
        embedding_norm=False,
        patches=PatchSpec(size=size, side=side, merge=merge, width=width, **_pixel_range(processor)),
    )


def _pixel_range(processor: Fields | None) -> dict[str, Any]:
    """What bytes are read as, by preprocessor_config.json."""
    if processor is None:
        return {}
    found: dict[str, Any] = {
        "scale": processor.number("rescale_factor", 1 / 255, above=0)
        if processor.flag("do_rescale", True)
        else 1.0
    }
    if not processor.flag("do_normalize", True):
        return {**found, "mean": (0.0,) * 3, "deviation": (1.0,) * 3}
    for field, name in (("mean", "image_mean"), ("deviation", "image_std")):
        values = processor.sequence(name)
        if values:
            if len(values) != 3 or any(
                isinstance(each, bool) or not isinstance(each, int | float) for each in values
            ):
                processor.refuse(name, f"must be three numbers, not {shown(values)}")
            found[field] = tuple(float(each) for each in values if isinstance(each, int | float))
    if min(found.get("deviation", (1.0,))) <= 0:
        processor.refuse("image_std", "must be above 0")
    return found


def vision_place(name: str, family: str) -> tuple[str, int, int]:
    """Where a family keeps a tensor of its encoder of pictures, without what stands before it in all of them: the name,
    and which part of how many it is there."""
    stem, _, ending = name.removeprefix(VISION).rpartition(".")
    if family == SIGLIP:
        return _siglip_place(stem, ending), 0, 1
    parts, ends = (_QWEN3_PARTS, _QWEN3_ENDS) if family == QWEN3_VL else (_QWEN25_PARTS, _QWEN25_ENDS)
    if match := _ANY_LAYER.fullmatch(stem):
        if match[2] in _QWEN_FUSED:
            return f"visual.blocks.{match[1]}.attn.qkv.{ending}", _QWEN_FUSED[match[2]], 3
        return f"visual.blocks.{match[1]}.{parts[match[2]]}.{ending}", 0, 1
    if match := _TAPPED.fullmatch(stem):
        return f"visual.deepstack_merger_list.{match[1]}.{_TAPPED_PARTS[match[2]]}.{ending}", 0, 1
    return f"visual.{ends[stem]}.{ending}", 0, 1


def _siglip_place(stem: str, ending: str) -> str:
    if stem == CONNECTOR:
        return f"{CONNECTOR}.modality_projection.proj.{ending}"
    if match := _ANY_LAYER.fullmatch(stem):
        return f"vision_model.encoder.layers.{match[1]}.{_SIGLIP_PARTS[match[2]]}.{ending}"
    return f"vision_model.{_SIGLIP_ENDS.get(stem, stem)}.{ending}"


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
