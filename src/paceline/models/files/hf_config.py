"""A Hugging Face config.json turned into a `ModelSpec`.

Each architecture is one entry of `FAMILIES`: which options it has and what holds where its file says nothing.
Options we do not compute are refused rather than ignored: a model that answers wrongly is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from paceline.models.files.config_fields import MAX_SIZE, NEGATIVE, CheckpointError, Fields, shown
from paceline.models.files.encoder import (
    ENCODERS,
    QWEN3_VL,
    QWEN25_VL,
    SIGLIP,
    VISION_FAMILIES,
    encoder_name,
    encoder_options,
    local_layers,
    vision_options,
)
from paceline.models.spec import ROPE_KINDS, ExpertsSpec, ModelSpec, RopeSpec

# Rotary positions out of a config.json, in the old spelling (`rope_theta`, `rope_scaling`) and the new one.
#
# The new one, `rope_parameters`, may be one group of fields or one group per kind of layer. Numbers that a file may
# leave out are worked out here as the reference implementation does, so that the decoder only applies them.


FULL = "full_attention"
SLIDING = "sliding_attention"
# Where the kind takes its unscaled length from the model's own when the file does not say.
NEEDS_TRAINED = ("llama3", "yarn", "dynamic")


def rope_for(config: Fields, layer_type: str, head_dim: int, sections: tuple[int, ...] = ()) -> RopeSpec:
    """The rotation of the layers of one kind. `sections`: those of its family, where pictures turn tokens too."""
    group = _group(config, layer_type)
    kind = group.get("rope_type") or group.get("type") or "default"
    if sections:
        if kind == "dynamic":
            group.refuse("rope_type", "dynamic is not supported for a model that sees pictures in this way")
        kind = "default" if kind == "mrope" else kind
    if kind in ("longrope", "su"):
        group.refuse("rope_type", f"{kind} is not supported; use a model without long-context factors")
    if kind == "mrope" or kind not in ROPE_KINDS:
        group.refuse("rope_type", f"{kind!r:.40} is not supported; supported are {', '.join(ROPE_KINDS)}")
    assert isinstance(kind, str)
    theta = group.number("rope_theta", _theta(config, layer_type), above=0)
    rotary_dim = _rotary_dim(config, group, head_dim)
    if kind == "default":
        return RopeSpec(rotary_dim=rotary_dim, theta=theta)
    trained = _trained_positions(config, group, kind)
    if kind == "yarn" and not group.has("factor"):
        factor = config.integer("max_position_embeddings") / trained
    else:
        factor = group.number("factor", above=0)
    rope = RopeSpec(rotary_dim=rotary_dim, theta=theta, kind=kind, factor=factor, trained_positions=trained)
    if kind == "llama3":
        low, high = (group.number(name, above=0) for name in ("low_freq_factor", "high_freq_factor"))
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    return _yarn(group, rope) if kind == "yarn" else rope


def _with_sections(config: Fields, rope: RopeSpec, family: Family) -> RopeSpec:
    """The rotation of a decoder that turns tokens of pictures by their time, row and column."""
    group = _group(config, FULL)
    is_interleaved = group.flag("mrope_interleaved", family.is_interleaved)
    if is_interleaved != family.is_interleaved:
        group.refuse(
            "mrope_interleaved", f"must be {str(family.is_interleaved).lower()} for this architecture"
        )
    named = group.sequence("mrope_section") or family.sections
    sections = tuple(each for each in named if type(each) is int and each > 0)
    if len(sections) != 3 or len(named) != 3 or sum(sections) != rope.rotary_dim // 2:
        half = rope.rotary_dim // 2
        group.refuse("mrope_section", f"must be three numbers that make {half}, not {shown(list(named))}")
    return replace(rope, sections=sections, is_interleaved=is_interleaved)


def longest(rope: RopeSpec, max_positions: int, *, stretched: bool) -> int:
    """How long a sequence may be. `stretched` says that the file's length already counts the factor."""
    if rope.kind in ("linear", "dynamic") and not stretched:
        return max(max_positions, int(min(max_positions * rope.factor, MAX_SIZE)))
    if rope.kind == "yarn":
        return max(max_positions, int(min(rope.trained_positions * rope.factor, MAX_SIZE)))
    return max_positions


def yarn_attention_factor(factor: float, mscale: float | None = None, all_dim: float | None = None) -> float:
    """What yarn multiplies cos and sin with, where the file does not say."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


def _group(config: Fields, layer_type: str) -> Fields:
    """The fields for one kind of layer; those of the model itself where a file has none for it."""
    parameters = config.group("rope_parameters")
    if parameters is not None and parameters.names() & {FULL, SLIDING}:
        return parameters.group(layer_type) or Fields({}, parameters.where)
    if layer_type == SLIDING and _has_local_theta(config):
        return Fields({}, config.where)  # only the layers that see everything are stretched
    return config.group("rope_scaling") or parameters or Fields({}, config.where)


def _theta(config: Fields, layer_type: str) -> float:
    if layer_type == SLIDING and _has_local_theta(config):
        return config.number("rope_local_base_freq", above=0)
    return config.number("rope_theta", 10_000.0, above=0)


def _has_local_theta(config: Fields) -> bool:
    return config.get("rope_local_base_freq") is not None


def _rotary_dim(config: Fields, group: Fields, head_dim: int) -> int:
    part = group.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", 1.0, above=0), above=0
    )
    rotary_dim = int(head_dim * part)
    if part > 1 or rotary_dim < 2 or rotary_dim % 2:
        group.refuse("partial_rotary_factor", f"of {part:g} turns {rotary_dim} entries of {head_dim}")
    return rotary_dim


def _trained_positions(config: Fields, group: Fields, kind: str) -> int:
    if kind not in NEEDS_TRAINED:
        return 0
    own = config.integer("max_position_embeddings")
    if kind == "dynamic":
        return own
    return group.integer("original_max_position_embeddings", own)


def _yarn(group: Fields, plain: RopeSpec) -> RopeSpec:
    attention_factor = group.optional_number("attention_factor", above=0)
    if attention_factor is None:
        attention_factor = yarn_attention_factor(
            plain.factor,
            group.optional_number("mscale", above=NEGATIVE),
            group.optional_number("mscale_all_dim", above=NEGATIVE),
        )
    return replace(
        plain,
        beta_fast=group.number("beta_fast", 32.0, above=NEGATIVE) or 32.0,
        beta_slow=group.number("beta_slow", 1.0, above=NEGATIVE) or 1.0,
        truncate=group.flag("truncate", True),
        attention_factor=attention_factor,
    )


TIED = "tie_word_embeddings"  # beside a vision model it may stand in either part
MAX_LAYERS = 1024
MAX_EXPERTS = 2**17  # in all layers together
MAX_VOCABULARY = 2**24
MAX_WIDTH = 2**20

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture: its name in a spec, its fixed options, and its defaults."""

    architecture: str
    windows: str = "none"  # where windows come from: none, all (every layer), or types (per layer)
    qkv_bias: bool = False
    bias_option: bool = False  # `attention_bias` gives q, k, v and the output a bias
    qk_norm: bool = False
    experts: bool = False
    sees: str = ""  # the family of its encoder of pictures, if it has one
    sections: tuple[int, ...] = ()  # by which tokens of pictures turn, where its files say nothing
    is_interleaved: bool = False
    defaults: Mapping[str, object] = field(default_factory=dict)


_IDEFICS3 = Family(architecture="llama", bias_option=True, sees=SIGLIP)
_GEMMA3 = Family(
    architecture="gemma3",
    windows="types",
    bias_option=True,
    qk_norm=True,
    # Gemma's own files say only what differs from these.
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
)
FAMILIES = {
    "LlamaForCausalLM": Family(architecture="llama", bias_option=True),
    "MistralForCausalLM": Family(architecture="mistral", windows="all", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(
        architecture="qwen2", windows="types", qkv_bias=True, defaults={"sliding_window": 4096}
    ),
    "Qwen3ForCausalLM": Family(
        architecture="qwen3",
        windows="types",
        bias_option=True,
        qk_norm=True,
        defaults={"head_dim": 128, "sliding_window": 4096},
    ),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Qwen2_5_VLForConditionalGeneration": Family(
        architecture="qwen2",
        windows="types",
        qkv_bias=True,
        sees=QWEN25_VL,
        sections=(16, 24, 24),
        defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    ),
    "Qwen3VLForConditionalGeneration": Family(
        architecture="qwen3",
        bias_option=True,
        qk_norm=True,
        sees=QWEN3_VL,
        sections=(24, 20, 20),
        is_interleaved=True,
        defaults={"head_dim": 128, "rope_theta": 500_000.0},
    ),
    "Phi3ForCausalLM": Family(architecture="phi3", windows="all", defaults={"rms_norm_eps": 1e-5}),
    "MixtralForCausalLM": Family(
        architecture="mixtral",
        windows="all",
        experts=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    ),
    "Qwen3MoeForCausalLM": Family(
        architecture="qwen3_moe",
        windows="types",
        bias_option=True,
        qk_norm=True,
        experts=True,
        defaults={"sliding_window": 4096},
    ),
}


def spec_from_config(
    values: Mapping[str, object],
    where: str,
    generation: Fields | None = None,
    processor: Fields | None = None,
) -> ModelSpec:
    """The model that a config.json describes; end tokens come from `generation` (generation_config.json) first, what
    pixels are read as from `processor` (preprocessor_config.json)."""
    encoder = encoder_name(values)
    if encoder is not None:
        return _encoder_spec(encoder, Fields(values, where))
    family = _family(values, where)
    outer = Fields(values, where, family.defaults)
    # The fields of the language model lie one level down where there is a vision model beside it.
    config = outer.group("text_config", family.defaults) or outer
    _refuse_unsupported(config)
    heads = config.integer("num_attention_heads", maximum=MAX_WIDTH)
    hidden = config.integer("hidden_size", maximum=MAX_WIDTH)
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    head_dim = config.integer("head_dim", hidden // heads or None, maximum=MAX_WIDTH)
    kv_heads = config.integer("num_key_value_heads", heads, maximum=heads)
    if heads % kv_heads:
        config.refuse(
            "num_key_value_heads", f"of {kv_heads} does not divide num_attention_heads, which is {heads}"
        )
    types = _layer_types(config, family, layers)
    ropes, layer_ropes = _ropes(config, types, head_dim, family)
    if family.architecture == "phi3" and ropes[0].kind != "default":
        config.refuse("rope_scaling", "is set, and long-context factors (longrope) are not supported")
    gemma = family.architecture == "gemma3"
    biased = family.bias_option and config.flag("attention_bias", False)
    return ModelSpec(
        architecture=family.architecture,
        vocab_size=config.integer("vocab_size", maximum=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=longest(
            ropes[layer_ropes[-1]], config.integer("max_position_embeddings"), stretched=gemma
        ),
        windows=_windows(config, types),
        ropes=ropes,
        layer_ropes=layer_ropes,
        norm_eps=config.number("rms_norm_eps", 1e-6, above=0),
        norm_offset=1.0 if gemma else 0.0,
        activation=_activation(config),
        qkv_bias=family.qkv_bias or biased,
        output_bias=biased,
        qk_norm=family.qk_norm,
        sandwich_norms=gemma,
        # The reference rounds this to the type it computes in; the decoder does that, we keep the number.
        embed_scale=math.sqrt(hidden) if gemma else 1.0,
        attention_scale=config.number("query_pre_attn_scalar", above=0) ** -0.5 if gemma else 0.0,
        tied_embeddings=_is_tied(outer, config, family),
        experts=_experts(config, family, layers) if family.experts else None,
        vision=_vision_spec(family.sees, outer, processor, hidden, layers) if family.sees else None,
        bos_token_id=next(iter(_token_ids("bos_token_id", generation, outer, config)), None),
        eos_token_ids=_token_ids("eos_token_id", generation, outer, config),
    )


def _is_tied(outer: Fields, config: Fields, family: Family) -> bool:
    if (
        family.sees == QWEN25_VL
    ):  # older files say it in the part of the language model, and the default outside
        return outer.flag(TIED, False) or config.flag(TIED, False)
    return (outer if outer.has(TIED) else config).flag(TIED, False)


def _encoder_spec(name: str, config: Fields) -> ModelSpec:
    heads = config.integer("num_attention_heads", maximum=MAX_WIDTH)
    hidden = config.integer("hidden_size", maximum=MAX_WIDTH)
    if hidden % heads:
        config.refuse("hidden_size", f"of {hidden} is no multiple of num_attention_heads, which is {heads}")
    layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    options, activation = encoder_options(name, config), _activation(config)
    if activation == "silu":
        config.refuse("hidden_act", "must be gelu or gelu_new")
    if options.num_positions <= options.position_offset:
        config.refuse("max_position_embeddings", f"of {options.num_positions} leaves no position for a token")
    ropes: tuple[RopeSpec, ...] = ()
    layer_ropes: tuple[int, ...] = ()
    eps = config.number("norm_eps" if ENCODERS[name].is_modern else "layer_norm_eps", 1e-12, above=0)
    if ENCODERS[name].is_modern:
        types = tuple(SLIDING if is_local else FULL for is_local in local_layers(config))
        ropes, layer_ropes = _ropes(_with_thetas(config), types, hidden // heads)
        if any(rope.kind == "dynamic" for rope in ropes):
            config.refuse("rope_parameters", "depend on the length of a text, which is not supported")
    return ModelSpec(
        architecture=ENCODERS[name].architecture,
        vocab_size=config.integer("vocab_size", maximum=MAX_VOCABULARY),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=options.num_positions - options.position_offset,
        windows=(None,) * layers,
        ropes=ropes,
        layer_ropes=layer_ropes,
        norm_eps=eps,
        activation=activation,
        encoder=options,
    )


def _vision_spec(name: str, outer: Fields, processor: Fields | None, width: int, below: int) -> ModelSpec:
    """The encoder of pictures beside a decoder of this width and number of layers."""
    family = VISION_FAMILIES[name]
    config = outer.group("vision_config", family.defaults) or Fields({}, outer.where, family.defaults)
    heads = config.integer(family.heads, maximum=MAX_WIDTH)
    hidden = config.integer("hidden_size", maximum=MAX_WIDTH)
    if hidden % heads:
        config.refuse("hidden_size", f"of {hidden} is no multiple of {family.heads}, which is {heads}")
    layers = config.integer(family.layers, maximum=MAX_LAYERS)
    options = vision_options(name, config, outer, processor, width)
    taps = () if options.patches is None else options.patches.taps
    if len(taps) > below:
        config.refuse(
            "deepstack_visual_indexes",
            f"names {len(taps)} layers, more than the {below} of the language model",
        )
    ropes: tuple[RopeSpec, ...] = ()
    if name != SIGLIP:
        ropes = (_picture_rope(config, hidden // heads),)
    return ModelSpec(
        architecture=name,
        vocab_size=0,
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=options.num_positions,
        windows=(None,) * layers,
        ropes=ropes,
        layer_ropes=(0,) * layers if ropes else (),
        norm_eps=config.number("layer_norm_eps", above=0),
        activation=_activation(config),
        encoder=options,
    )


def _picture_rope(config: Fields, head_dim: int) -> RopeSpec:
    """Patches turn by their row and their column."""
    if head_dim % 4:
        config.refuse(
            "num_heads", f"makes heads of {head_dim}, no multiple of 4, which have no row and column"
        )
    group = config.group("rope_parameters") or config
    if group.get("rope_type") not in (None, "default", "axial"):
        group.refuse("rope_type", "must be axial for an encoder of pictures")
    return RopeSpec(
        rotary_dim=head_dim,
        theta=group.number("rope_theta", 10_000.0, above=0),
        kind="axial",
        sections=(head_dim // 4,) * 2,
    )


def _with_thetas(config: Fields) -> Fields:
    """The thetas of a modern encoder in the spelling of other models."""
    if config.get("rope_parameters") is not None:
        return config
    whole = config.number("global_rope_theta", 160_000.0, above=0)
    local = config.optional_number("local_rope_theta", above=0) or whole
    groups = {FULL: {"rope_theta": whole}, SLIDING: {"rope_theta": local}}
    return Fields({"rope_parameters": groups}, config.where)


def _family(values: Mapping[str, object], where: str) -> Family:
    named = values.get("architectures")
    names = named if isinstance(named, list) else [] if named is None else [named]
    for name in names:
        if isinstance(named, list) and isinstance(name, str) and name in FAMILIES:
            return FAMILIES[name]
    supported = f"supported are {', '.join(sorted([*FAMILIES, *ENCODERS]))}"
    if not names:
        kind = values.get("model_type")
        likely = next((name for name, family in FAMILIES.items() if family.architecture == kind), None)
        hint = f'; its model_type {shown(kind)} suggests "architectures": ["{likely}"]' if likely else ""
        raise CheckpointError(
            f"{where}: names no architecture, so how to compute the model is not known{hint}; {supported}"
        )
    if not isinstance(named, list):
        raise CheckpointError(
            f"{where}: architectures must be a list of names, not {shown(named)}; {supported}"
        )
    what = ", ".join(shown(name) for name in names[:4])
    raise CheckpointError(f"{where}: architectures: {what} is not supported; {supported}")


def _refuse_unsupported(config: Fields) -> None:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.has(name):
            config.refuse(name, "is set, and soft caps are not supported")
    for name in ("mlp_bias", "use_bidirectional_attention"):
        if config.flag(name, False):
            config.refuse(name, "is true, which is not supported")


def _layer_types(config: Fields, family: Family, layers: int) -> tuple[str, ...]:
    """Per layer: whether it sees everything or a window."""
    if family.windows == "none":
        return (FULL,) * layers
    if family.windows == "all":
        return (FULL if config.get("sliding_window") is None else SLIDING,) * layers
    if family.architecture != "gemma3" and (
        not config.flag("use_sliding_window", False) or config.get("sliding_window") is None
    ):
        return (FULL,) * layers
    named = config.sequence("layer_types")
    if named:
        if len(named) != layers or any(name not in (FULL, SLIDING) for name in named):
            config.refuse("layer_types", f"must be {layers} times {FULL} or {SLIDING}, not {shown(named)}")
        return tuple(str(name) for name in named)
    if family.architecture == "gemma3":
        pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
        return tuple(SLIDING if (layer + 1) % pattern else FULL for layer in range(layers))
    # Qwen3's mixture has no such field: there the window holds for every layer.
    first = 0 if family.experts else config.integer("max_window_layers", 28, minimum=0)
    return tuple(SLIDING if layer >= first else FULL for layer in range(layers))


def _windows(config: Fields, types: tuple[str, ...]) -> tuple[int | None, ...]:
    if SLIDING not in types:
        return (None,) * len(types)
    window = config.integer("sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)


def _ropes(
    config: Fields, types: tuple[str, ...], head_dim: int, family: Family | None = None
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    sections = () if family is None else family.sections
    by_type = {kind: rope_for(config, kind, head_dim, sections) for kind in dict.fromkeys(types)}
    if family is not None and sections:
        by_type = {kind: _with_sections(config, rope, family) for kind, rope in by_type.items()}
    ropes = tuple(dict.fromkeys(by_type.values()))
    return ropes, tuple(ropes.index(by_type[kind]) for kind in types)


def _activation(config: Fields) -> str:
    name = "hidden_activation" if config.get("hidden_activation") is not None else "hidden_act"
    given = config.text(name, "silu")
    if given not in ACTIVATION_NAMES:
        config.refuse(name, f"{shown(given)} is not supported; supported are {', '.join(ACTIVATION_NAMES)}")
    return ACTIVATION_NAMES[given]


def _experts(config: Fields, family: Family, layers: int) -> ExpertsSpec:
    name = "num_local_experts" if config.has("num_local_experts") else "num_experts"
    count = config.integer(name, maximum=MAX_EXPERTS // layers)
    own_width = "moe_intermediate_size" if family.architecture == "qwen3_moe" else "intermediate_size"
    step = config.integer("decoder_sparse_step", 1)
    dense = config.sequence("mlp_only_layers")
    return ExpertsSpec(
        num_experts=count,
        per_token=config.integer("num_experts_per_tok", maximum=count),
        intermediate_size=config.integer(own_width, maximum=MAX_WIDTH),
        normalize=family.architecture == "mixtral" or config.flag("norm_topk_prob", False),
        layers=tuple(layer for layer in range(layers) if (layer + 1) % step == 0 and layer not in dense),
    )


def _token_ids(name: str, *sources: Fields | None) -> tuple[int, ...]:
    """One id or several, from the first source that has any."""
    for source in sources:
        value = None if source is None else source.get(name)
        if source is None or value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not ids or not all(type(item) is int and 0 <= item < MAX_VOCABULARY for item in ids):
            source.refuse(name, f"must be a token id or a list of them, not {shown(value)}")
        return tuple(dict.fromkeys(ids))
    return ()
