"""A GGUF model on the other side: the same numbers in a model of transformers, built by hand from the spec.

transformers' own GGUF loader is not used: it is slow, and a mistake shared with it would show nowhere. `file_values`
reads a tensor with the gguf package alone, so that both sides cannot be wrong together.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from paceline.models.files.config_fields import CheckpointError
from paceline.models.files.fetch import fetch_packaged
from paceline.models.files.open import Checkpoint
from paceline.models.spec import ModelSpec

VARIABLE = "PACELINE_SMOLLM2"


def smollm2_path() -> Path | None:
    """The file named by the environment, or the default model where it has been fetched; fetches nothing."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    try:
        return fetch_packaged(local_only=True)
    except CheckpointError:
        return None


def transformers_model(checkpoint: Checkpoint) -> Any:
    """A Llama or Gemma 3 of transformers with the checkpoint's weights as float32, eager attention."""
    spec = checkpoint.spec
    makers = {"llama": _llama_config, "gemma3": _gemma3_config}
    config = makers[spec.architecture](spec)
    config._attn_implementation = "eager"
    kinds = {"llama": transformers.LlamaForCausalLM, "gemma3": transformers.Gemma3ForCausalLM}
    model = kinds[spec.architecture](config)
    weights = {name: _weight(checkpoint, name) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"} and (not missing or spec.tied_embeddings), missing
    model.tie_weights()
    return model.float().eval()


def file_values(path: Path, name: str) -> NDArray[np.float32]:
    """One tensor as the file names and orders it."""
    tensor = next(tensor for tensor in _reader(path).tensors if tensor.name == name)
    values: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    return values


@cache
def _reader(path: Path) -> Any:
    return gguf.GGUFReader(path)  # takes seconds: it reads every token of the vocabulary


def in_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of a head from GGUF's order, in which a rotated pair lies side by side, to first and second halves."""
    out = np.empty_like(rows)
    size = len(rows) // num_heads
    for head in range(num_heads):
        for pair in range(size // 2):
            out[head * size + pair] = rows[head * size + 2 * pair]
            out[head * size + size // 2 + pair] = rows[head * size + 2 * pair + 1]
    return out


def _weight(checkpoint: Checkpoint, name: str) -> Tensor:
    weight = torch.from_numpy(np.array(checkpoint.tensor(name).to_float32()))
    if checkpoint.spec.architecture == "gemma3" and len(weight.shape) == 1:
        return weight + checkpoint.spec.norm_offset - 1  # transformers adds one to every norm
    return weight


def _sizes(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
    }


def _llama_config(spec: ModelSpec) -> Any:
    assert spec.ropes[0].kind == "default" and not spec.qk_norm and spec.activation == "silu"
    rope = {"rope_type": "default", "rope_theta": spec.ropes[0].theta}
    return transformers.LlamaConfig(**_sizes(spec), rope_parameters=rope)


def _gemma3_config(spec: ModelSpec) -> Any:
    kinds = ["full_attention" if window is None else "sliding_attention" for window in spec.windows]
    ropes = {}
    for kind, index in zip(kinds, spec.layer_ropes, strict=True):
        ropes[kind] = {"rope_type": "default", "rope_theta": spec.ropes[index].theta}
    return transformers.Gemma3TextConfig(
        **_sizes(spec),
        layer_types=kinds,
        sliding_window=next(window for window in spec.windows if window is not None),
        query_pre_attn_scalar=round(spec.attention_scale**-2),
        hidden_activation="gelu_pytorch_tanh",
        rope_parameters=ropes,
    )
