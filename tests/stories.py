"""A real model of 260,000 weights that tells stories, out of llama2.c's file into a folder; without a tokenizer.

The matrices of this copy of the file have been transposed in place five times, each time as if they had rows of the
length of their columns: that is undone here. Read right, the model begins with tokens 403, 407, 261, 378 behind the
start (once upon a time).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.safetensors import write_safetensors

# Beside the checkout, or beside a folder it lies in; not there: tests that need it are skipped.
_PLACES = [parent / "shared" / "data" / "stories260K.bin" for parent in Path(__file__).resolve().parents]
FILE = next((place for place in _PLACES if place.is_file()), _PLACES[0])
START, END = 1, 2
TRANSPOSED = 5  # times


def write_stories(folder: Path) -> Path:
    """The file is a header of seven numbers, then matrices of all layers, kind by kind."""
    data = FILE.read_bytes()
    dim, inner, layers, heads, kv_heads, vocab, length = np.frombuffer(data, np.int32, 7).tolist()
    size = dim // heads
    values: NDArray[np.float32] = np.frombuffer(data, np.float32, offset=28)
    at = 0

    def take(*shape: int) -> NDArray[np.float32]:
        nonlocal at
        count = int(np.prod(shape))
        at += count
        return values[at - count : at].reshape(shape)

    def restored(matrices: NDArray[np.float32]) -> NDArray[np.float32]:
        shape = matrices.shape
        for _ in range(TRANSPOSED):
            matrices = matrices.transpose(0, 2, 1).reshape(shape)
        return matrices

    def halves(matrix: NDArray[np.float32], count: int) -> NDArray[np.float32]:
        """Pairs of a head's rows side by side become its two halves."""
        return matrix.reshape(count, size // 2, 2, dim).transpose(0, 2, 1, 3).reshape(-1, dim)

    arrays = {"model.embed_tokens.weight": take(vocab, dim)}
    kinds = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (kv_heads * size, dim),
        "self_attn.v_proj": (kv_heads * size, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
        "mlp.up_proj": (inner, dim),
    }
    for name, shape in kinds.items():
        matrices = take(layers, *shape)
        for layer, matrix in enumerate(restored(matrices) if len(shape) > 1 else matrices):
            if name.endswith(("q_proj", "k_proj")):
                matrix = halves(matrix, heads if name.endswith("q_proj") else kv_heads)
            arrays[f"model.layers.{layer}.{name}.weight"] = matrix
    arrays["model.norm.weight"] = take(dim)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": START,
        "eos_token_id": END,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", arrays, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
