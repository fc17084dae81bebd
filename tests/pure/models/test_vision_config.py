"""Models that see pictures as their makers write them: the encoder, how tokens turn, and what presets say of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paceline.costs.presets import EncoderShape, model_shape
from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.encoder import CLIP_MEAN
from paceline.models.files.stored import tensor_names
from paceline.models.patches import PicturePlace, turns
from paceline.models.spec import ModelSpec
from tests.pure.models.made import spec_of

QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "temporal_patch_size": 2,
    },
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {
        "attention_bias": False,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


def _nested(values: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A flat config as newer versions write it."""
    outer = ("architectures", "model_type", "vision_config", "tie_word_embeddings")
    text = {name: value for name, value in values.items() if name not in outer}
    scaling = text.pop("rope_scaling")
    text["rope_parameters"] = {
        "rope_type": "default",
        "mrope_section": scaling["mrope_section"],
        "rope_theta": text.pop("rope_theta"),
    }
    return {**{name: values[name] for name in outer}, "text_config": text, **changes}


def _shape(spec: ModelSpec) -> EncoderShape:
    """What the cost model knows of an encoder, out of its spec."""
    vision = spec.vision
    assert vision is not None and vision.encoder is not None and vision.encoder.patches is not None
    options, patches = vision.encoder, vision.encoder.patches
    ends = ("vision.connector", "vision.tap")
    shapes = dict(tensor_names(spec))
    return EncoderShape(
        layers=vision.num_layers,
        hidden=vision.hidden_size,
        intermediate=vision.intermediate_size,
        gated=options.is_gated,
        units_per_token=patches.merge**2,
        end_parameters=sum(
            math.prod(shape) for name, shape in shapes.items() if name.startswith(ends) and len(shape) == 2
        ),
        input_values=math.prod(shapes["vision.embeddings.patch_embedding.weight"][1:]),
        full_layers=options.local.count(False) if options.local else None,
        window_units=(patches.window * patches.merge) ** 2,
        vectors_per_token=patches.values // patches.width,
    )


@pytest.mark.parametrize(
    ("name", "values"), [("qwen2.5-vl-7b", QWEN25), ("qwen3-vl-8b", QWEN3)], ids=["qwen2.5", "qwen3"]
)
def test_presets_are_what_a_config_says(name: str, values: dict[str, Any]) -> None:
    spec, shape = spec_of(values), model_shape(name)
    assert _shape(spec) == shape.encoder
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (
        shape.layers,
        shape.hidden,
        shape.intermediate,
        shape.vocab,
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (shape.heads, shape.kv_heads, shape.head_dim)
    assert (spec.qk_norm, spec.tied_embeddings) == (shape.qk_norm, shape.tied)


def test_qwen25() -> None:
    spec = spec_of(QWEN25)
    assert spec.architecture == "qwen2" and spec.qkv_bias and spec.windows == (None,) * 28
    (rope,) = spec.ropes
    assert (rope.theta, rope.sections, rope.is_interleaved) == (1e6, (16, 24, 24), False)
    assert rope.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    vision = spec.vision
    assert vision is not None and vision.encoder is not None and vision.encoder.patches is not None
    assert [layer for layer in range(32) if not vision.encoder.local[layer]] == [7, 15, 23, 31]
    assert vision.encoder.is_rms and vision.activation == "silu" and vision.norm_eps == 1e-6
    patches = vision.encoder.patches
    assert (patches.window, patches.frames, patches.has_bias, patches.mean) == (4, 2, False, CLIP_MEAN)
    assert vision.ropes[0].sections == (20, 20) and spec.num_deep == 0
    assert spec_of(_nested(QWEN25)) == spec


def test_qwen3() -> None:
    spec = spec_of(QWEN3)
    assert spec.architecture == "qwen3" and spec.qk_norm and not spec.qkv_bias
    (rope,) = spec.ropes
    assert rope.axes == (0, 1, 2) * 20 + (0,) * 4
    vision = spec.vision
    assert vision is not None and vision.encoder is not None and vision.encoder.patches is not None
    assert vision.encoder.patches.taps == (8, 16, 24) and spec.num_deep == 3
    assert vision.encoder.patches.side == 48 and vision.encoder.patches.mean == (0.5, 0.5, 0.5)


def test_a_matrix_that_is_used_twice_is_said_in_either_part() -> None:
    assert not spec_of(_nested(QWEN25)).tied_embeddings
    nested = _nested(QWEN25)
    nested["text_config"]["tie_word_embeddings"] = True
    assert spec_of(nested).tied_embeddings
    assert spec_of({**QWEN25, "tie_word_embeddings": True}).tied_embeddings


VISION25, VISION3 = QWEN25["vision_config"], QWEN3["vision_config"]


@pytest.mark.parametrize(
    ("told", "values", "changes"),
    [
        ("fullatt_block_indexes must number some of 32", QWEN25, {"fullatt_block_indexes": [7, 32]}),
        ("window_size is less than 2 patches of 14", QWEN25, {"window_size": 16}),
        ("out_hidden_size is not the hidden_size of the language model", QWEN25, {"out_hidden_size": 64}),
        ("in_channels must be 3", QWEN25, {"in_chans": 1}),
        ("num_heads makes heads of 10, no multiple of 4", QWEN25, {"num_heads": 128}),
        ("deepstack_visual_indexes must number some of 27", QWEN3, {"deepstack_visual_indexes": [8, 8]}),
        ("num_position_embeddings of 2300 is no square", QWEN3, {"num_position_embeddings": 2300}),
        ("rope_type must be axial", QWEN3, {"rope_parameters": {"rope_type": "yarn"}}),
    ],
)
def test_what_an_encoder_cannot_be_is_refused(
    told: str, values: dict[str, Any], changes: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=told):
        spec_of({**values, "vision_config": {**values["vision_config"], **changes}})


@pytest.mark.parametrize(
    ("told", "scaling"),
    [
        ("mrope_section must be three numbers that make 64", {"type": "mrope", "mrope_section": [16, 24]}),
        ("mrope_section must be three numbers that make 64", {"mrope_section": [16, 24, 25]}),
        ("mrope_interleaved must be false", {"mrope_interleaved": True, "mrope_section": [16, 24, 24]}),
        ("dynamic is not supported for a model that sees", {"type": "dynamic", "factor": 2.0}),
    ],
)
def test_a_rotation_that_is_not_of_the_architecture_is_refused(told: str, scaling: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=told):
        spec_of({**QWEN25, "rope_scaling": scaling})


def test_more_deep_vectors_than_layers_are_refused() -> None:
    text = {**QWEN3["text_config"], "num_hidden_layers": 2}
    with pytest.raises(CheckpointError, match="deepstack_visual_indexes names 3 layers, more than the 2"):
        spec_of({**QWEN3, "text_config": text})


def test_tokens_behind_pictures_turn_by_less_than_they_are_far() -> None:
    """3 tokens, a picture of 2 x 4 vectors, 2 tokens, one of 3 x 1, 2 tokens; in parts too."""
    pictures = [PicturePlace(3, 11, 2, 4), PicturePlace(13, 16, 3, 1)]
    time = [0, 1, 2] + [3] * 8 + [7, 8] + [9] * 3 + [12, 13]
    rows = [0, 1, 2] + [3] * 4 + [4] * 4 + [7, 8] + [9, 10, 11] + [12, 13]
    columns = [0, 1, 2] + [3, 4, 5, 6] * 2 + [7, 8] + [9] * 3 + [12, 13]
    whole = np.array([time, rows, columns])
    for start in range(18):
        for end in range(start, 19):
            np.testing.assert_array_equal(turns(pictures, start, end), whole[:, start:end])
