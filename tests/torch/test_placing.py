"""Placed tokens: keys turned to where they would have been computed, values as they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.config.engine import GroupSpec, KVConfig
from paceline.models.rope import Rotary, rotate
from paceline.models.spec import RopeSpec
from paceline.runner.kv_tensors import KVTensors
from tests.quantized_helpers import tiny_spec

ROPES = {
    "default": RopeSpec(rotary_dim=32),
    "partial": RopeSpec(rotary_dim=12),
    "linear": RopeSpec(rotary_dim=32, kind="linear", factor=4.0, trained_positions=128),
    "llama3": RopeSpec(rotary_dim=32, kind="llama3", factor=8.0, trained_positions=64, theta=5e5),
    "yarn": RopeSpec(rotary_dim=32, kind="yarn", factor=4.0, trained_positions=128, attention_factor=1.14),
}


@pytest.mark.parametrize("kind", ROPES)
def test_keys_are_those_of_their_new_positions(kind: str) -> None:
    rope, block_size = ROPES[kind], 16
    spec = replace(tiny_spec(), ropes=(rope,))
    kv = KVTensors(spec, KVConfig(block_size=block_size, num_blocks=12, groups=(GroupSpec(),)))
    shape = (45, spec.num_kv_heads, spec.head_dim)
    plain = [torch.randn(shape) for _ in range(spec.num_layers)]
    values = [torch.randn(shape) for _ in range(spec.num_layers)]
    rotary = Rotary(rope, 512)
    # Tokens 5 to 49 of a module in blocks 3, 1, 7 and 2; in the prompt they are tokens 138 to 182.
    old, new, shift = np.arange(5, 50), np.arange(138, 183), 133
    source = np.array([3, 1, 7, 2])[old // block_size] * block_size + old % block_size
    target = np.array([4, 9, 8, 5])[new // block_size - 8] * block_size + new % block_size

    def at(positions: np.ndarray, layer: int) -> torch.Tensor:
        places = torch.from_numpy(positions)
        return rotate(plain[layer], *rotary.cos_sin(places, places + 1))

    for layer in range(spec.num_layers):
        kv.write(layer, torch.from_numpy(source), at(old, layer), values[layer])
    kv.place(0, source, target, shift)
    for layer, pools in enumerate(kv.layers):
        keys, found = (part.flatten(1, 2)[:, target].transpose(0, 1) for part in pools[:2])
        assert torch.allclose(keys, at(new, layer), atol=2e-5)
        assert torch.equal(found, values[layer])
        written = pools.keys.flatten(1, 2).abs().sum((0, 2)).nonzero().numpy()[:, 0]
        assert set(written) == {*source.tolist(), *target.tolist()}, "no other slot is touched"
