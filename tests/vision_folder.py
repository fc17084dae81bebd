"""Folders of models that see, small enough to make in a moment: configs, tokenizers of single characters and the
settings of pictures. No weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.model_folder import CHARACTERS, backend_of, write_model

TILE_CONTROLS = (
    *("<|im_start|>", "<end_of_utterance>", "<s>", "</s>"),
    *("<image>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
PATCH_CONTROLS = (
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
# As SmolVLM's: a colon without a space before a picture.
TILE_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# As Qwen2.5-VL's.
PATCH_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SIDE, PATCH, SCALE = 32, 8, 2  # of a tile, in pixels: 16 patches, 4 vectors
CONTEXT = 2048


def write_tile_model(folder: Path, **changes: Any) -> Path:
    """Like SmolVLM: tiles of 32 pixels."""
    config = {
        "architectures": ["Idefics3ForConditionalGeneration"],
        "model_type": "idefics3",
        "image_token_id": TILE_CONTROLS.index("<image>"),
        "scale_factor": SCALE,
        "tie_word_embeddings": False,
        "text_config": _text(TILE_CONTROLS),
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": SIDE,
            "patch_size": PATCH,
        },
        **changes,
    }
    settings = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": True,
        "size": {"longest_edge": 4 * SIDE},
        "max_image_size": {"longest_edge": SIDE},
        "resample": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": (SIDE // PATCH // SCALE) ** 2}
    return _write(folder, config, TILE_CONTROLS, TILE_TEMPLATE, settings, processor)


def write_patch_model(folder: Path, **changes: Any) -> Path:
    """Like Qwen2.5-VL: patches of 14 pixels, four to a vector."""
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **_text(PATCH_CONTROLS),
        "model_type": "qwen2_5_vl",
        "image_token_id": PATCH_CONTROLS.index("<|image_pad|>"),
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": {
            **_PATCH_ENCODER,
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        **changes,
    }
    return _write(folder, config, PATCH_CONTROLS, PATCH_TEMPLATE, _patch_settings(14), {})


def write_deep_model(folder: Path, **changes: Any) -> Path:
    """Like Qwen3-VL: patches of 16 pixels, two layers of the decoder get vectors of their own."""
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": PATCH_CONTROLS.index("<|image_pad|>"),
        "text_config": {
            **_text(PATCH_CONTROLS),
            "model_type": "qwen3_vl_text",
            "head_dim": 16,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            **_PATCH_ENCODER,
            "patch_size": 16,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        **changes,
    }
    settings = {**_patch_settings(16), "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return _write(folder, config, PATCH_CONTROLS, PATCH_TEMPLATE, settings, {})


_PATCH_ENCODER = {
    "depth": 3,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_heads": 3,
    "in_channels": 3,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _patch_settings(size: int) -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 64,
        "patch_size": size,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "resample": 3,
    }


def _text(controls: tuple[str, ...]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": len(controls) + len(CHARACTERS),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 3,
    }


def _write(
    folder: Path,
    config: dict[str, Any],
    controls: tuple[str, ...],
    template: str,
    settings: dict[str, Any],
    processor: dict[str, Any],
) -> Path:
    write_model(folder, template=template)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    if processor:
        (folder / "processor_config.json").write_text(json.dumps(processor))
    backend_of(controls).save(str(folder / "tokenizer.json"))
    return folder
