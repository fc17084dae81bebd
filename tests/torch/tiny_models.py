"""Tiny random models of every architecture, made by transformers and saved to disk: the reference of the runners.

One table for the CPU, whose kernels want heads of 16, and the card, whose kernels want wider ones. Needs nothing but
torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 160
HIDDEN = 64


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """How large the models of the table are made."""

    vocab: int
    hidden: int
    inner: int
    positions: int
    spread: float  # of the weights
    head: int  # where an architecture names it
    qwen3_head: int
    mistral_window: int
    gemma3_window: int
    qwen3_experts: int
    expert_inner: int

    @property
    def common(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": self.positions,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "initializer_range": self.spread,
        }


SMALL = TinySizes(
    vocab=VOCAB,
    hidden=HIDDEN,
    inner=64,
    positions=256,
    spread=0.15,  # wide enough that logits differ clearly and greedy text does not repeat itself
    head=16,
    qwen3_head=16,
    mistral_window=20,
    gemma3_window=24,
    qwen3_experts=4,
    expert_inner=32,
)
CARD = TinySizes(
    vocab=512,
    hidden=256,
    inner=512,
    positions=512,
    spread=0.05,
    head=64,
    qwen3_head=128,
    mistral_window=90,
    gemma3_window=100,
    qwen3_experts=8,
    expert_inner=128,
)


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _llama(sizes: TinySizes, **more: Any) -> Any:
    return transformers.LlamaConfig(**sizes.common | more)


def _llama3(sizes: TinySizes) -> Any:
    factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return _llama(sizes, **_rope("llama3", **factors, original_max_position_embeddings=64))


def _gemma3(sizes: TinySizes) -> Any:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    more = {"sliding_window": sizes.gemma3_window, "layer_types": kinds, "query_pre_attn_scalar": sizes.head}
    return transformers.Gemma3TextConfig(**sizes.common, head_dim=sizes.head, **more)


def _qwen3_moe(sizes: TinySizes) -> Any:
    return transformers.Qwen3MoeConfig(
        **sizes.common,
        head_dim=sizes.head,
        num_experts=sizes.qwen3_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=sizes.expert_inner,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    )


CONFIGS: dict[str, Callable[[TinySizes], Any]] = {
    "llama": _llama,
    "llama-tied": lambda sizes: _llama(sizes, tie_word_embeddings=True),
    "llama-mha": lambda sizes: _llama(sizes, num_key_value_heads=4),
    "llama-linear": lambda sizes: _llama(sizes, **_rope("linear", factor=2.0)),
    "llama-dynamic": lambda sizes: _llama(sizes, max_position_embeddings=48, **_rope("dynamic", factor=2.0)),
    "llama-llama3": _llama3,
    "llama-yarn": lambda sizes: _llama(
        sizes, **_rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "mistral": lambda sizes: transformers.MistralConfig(**sizes.common, sliding_window=sizes.mistral_window),
    "qwen2": lambda sizes: transformers.Qwen2Config(**sizes.common),
    "qwen3": lambda sizes: transformers.Qwen3Config(**sizes.common, head_dim=sizes.qwen3_head),
    "gemma3": _gemma3,
    "phi3": lambda sizes: transformers.Phi3Config(**sizes.common, partial_rotary_factor=0.5),
    "mixtral": lambda sizes: transformers.MixtralConfig(
        **sizes.common, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": _qwen3_moe,
}
NAMES = tuple(CONFIGS)


def make_model(name: str, sizes: TinySizes, seed: int) -> Any:
    """A model with random weights, biases and norms included."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](sizes), attn_implementation="eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):  # made as ones and zeros, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def make_reference(name: str) -> Any:
    """A small one, ready to run."""
    model = make_model(name, SMALL, NAMES.index(name))
    if (
        model.config.tie_word_embeddings
    ):  # else the input outweighs the layers, and every token follows itself
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.3)
    return model.float().eval()


def save(name: str, folder: Path) -> Any:
    """Write the model to `folder` and return it."""
    model = make_reference(name)
    model.save_pretrained(folder)
    return model
