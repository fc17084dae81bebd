"""Rotary positions out of a config.json, in the old spelling (`rope_theta`, `rope_scaling`) and the new one.

The new one, `rope_parameters`, may be one group of fields or one group per kind of layer. Numbers that a file may
leave out are worked out here as the reference implementation does, so that the decoder only applies them.
"""

from __future__ import annotations

import math

from paceline.checkpoint.fields import MAX_SIZE, NEGATIVE, Fields
from paceline.checkpoint.spec import ROPE_KINDS, RopeSpec

FULL = "full_attention"
SLIDING = "sliding_attention"
# Where the kind takes its unscaled length from the model's own when the file does not say.
NEEDS_TRAINED = ("llama3", "yarn", "dynamic")


def rope_for(config: Fields, layer_type: str, head_dim: int) -> RopeSpec:
    """The rotation of the layers of one kind."""
    group = _group(config, layer_type)
    kind = group.get("rope_type") or group.get("type") or "default"
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
    if kind == "llama3":
        return RopeSpec(
            rotary_dim=rotary_dim,
            theta=theta,
            kind=kind,
            factor=factor,
            trained_positions=trained,
            low_freq_factor=group.number("low_freq_factor", above=0),
            high_freq_factor=group.number("high_freq_factor", above=0),
        )
    if kind == "yarn":
        return _yarn(
            group, RopeSpec(rotary_dim=rotary_dim, theta=theta, factor=factor, trained_positions=trained)
        )
    return RopeSpec(rotary_dim=rotary_dim, theta=theta, kind=kind, factor=factor, trained_positions=trained)


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
    """The fields for one kind of layer; those of the model itself where a file has none of its own."""
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
    return RopeSpec(
        rotary_dim=plain.rotary_dim,
        theta=plain.theta,
        kind="yarn",
        factor=plain.factor,
        trained_positions=plain.trained_positions,
        beta_fast=group.number("beta_fast", 32.0, above=NEGATIVE) or 32.0,
        beta_slow=group.number("beta_slow", 1.0, above=NEGATIVE) or 1.0,
        truncate=group.flag("truncate", True),
        attention_factor=attention_factor,
    )
