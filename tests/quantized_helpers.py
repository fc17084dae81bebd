"""Quantised tensors for tests, with the bytes a GGUF file would hold, and a tiny model made of them."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.models.files.stored import StoredTensor, decode_blocks, decode_float, tensor_names
from paceline.models.spec import ModelSpec, RopeSpec

Floats = NDArray[np.float32]
BY_HAND = ("Q4_K", "Q6_K")  # formats the gguf package reads but does not write
# Bytes of a block, and where its halves lie.
HAND_LAYOUT = {"Q4_K": (144, (0, 2)), "Q6_K": (210, (208,))}


def quantized(name: str, values: Floats, dtype: str) -> StoredTensor:
    """`values` as a file of type `dtype` holds them."""
    if dtype == "F32":
        raw = np.ascontiguousarray(values, np.float32).view(np.uint8).ravel()
        return StoredTensor(name=name, shape=values.shape, dtype=dtype, raw=raw, decode=decode_float)
    raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype]).ravel()
    return StoredTensor(name=name, shape=values.shape, dtype=dtype, raw=raw, decode=decode_blocks)


def by_hand(name: str, shape: tuple[int, int], dtype: str, rng: np.random.Generator) -> StoredTensor:
    """A tensor of random bytes, with halves of a sensible size where the format has scales."""
    size, halves = HAND_LAYOUT[dtype]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // 256, size), dtype=np.uint8)
    for at in halves:
        scales = (rng.random(len(blocks)) * 2e-4 + 1e-4).astype(np.float16)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return StoredTensor(name=name, shape=shape, dtype=dtype, raw=blocks.ravel(), decode=decode_blocks)


def stored_matrix(shape: tuple[int, int], dtype: str, seed: int = 0) -> StoredTensor:
    rng = np.random.default_rng(seed)
    if dtype in BY_HAND:
        return by_hand("w", shape, dtype, rng)
    return quantized("w", rng.standard_normal(shape).astype(np.float32) * 0.1 + 0.02, dtype)


def tiny_spec(*, tied: bool = False, window: int | None = None) -> ModelSpec:
    """A Llama whose rows are whole groups, with heads wide enough for the products a real model makes."""
    layers = 3
    return ModelSpec(
        architecture="llama",
        vocab_size=160,
        hidden_size=128,
        intermediate_size=192,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=512,
        windows=(None, window, None),
        ropes=(RopeSpec(rotary_dim=32),),
        layer_ropes=(0,) * layers,
        tied_embeddings=tied,
        eos_token_ids=(2,),
    )


class QuantizedSource:
    """Random tensors of a spec: matrices in `dtype`, norms as float32; of quantised ones the embedding has eight bits.

    `mixed`: values have eight bits too, as in many files, so that a product is made of two kinds.
    """

    def __init__(self, spec: ModelSpec, dtype: str, seed: int = 0, *, mixed: bool = False) -> None:
        self.spec = spec
        rng = np.random.default_rng(seed)
        self._tensors: dict[str, StoredTensor] = {}
        for name, shape in tensor_names(spec):
            values = rng.standard_normal(shape).astype(np.float32) * 0.2
            if len(shape) == 1:
                self._tensors[name] = quantized(name, 1 + 0.5 * values, "F32")
            else:
                in_eight = dtype != "F32" and ("embed" in name or (mixed and "v_proj" in name))
                kind = "Q8_0" if in_eight else dtype
                self._tensors[name] = quantized(name, values, kind)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str) -> StoredTensor:
        return self._tensors[name]
