"""Plans as bytes for other processes."""

from __future__ import annotations

import random
import struct
import zlib
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.plan import BlockAppends, RowJoins, StepPlan, StepWork, Swaps, i32, whole_rows
from paceline.core.sampling import PARAMETERS, SamplingParams
from paceline.runner.parallel import wire
from paceline.runner.parallel.wire import BadPlan, decode, encode
from tests.plans import SAMPLED, random_plan, same

SEEDS = st.integers(0, 2**32)


def back(plan: StepPlan) -> StepPlan:
    return decode(memoryview(encode(plan)))


@given(SEEDS)
def test_plans_come_back_equal(seed: int) -> None:
    plan = random_plan(random.Random(seed))
    assert same(back(plan), plan)


def _fields_of(kind: Any, start: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, hint in get_type_hints(kind).items():
        found += _fields_of(hint, (*start, name)) if is_dataclass(hint) else [(*start, name)]
    return found


@pytest.mark.parametrize("path", _fields_of(StepPlan), ids=".".join)
def test_every_field_of_a_plan_is_carried(path: tuple[str, ...]) -> None:
    """The list is made from the dataclasses: a field that the bytes do not hold would come back empty."""
    rng, plain = random.Random(1), StepPlan(seq=1)
    for _ in range(500):
        plan = random_plan(rng)
        value, empty = plan, plain
        for name in path:
            value, empty = getattr(value, name), getattr(empty, name)
        if not same(value, empty):
            break
    else:
        pytest.fail("no random plan has it")
    came = back(plan)
    for name in path:
        came = getattr(came, name)
    assert same(came, value)


def test_every_sampling_parameter_is_carried() -> None:
    assert set(SAMPLED) == set(PARAMETERS)
    for name, value in SAMPLED.items():
        sampling = SamplingParams(**{name: value})
        assert getattr(sampling, name) != PARAMETERS[name].default
        joined = back(StepPlan(seq=1, joins=whole_rows([1], [[1, 2]], [9], sampling))).joins.sampling
        assert joined == (sampling,)


def test_joins_keep_the_tokens_of_each_row() -> None:
    tokens = (i32([1, 2, 3]), i32(), i32([4]))
    came = back(StepPlan(seq=1, joins=RowJoins(row=i32([0, 1, 2]), tokens=tokens)))
    assert [each.tolist() for each in came.joins.tokens] == [[1, 2, 3], [], [4]]


def test_a_steady_step_is_small() -> None:
    work = StepWork(decode_rows=1024, decode_context=10**6, logit_rows=1024)
    blocks = np.arange(64, dtype=np.int32)
    plan = StepPlan(
        seq=9, new_blocks=BlockAppends(row=blocks, group=blocks, index=blocks, block=blocks), work=work
    )
    assert len(encode(plan)) <= 256 + 16 * len(blocks)
    assert same(back(plan), plan)


@given(SEEDS)
def test_damaged_bytes_are_refused(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode(random_plan(rng)))
    match rng.randrange(3):
        case 0:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 1:
            del data[rng.randrange(len(data)) :]
        case 2:
            data += rng.randbytes(rng.randrange(1, 9))
    with pytest.raises(BadPlan):
        decode(memoryview(data))


@given(SEEDS)
def test_bytes_that_were_made_to_pass_the_checksum_never_raise_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode(random_plan(rng)))
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(12, len(data))] = rng.randrange(256)
    data[8:12] = struct.pack("<I", zlib.crc32(data[12:]))
    with suppress(BadPlan):
        assert isinstance(decode(memoryview(data)), StepPlan)


@given(st.binary(max_size=200))
def test_bytes_of_anything_are_refused(data: bytes) -> None:
    with pytest.raises(BadPlan):
        decode(memoryview(data))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(StepPlan(seq=1))
    monkeypatch.setattr(wire, "_LAYOUT", 1)
    with pytest.raises(BadPlan, match="version"):
        decode(memoryview(data))


def test_a_field_that_the_bytes_have_no_place_for_is_noticed_when_the_module_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "_TO_TEXT", {})
    with pytest.raises(TypeError, match=r"joins\.media has no place"):
        wire._parts_of(StepPlan)


def test_columns_of_another_type_are_made_what_they_should_be() -> None:
    wide: Any = np.array([1, 2])
    came = back(StepPlan(seq=1, swap_out=Swaps(ticket=wide)))
    assert came.swap_out.ticket.dtype == np.int32
    assert [spec.name for spec in fields(Swaps) if len(getattr(came.swap_out, spec.name))] == ["ticket"]
