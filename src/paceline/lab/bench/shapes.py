"""Shapes of well-known models, for measuring an engine where their weights are not at hand.

Owns the descriptions (the fields of a config.json) and writing one into a folder that the engine can load with
made-up weights. A shape has no tokenizer, workloads are token ids; what needs text gets one of made-up words.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "llama-3.1-8b": {
        **_QWEN3,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    # For trying the command out: every workload fits, on any machine.
    "tiny": {
        **_QWEN3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 10_240,
        "max_position_embeddings": 8192,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}
WORD_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"
# What the figures people compare with were measured with.
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 1024


def write_shape(name: str, folder: Path) -> dict[str, Any]:
    """Describe shape `name` in `folder`; returns the options of `LLM` that load it, what they are by default."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1), encoding="utf-8")
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "gpu_memory_utilization": 0.9,
    }


def write_tokenizer(name: str, folder: Path) -> None:
    """A tokenizer with as many tokens as the shape has: all bytes, then made-up words. Text becomes bytes; an answer
    may be made of any of them."""
    shape = SHAPES[name]
    write_words(folder, shape["vocab_size"], shape["eos_token_id"])


def write_words(folder: Path, size: int, end: int) -> None:
    """One of `size` tokens, of which `end` ends texts."""
    tokens = _byte_letters()
    for length in itertools.count(2):
        words = map("".join, itertools.product(WORD_LETTERS, repeat=length))
        tokens += itertools.islice(words, size - len(tokens))
        if len(tokens) == size:
            break
    vocabulary = {token: index for index, token in enumerate(tokens) if index != end}
    added = {"id": end, "content": "<|end|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    value = {
        "version": "1.0",
        "added_tokens": [added | flags],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary | {"<|end|>": end}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a tokenizer of bytes: itself where it can be seen."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = itertools.count(0x100)
    return [chr(byte) if byte in seen else chr(next(hidden)) for byte in range(0x100)]
