"""Folders written by transformers: every architecture opens, and its spec and values are the reference's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from paceline.models.files.open import open_checkpoint
from paceline.models.spec import ModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2}
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]


def gemma3_text() -> Any:
    return transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=16, layer_types=TYPES, query_pre_attn_scalar=9
    )


def gemma3_vision() -> Any:
    vision = transformers.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    return transformers.Gemma3Config(text_config=gemma3_text(), vision_config=vision)


# By name: transformers reads a class when it is asked for first, which takes long where all tests are collected.
MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", lambda: transformers.LlamaConfig(**SIZES)),
    "llama-tied-biased": (
        "LlamaForCausalLM",
        lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True, head_dim=16),
    ),
    "mistral": ("MistralForCausalLM", lambda: transformers.MistralConfig(**SIZES, sliding_window=None)),
    "mistral-window": ("MistralForCausalLM", lambda: transformers.MistralConfig(**SIZES, sliding_window=16)),
    "qwen2": ("Qwen2ForCausalLM", lambda: transformers.Qwen2Config(**SIZES)),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        lambda: transformers.Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1
        ),
    ),
    "qwen3": (
        "Qwen3ForCausalLM",
        lambda: transformers.Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    ),
    "gemma3": ("Gemma3ForCausalLM", gemma3_text),
    "gemma3-vision": ("Gemma3ForConditionalGeneration", gemma3_vision),
    "phi3": (
        "Phi3ForCausalLM",
        lambda: transformers.Phi3Config(**SIZES, sliding_window=16, partial_rotary_factor=0.5),
    ),
    "mixtral": (
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4),
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        lambda: transformers.Qwen3MoeConfig(
            **SIZES, **EXPERTS, num_experts=4, moe_intermediate_size=12, mlp_only_layers=[1], head_dim=16
        ),
    ),
}


def made(name: str) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config())
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that none looks like another
            parameter.normal_()
    return model


def expected(state: dict[str, torch.Tensor], name: str, spec: ModelSpec) -> torch.Tensor:
    """The tensor called `name` out of the reference's own parameters, fused and stacked as they are."""
    if name in state:
        return state[name]
    layer, _, rest = name.partition(".self_attn.")
    if rest and f"{layer}.self_attn.qkv_proj.weight" in state:
        sizes = [spec.num_heads * spec.head_dim] + [spec.num_kv_heads * spec.head_dim] * 2
        parts: tuple[torch.Tensor, ...] = torch.split(state[f"{layer}.self_attn.qkv_proj.weight"], sizes)
        return parts["qkv".index(rest[0])]
    layer, _, rest = name.partition(".mlp.")
    part = rest.split(".")[-2].removesuffix("_proj")
    if rest.startswith("experts."):
        stack = state[f"{layer}.mlp.experts.{'down_proj' if part == 'down' else 'gate_up_proj'}"]
        one = stack[int(rest.split(".")[1])]
        return one if part == "down" else one.chunk(2)[("gate", "up").index(part)]
    return state[f"{layer}.mlp.gate_up_proj.weight"].chunk(2)[("gate", "up").index(part)]


def assert_same(folder: Path, model: Any) -> ModelSpec:
    checkpoint = open_checkpoint(folder)
    state = {
        name.replace("model.language_model.", "model."): value for name, value in model.state_dict().items()
    }
    for name in checkpoint.names():
        found = checkpoint.tensor(name).to_float32()
        assert np.array_equal(found, expected(state, name, checkpoint.spec).float().numpy()), name
    return checkpoint.spec


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_opens_with_the_references_values(tmp_path: Path, name: str) -> None:
    model = made(name)
    model.save_pretrained(tmp_path)
    spec = assert_same(tmp_path, model)
    assert spec.architecture == name.partition("-")[0]
    config = model.config.get_text_config()
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads) == (3, 4, 2)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 8) and spec.norm_eps == config.rms_norm_eps
    assert spec.tied_embeddings == config.tie_word_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    attention = model.get_decoder().layers
    assert spec.windows == tuple(getattr(layer.self_attn, "sliding_window", None) for layer in attention) or (
        # These two keep their window in the config and use it for every layer.
        spec.windows == (config.sliding_window,) * 3 and spec.architecture in ("mistral", "phi3")
    )
    assert spec.softmax_scale == pytest.approx(attention[0].self_attn.scaling)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_stacked_experts_as_the_reference_holds_them(tmp_path: Path, name: str) -> None:
    model = made(name)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert_same(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    model = made("llama").to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(tmp_path, model)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
    },
    "yarn-given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.8,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rotations_are_the_references(tmp_path: Path, name: str) -> None:
    config = transformers.LlamaConfig(**SIZES, rope_parameters={"rope_theta": 500.0, **ROPES[name]})
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    (rope,) = open_checkpoint(tmp_path).spec.ropes
    written = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    assert (rope.kind, rope.theta, rope.rotary_dim) == (written["rope_type"], 500.0, 8)
    assert rope.factor == written.get("factor", 1.0)
    if name == "dynamic":
        assert rope.trained_positions == config.max_position_embeddings
    elif name != "default":
        assert rope.trained_positions == written.get("original_max_position_embeddings", 0)
    if name != "default":
        _, attention_factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope.kind](
            config, torch.device("cpu")
        )
        assert rope.attention_factor == pytest.approx(attention_factor)


def test_gemma3_embeddings_and_norms(tmp_path: Path) -> None:
    model = made("gemma3")
    model.save_pretrained(tmp_path)
    spec = open_checkpoint(tmp_path).spec
    assert spec.embed_scale == pytest.approx(float(model.model.embed_tokens.embed_scale))
    assert spec.attention_scale == pytest.approx(1 / 3)
    norm = model.model.norm
    hidden = torch.randn(5, 32)
    plain = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + spec.norm_eps)
    assert torch.allclose(norm(hidden), plain * (norm.weight + spec.norm_offset), atol=1e-5)
    assert [spec.ropes[index].theta for index in spec.layer_ropes] == [10_000.0, 1_000_000.0, 10_000.0]
