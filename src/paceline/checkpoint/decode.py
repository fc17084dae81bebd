"""Stored bytes turned into float32: plain floats here, the blocks of GGUF's quantised types by the gguf package.

Bytes that are no sensible numbers become infinite or not-a-number without a word; the engine notices when a row of
its results is not finite.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.stored import StoredTensor

Floats = NDArray[np.float32]

Q8_VALUES = 32  # in a block of Q8_0, behind a scale of two bytes
BLOCKS_AT_ONCE = 2**15  # few enough to stay in the processor's cache


def decode_float(tensor: StoredTensor) -> Floats:
    """Values of a float tensor as float32; a view where the file holds float32 at an even address."""
    raw = tensor.raw
    if tensor.dtype == "F32":
        values = raw.view("<f4")
        if not values.flags.aligned:
            values = values.copy()
    elif tensor.dtype == "BF16":
        # The upper half of a float32.
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        assert tensor.dtype in ("F16", "F64"), tensor.dtype
        with np.errstate(over="ignore", invalid="ignore"):
            values = raw.view("<f2" if tensor.dtype == "F16" else "<f8").astype(np.float32)
    return values.reshape(tensor.shape)


def decode_blocks(tensor: StoredTensor) -> Floats:
    """Values of a tensor whose rows are quantised in blocks."""
    with np.errstate(over="ignore", invalid="ignore"):
        if tensor.dtype == "Q8_0":
            return _q8(tensor)
        import gguf  # not needed to open a model, only here

        rows = tensor.raw.reshape(int(np.prod(tensor.shape[:-1])), -1)
        values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.dtype])
    return cast(Floats, values.astype(np.float32, copy=False).reshape(tensor.shape))


def _q8(tensor: StoredTensor) -> Floats:
    """The type of most embeddings, and so of a small model's largest tensor: worth its own, faster road."""
    blocks = tensor.raw.reshape(-1, 2 + Q8_VALUES)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    values = np.empty((blocks.shape[0], Q8_VALUES), np.float32)
    for start in range(0, blocks.shape[0], BLOCKS_AT_ONCE):
        part = slice(start, start + BLOCKS_AT_ONCE)
        np.multiply(blocks[part, 2:].view(np.int8), scales[part], out=values[part])
    return values.reshape(tensor.shape)
