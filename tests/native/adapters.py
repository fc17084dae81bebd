"""Adapters with random numbers, without a file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.models.files.adapter_files import Adapter, LowRank
from paceline.models.spec import ModelSpec
from paceline.runner.native.layout import PARTS

Floats = NDArray[np.float32]


def in_type(values: Floats, dtype: str) -> Floats:
    """The numbers that are left of these in a type."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return values.astype(np.float16).astype(np.float32) if dtype == "float16" else values


def make_adapter(
    spec: ModelSpec,
    rank: int,
    parts: Sequence[str] = PARTS,
    dtype: str = "float32",
    seed: int = 0,
    size: float = 0.3,
) -> Adapter:
    rng = np.random.default_rng(seed)
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes = {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    found: dict[tuple[int, str], LowRank] = {}
    for layer in range(spec.num_layers):
        for part in parts if not spec.has_experts(layer) else [part for part in parts if part in "qkvo"]:
            outputs, inputs = shapes[part]
            a = rng.standard_normal((rank, inputs), np.float32) * inputs**-0.5
            b = rng.standard_normal((outputs, rank), np.float32) * size
            found[layer, part] = LowRank(
                in_type(a.astype(np.float32), dtype), in_type(b.astype(np.float32), dtype)
            )
    return Adapter(identity=f"{seed}", rank=rank, parts=found)
