"""The kernel that places tokens against its definition in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.config.engine import GroupSpec, KVConfig
from paceline.models.spec import RopeSpec
from paceline.runner.native.code import Code
from paceline.runner.native.kv_pool import KVPool
from paceline.runner.native.model import rope_tables
from tests.quantized_helpers import tiny_spec
from tests.torch.test_placing import ROPES

BLOCK, LONGEST = 32, 512
Doubles = NDArray[np.float64]


def turned(keys: Doubles, rope: RopeSpec, positions: NDArray[np.int64]) -> Doubles:
    """The definition: pairs of entries turned by the angle of their positions."""
    half = rope.rotary_dim // 2
    cos, sin = (table.astype(np.float64)[positions][:, None] for table in rope_tables(rope, LONGEST))
    a, b = keys[..., :half], keys[..., half : 2 * half]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, keys[..., 2 * half :]], axis=-1)


@pytest.fixture(params=["host", "plain"])
def either(request: pytest.FixtureRequest) -> Code:
    return request.getfixturevalue("code" if request.param == "host" else "plain")  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("first, count, start", [(16, 3, 4), (5, 70, 133), (0, 32, 64), (31, 97, 130)])
def test_keys_are_those_of_their_new_positions(
    either: Code, kind: str, first: int, count: int, start: int
) -> None:
    rope = ROPES[kind]
    spec = replace(tiny_spec(), ropes=(rope,))
    kv = KVPool(spec, KVConfig(block_size=BLOCK, num_blocks=12, groups=(GroupSpec(),)), code=either)
    rng = np.random.default_rng(0)
    plain, values = rng.standard_normal((2, count, spec.num_kv_heads, spec.head_dim))
    old, new = np.arange(first, first + count), np.arange(start, start + count)
    source = np.array([3, 1, 7, 2])[old // BLOCK] * BLOCK + old % BLOCK
    target = np.array([0, 0, 4, 9, 8, 5, 11, 6, 10])[new // BLOCK] * BLOCK + new % BLOCK

    def slots(at: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        return (*np.divmod(at // 16, BLOCK // 16), at % 16)

    for pool in kv.layers:
        keys_of, values_of = kv.by_token(pool)
        keys_of[slots(source)] = turned(plain, rope, old)[..., None]
        values_of[slots(source)] = values
    kv.place(0, source, target, start - first)
    everywhere = np.zeros(12 * BLOCK, np.bool_)
    everywhere[[*source, *target]] = True
    for pool in kv.layers:
        keys_of, values_of = kv.by_token(pool)
        assert np.abs(keys_of[slots(target)][..., 0] - turned(plain, rope, new)).max() < 2e-6
        assert np.array_equal(values_of[slots(target)], values.astype(np.float32))
        touched = keys_of.any(axis=(3, 4, 5)).reshape(-1)
        assert np.array_equal(touched, everywhere), "no other slot is touched"


def test_slots_that_do_not_exist_are_refused(code: Code) -> None:
    kv = KVPool(tiny_spec(), KVConfig(block_size=BLOCK, num_blocks=4, groups=(GroupSpec(),)), code=code)
    good, bad = np.arange(3), np.array([1, 2, 4 * BLOCK])
    for source, target in ((good, bad), (bad, good), (good - 1, good)):
        with pytest.raises(IndexError):
            kv.place(0, source, target, 5)
