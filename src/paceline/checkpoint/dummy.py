"""Weights made up from a tensor's name: the same name gives the same values, on every machine and in any order.

For measuring and testing a model whose weights are not at hand. The text such a model writes means nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.checkpoint.spec import ModelSpec
from paceline.checkpoint.stored import StoredTensor, tensor_names

SPREAD = 0.02
MADE_UP = "MADE-UP"  # type of a tensor whose values are made when they are asked for


def dummy_tensors(spec: ModelSpec) -> dict[str, Callable[[], StoredTensor]]:
    """A maker for each tensor of `spec`; nothing is held in between."""

    def maker(name: str, shape: tuple[int, ...]) -> Callable[[], StoredTensor]:
        return lambda: _make(name, shape, spec)

    return {name: maker(name, shape) for name, shape in tensor_names(spec)}


def _make(name: str, shape: tuple[int, ...], spec: ModelSpec) -> StoredTensor:
    def values(_: StoredTensor) -> NDArray[np.float32]:
        if "norm" in name:
            return np.full(shape, 1.0 - spec.norm_offset, np.float32)
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
        drawn *= SPREAD
        return drawn

    return StoredTensor(name=name, shape=shape, dtype=MADE_UP, raw=np.zeros(0, np.uint8), decode=values)
