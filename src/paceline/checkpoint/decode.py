"""Stored bytes turned into float32: plain floats here, the blocks of GGUF's quantised types by the gguf package."""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.stored import StoredTensor


def decode_float(tensor: StoredTensor) -> NDArray[np.float32]:
    """Values of a float tensor as float32; a view where the file holds float32 at an even address."""
    raw = tensor.raw
    if tensor.dtype == "F32":
        values = raw.view("<f4")
        if not values.flags.aligned:
            values = values.copy()
    elif tensor.dtype == "BF16":
        # The upper half of a float32.
        values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    elif tensor.dtype == "F16":
        values = raw.view("<f2").astype(np.float32)
    else:
        assert tensor.dtype == "F64", tensor.dtype
        with np.errstate(over="ignore"):  # beyond float32 is infinite, which the engine reports as such
            values = raw.view("<f8").astype(np.float32)
    return values.reshape(tensor.shape)


def decode_blocks(tensor: StoredTensor) -> NDArray[np.float32]:
    """Values of a tensor whose rows are quantised in blocks."""
    import gguf  # not needed to open a model, only here

    rows = tensor.raw.reshape(int(np.prod(tensor.shape[:-1])), -1)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.dtype])
    return cast(NDArray[np.float32], values.astype(np.float32, copy=False).reshape(tensor.shape))
