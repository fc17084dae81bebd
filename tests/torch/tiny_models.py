"""Tiny random models of every architecture, made by transformers and saved to disk: the reference of the runner."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 160
HIDDEN = 32
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # wide enough that logits differ clearly and greedy text does not repeat itself
}


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _gemma3() -> Any:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return transformers.Gemma3TextConfig(
        **SIZES | {"head_dim": 16, "sliding_window": 24, "layer_types": kinds, "query_pre_attn_scalar": 16}
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-mha": lambda: transformers.LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "llama-linear": lambda: transformers.LlamaConfig(**SIZES, **_rope("linear", factor=2.0)),
    "llama-dynamic": lambda: transformers.LlamaConfig(
        **SIZES | {"max_position_embeddings": 48}, **_rope("dynamic", factor=2.0)
    ),
    "llama-llama3": lambda: transformers.LlamaConfig(
        **SIZES,
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": lambda: transformers.LlamaConfig(
        **SIZES, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=20),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gemma3": _gemma3,
    "phi3": lambda: transformers.Phi3Config(**SIZES, partial_rotary_factor=0.5),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
}
NAMES = tuple(CONFIGS)


def make_reference(name: str) -> Any:
    """A model with random weights, biases and norms included, ready to run."""
    torch.manual_seed(NAMES.index(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):  # made as ones and zeros, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if (
            model.config.tie_word_embeddings
        ):  # else the input outweighs the layers, and every token follows itself
            model.get_input_embeddings().weight.mul_(0.3)
    return model.float().eval()


def save(name: str, folder: Path) -> Any:
    """Write the model to `folder` and return it."""
    model = make_reference(name)
    model.save_pretrained(folder)
    return model
