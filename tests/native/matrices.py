"""Stored matrices of every type, and float64 evaluations of what the kernels compute."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.models.files.stored import StoredTensor, decode_blocks, decode_float

Floats = NDArray[np.float32]
TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q5_0", "Q5_1", "F32", "F16", "BF16")


def stored(values: Floats, dtype: str, name: str = "matrix") -> StoredTensor:
    """A matrix as a file of that type holds it."""
    if dtype == "F32":
        raw, decode = values.view(np.uint8), decode_float
    elif dtype == "F16":
        raw, decode = values.astype(np.float16).view(np.uint8), decode_float
    elif dtype == "BF16":
        raw, decode = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8), decode_float
    elif dtype == "Q4_K":
        raw, decode = _random_q4_k(values), decode_blocks
    else:
        raw, decode = gguf.quants.quantize(values, gguf.GGMLQuantizationType[dtype]), decode_blocks
    return StoredTensor(name=name, shape=values.shape, dtype=dtype, raw=raw.reshape(-1), decode=decode)


def _random_q4_k(values: Floats) -> NDArray[np.uint8]:
    """Blocks with random fields: the package reads this type and does not write it."""
    rng = np.random.default_rng(values.size)
    blocks = rng.integers(0, 256, (values.shape[0], values.shape[1] // 256, 144), np.uint8)
    scales = rng.uniform(0.001, 0.01, (*blocks.shape[:2], 2)).astype(np.float16)
    blocks[..., :4] = scales.view(np.uint8)
    return blocks


def group_scales(inputs: Floats, input_bytes: int = 1) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Inputs as the kernels quantise them: integers, and a float32 scale for each group of 32."""
    grouped = inputs.reshape(len(inputs), -1, 32)
    top = np.abs(grouped).max(axis=-1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    steps, scale = grouped * inverse[..., None], top / np.float32(127)
    q = np.rint(steps)
    if input_bytes == 2:
        q, scale = 254 * q + np.rint((steps - q) * np.float32(254)), scale / np.float32(254)
    return q.astype(np.int64), scale.astype(np.float64)
