"""The pools of keys and values: writing, wiping, copying and swapping touch exactly the blocks they name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config.engine import GroupSpec, KVConfig
from paceline.models.spec import ModelSpec, RopeSpec
from paceline.runner.kv_tensors import KVTensors
from paceline.runner.sizing import block_bytes

NUM_BLOCKS = 7


def spec() -> ModelSpec:
    return ModelSpec(
        architecture="gemma3",
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_positions=64,
        windows=(8, None, 8),
        ropes=(RopeSpec(rotary_dim=4),),
        layer_ropes=(0, 0, 0),
    )


@pytest.fixture
def kv() -> KVTensors:
    """Every block holds its own number, in every layer; group 1 is the windows'."""
    groups = (GroupSpec(), GroupSpec(window=8, num_blocks=NUM_BLOCKS))
    made = KVTensors(spec(), KVConfig(block_size=4, num_blocks=NUM_BLOCKS, num_host_blocks=5, groups=groups))
    for pools in made.layers:
        numbers = torch.arange(float(NUM_BLOCKS))[None, :, None, None]
        pools.keys.copy_(numbers.expand_as(pools.keys))
        pools.values.copy_(-numbers.expand_as(pools.values))
    return made


def content(kv: KVTensors, layer: int) -> list[float]:
    """What each block of a layer holds; every slot and head of it the same, keys and values alike."""
    pools = kv.layers[layer]
    assert torch.equal(pools.keys, -pools.values)
    first = pools.keys[0, :, 0, 0]
    assert torch.equal(pools.keys, first[None, :, None, None].expand_as(pools.keys))
    return first.tolist()


def index(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    "copies, expected",
    [
        ([(1, 5)], [0, 1, 2, 3, 4, 1, 6]),
        ([(1, 5), (5, 6)], [0, 1, 2, 3, 4, 1, 1]),  # a copy is copied on
        ([(1, 5), (5, 6), (6, 2)], [0, 1, 1, 3, 4, 1, 1]),
        ([(5, 6), (1, 5)], [0, 1, 2, 3, 4, 1, 5]),  # read before it is written
        ([(1, 5), (2, 6), (1, 4)], [0, 1, 2, 3, 1, 1, 2]),
        ([], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_copies_are_as_if_one_after_the_other(
    kv: KVTensors, copies: list[tuple[int, int]], expected: list[float]
) -> None:
    kv.copy_blocks(1, index(*(source for source, _ in copies)), index(*(target for _, target in copies)))
    assert content(kv, 0) == content(kv, 2) == expected
    assert content(kv, 1) == list(range(NUM_BLOCKS)), "the other group's blocks are others"


def test_swapped_out_and_back_into_other_blocks(kv: KVTensors) -> None:
    kv.swap_out(0, index(1, 4), index(3, 0))
    kv.copy_blocks(0, index(0, 0), index(1, 4))
    kv.swap_in(0, index(6, 2), index(0, 3))
    assert content(kv, 1) == [0, 0, 1, 3, 0, 5, 4]
    assert content(kv, 0) == list(range(NUM_BLOCKS))


def test_writes_and_wipes_are_by_slot(kv: KVTensors) -> None:
    slots = torch.tensor([9, 27])  # block 2, place 1; block 6, place 3
    new = torch.arange(16.0).view(2, 2, 4) + 100  # [tokens, kv heads, head_dim]
    before = kv.layers[1].keys.clone()
    kv.write(1, slots, new, -new)
    _expect(kv.layers[1].keys, before, {(2, 1): new[0], (6, 3): new[1]})
    _expect(kv.layers[1].values, -before, {(2, 1): -new[0], (6, 3): -new[1]})
    kv.clear(0, slots.numpy())
    _expect(kv.layers[1].keys, before, {(2, 1): torch.zeros(2, 4), (6, 3): torch.zeros(2, 4)})
    assert content(kv, 0) == list(range(NUM_BLOCKS))


def test_wiping_leaves_what_was_swapped_out(kv: KVTensors) -> None:
    kv.swap_out(0, index(3), index(1))
    kv.wipe()
    assert content(kv, 0) == content(kv, 1) == content(kv, 2) == [0] * NUM_BLOCKS
    kv.swap_in(0, index(5), index(1))
    assert content(kv, 1) == [0, 0, 0, 0, 0, 3, 0]


def _expect(pool: Tensor, before: Tensor, changed: dict[tuple[int, int], Tensor]) -> None:
    expected = before.clone()
    for (block, place), heads in changed.items():
        expected[:, block, place] = heads
    assert torch.equal(pool, expected)


def test_bytes_of_a_block() -> None:
    one_layer = 2 * 4 * 2 * 4 * 4  # keys and values, slots, heads, head_dim, bytes of a float32
    assert block_bytes(spec(), 4) == 3 * one_layer
