"""The pools of the native kernels: wiping, copying and swapping touch exactly the blocks and slots they name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.config.engine import GroupSpec, KVConfig
from paceline.runner.native.kv_pool import KVPool
from paceline.runner.sizing import block_bytes
from tests.quantized_helpers import tiny_spec

NUM_BLOCKS, HOST_BLOCKS, BLOCK_SIZE = 7, 5, 32
SPEC = tiny_spec(window=8)  # the second of three layers


@pytest.fixture(params=["float32", "int8"])
def kv(request: pytest.FixtureRequest) -> KVPool:
    """Every block holds its number, in every layer; group 1 is the window's."""
    groups = (GroupSpec(), GroupSpec(window=8, num_blocks=NUM_BLOCKS))
    config = KVConfig(
        block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, num_host_blocks=HOST_BLOCKS, groups=groups
    )
    made = KVPool(SPEC, config, request.param)
    for pool in made.layers:
        pool[:] = np.arange(NUM_BLOCKS).reshape(-1, *(1,) * (pool.ndim - 1))
    return made


def content(kv: KVPool, layer: int) -> list[float]:
    """What each block of a layer holds; every number of it the same."""
    flat = kv.layers[layer].reshape(NUM_BLOCKS, -1)
    assert (flat == flat[:, :1]).all()
    found: list[float] = flat[:, 0].tolist()
    return found


def index(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


@pytest.mark.parametrize(
    "copies, expected",
    [
        ([(1, 5)], [0, 1, 2, 3, 4, 1, 6]),
        ([(1, 5), (5, 6)], [0, 1, 2, 3, 4, 1, 1]),  # a copy is copied on
        ([(1, 5), (5, 6), (6, 2)], [0, 1, 1, 3, 4, 1, 1]),
        ([(5, 6), (1, 5)], [0, 1, 2, 3, 4, 1, 5]),  # read before it is written
        ([], [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_copies_are_as_if_one_after_the_other(
    kv: KVPool, copies: list[tuple[int, int]], expected: list[float]
) -> None:
    kv.copy_blocks(0, index(*(source for source, _ in copies)), index(*(target for _, target in copies)))
    assert content(kv, 0) == content(kv, 2) == expected
    assert content(kv, 1) == list(range(NUM_BLOCKS)), "the other group's blocks are others"


def test_swapped_out_and_back_into_other_blocks(kv: KVPool) -> None:
    kv.swap_out(1, index(1, 4), index(3, 0))
    kv.copy_blocks(1, index(0, 0), index(1, 4))
    kv.swap_in(1, index(6, 2), index(0, 3))
    assert content(kv, 1) == [0, 0, 1, 3, 0, 5, 4]
    assert content(kv, 0) == list(range(NUM_BLOCKS))


def test_slots_are_wiped_one_by_one(kv: KVPool) -> None:
    """In a sub-block keys lie by dimension and values by token."""
    kv.clear(1, index(2 * BLOCK_SIZE + 3, 6 * BLOCK_SIZE + 31))
    for block, sub, token in ((2, 0, 3), (6, 1, 15)):
        pool, dim, quad = kv.layers[1][block, sub], SPEC.head_dim, 4 if kv.in_bytes else 1
        keys = pool[:, : 16 * dim].reshape(SPEC.num_kv_heads, dim // quad, 16, quad)
        values = pool[:, 16 * dim : 32 * dim].reshape(SPEC.num_kv_heads, 16, dim)
        scales = pool[:, 32 * dim :].reshape(SPEC.num_kv_heads, -1, 16, 4)  # none of floats
        for part in (keys[:, :, token], values[:, token], scales[:, :, token]):
            assert not part.any()
            part[:] = block
    assert content(kv, 1) == list(range(NUM_BLOCKS)), "nothing else was wiped"
    assert content(kv, 0) == list(range(NUM_BLOCKS))


def test_wiping_leaves_what_was_swapped_out(kv: KVPool) -> None:
    kv.swap_out(1, index(3), index(1))
    kv.wipe()
    assert content(kv, 0) == content(kv, 1) == content(kv, 2) == [0] * NUM_BLOCKS
    kv.swap_in(1, index(5), index(1))
    assert content(kv, 1) == [0, 0, 0, 0, 0, 3, 0]


@pytest.mark.parametrize("source, target", [(-1, 2), (2, -1), (NUM_BLOCKS, 2), (2, NUM_BLOCKS)])
def test_blocks_that_do_not_exist_are_not_moved(kv: KVPool, source: int, target: int) -> None:
    with pytest.raises(IndexError):
        kv.copy_blocks(0, index(source), index(target))
    with pytest.raises(IndexError):
        kv.swap_out(0, index(source), index(min(target, HOST_BLOCKS)))
    with pytest.raises(IndexError):
        kv.swap_in(0, index(target), index(min(source, HOST_BLOCKS)))
    assert content(kv, 0) == list(range(NUM_BLOCKS))


def test_the_memory_is_what_sizes_are_chosen_by(kv: KVPool) -> None:
    assert sum(pool.nbytes for pool in kv.layers) == NUM_BLOCKS * block_bytes(
        SPEC, BLOCK_SIZE, kv_dtype="int8" if kv.in_bytes else "float32"
    )
    assert kv.num_slots(0) == kv.num_slots(1) == NUM_BLOCKS * BLOCK_SIZE


def test_bytes_hold_3_7_times_the_tokens() -> None:
    spec = replace(SPEC, head_dim=64)
    assert block_bytes(spec, 16) / block_bytes(spec, 16, kv_dtype="int8") > 3.7
