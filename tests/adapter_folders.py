"""Folders of PEFT LoRA adapters, written by the tests, and the same adapters merged into a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.safetensors import write_safetensors
from paceline.models.spec import ModelSpec

Arrays = dict[str, NDArray[np.float32]]
ALL_SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def sizes(spec: ModelSpec) -> dict[str, tuple[str, int, int]]:
    """Of every module: the group of names it is in, its outputs and its inputs."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "q_proj": ("self_attn", queries, hidden),
        "k_proj": ("self_attn", keys, hidden),
        "v_proj": ("self_attn", keys, hidden),
        "o_proj": ("self_attn", hidden, queries),
        "gate_proj": ("mlp", inner, hidden),
        "up_proj": ("mlp", inner, hidden),
        "down_proj": ("mlp", hidden, inner),
        "qkv_proj": ("self_attn", queries + 2 * keys, hidden),
        "gate_up_proj": ("mlp", 2 * inner, hidden),
    }


def adapter_arrays(
    spec: ModelSpec, targets: Sequence[str] = ALL_SEVEN, rank: int = 4, seed: int = 0, size: float = 0.5
) -> Arrays:
    """Tensors of an adapter, under PEFT's names."""
    random = np.random.default_rng(seed)
    arrays: Arrays = {}
    for layer in range(spec.num_layers):
        for target in targets:
            group, outputs, inputs = sizes(spec)[target]
            stem = f"{PREFIX}model.layers.{layer}.{group}.{target}.lora_"
            arrays[f"{stem}A.weight"] = random.standard_normal((rank, inputs), np.float32) * inputs**-0.5
            arrays[f"{stem}B.weight"] = random.standard_normal((outputs, rank), np.float32) * size
    return arrays


def write_adapter(
    folder: Path,
    arrays: Mapping[str, NDArray[Any]],
    *,
    rank: Any = 4,
    targets: Sequence[Any] | str | None = ALL_SEVEN,
    **config: Any,
) -> Path:
    """A folder as PEFT writes it; `config` are further fields of its description."""
    folder.mkdir(parents=True, exist_ok=True)
    named = targets if targets is None or isinstance(targets, str) else list(targets)
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": named,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "inference_mode": True,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written), encoding="utf-8")
    write_safetensors(folder / "adapter_model.safetensors", arrays, {"format": "pt"})
    return folder


def merged(
    weights: Mapping[str, NDArray[np.float32]], arrays: Mapping[str, NDArray[Any]], scale: float
) -> Arrays:
    """A model's weights with an adapter's products added."""
    result = dict(weights)
    for name, b in arrays.items():
        if not name.endswith("lora_B.weight"):
            continue
        a = arrays[name.replace("lora_B", "lora_A")]
        whole = name.removeprefix(PREFIX).replace("lora_B.weight", "weight")
        result[whole] = result[whole] + np.float32(scale) * (b @ a)
    return result
