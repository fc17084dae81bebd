"""A plan that would read or write outside a table is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.core.request import FinishReason
from paceline.core.sampling import SamplingParams
from paceline.factory import build_engine
from paceline.runner.cpu import CPURunner
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.native.layout import SUB_BLOCK
from paceline.runner.native.step import BadPlan, NativeStep
from tests.bits import Between, Circumstances
from tests.kernels import host_code
from tests.native.random_steps import LONGEST, VOCAB, model

Index = NDArray[np.int64]
KIND = "a window"  # two groups of layers
NUM_BLOCKS = 6
CONFIG = Circumstances().config(model(KIND).spec, LONGEST, NUM_BLOCKS)


@pytest.fixture
def step() -> Iterator[NativeStep]:
    made = NativeStep(model(KIND), CONFIG, host_code(), 1)
    yield made
    made.close()


def numbers(*values: int) -> Index:
    return np.array(values, np.int64)


def rows() -> DeviceRows:
    """Row 0 has two tokens in block 1, row 2 has seventeen in blocks 2 and 3."""
    made = DeviceRows(CONFIG)
    for table in made.tables:
        table[0, 0], table[2, :2] = 1, (2, 3)
    return made


def batch() -> FlatBatch:
    """The third token of row 0, and tokens 17 and 18 of row 2."""
    slots = numbers(SUB_BLOCK + 2, 3 * SUB_BLOCK, 3 * SUB_BLOCK + 1)
    return FlatBatch(
        rows=numbers(0, 2),
        start=numbers(2, 16),
        count=numbers(1, 2),
        masked=np.zeros(2, np.bool_),
        tokens=numbers(5, 6, 7),
        positions=numbers(2, 16, 17),
        places=numbers(2, 16, 17),
        lengths=numbers(3, 17, 18),
        row_of=numbers(0, 1, 1),
        slots=(slots, slots.copy()),
    )


def put(field: str, value: int) -> Callable[[FlatBatch, DeviceRows], FlatBatch]:
    """The last entry of a field becomes the value."""

    def change(given: FlatBatch, table: DeviceRows) -> FlatBatch:
        values = getattr(given, field).copy()
        values[-1] = value
        return replace(given, **{field: values})

    return change


def put_slot(group: int, value: int) -> Callable[[FlatBatch, DeviceRows], FlatBatch]:
    def change(given: FlatBatch, table: DeviceRows) -> FlatBatch:
        given.slots[group][1] = value
        return given

    return change


def put_block(group: int, row: int, index: int, value: int) -> Callable[[FlatBatch, DeviceRows], FlatBatch]:
    def change(given: FlatBatch, table: DeviceRows) -> FlatBatch:
        table.tables[group][row, index] = value
        return given

    return change


WRONG = {
    "token -1": put("tokens", -1),
    f"token {VOCAB}": put("tokens", VOCAB),
    "position -1": put("positions", -1),
    f"position {LONGEST + 1}": put("positions", LONGEST + 1),
    "row -1": put("rows", -1),
    "row 64": put("rows", 64),
    f"slot {NUM_BLOCKS * SUB_BLOCK}": put_slot(1, NUM_BLOCKS * SUB_BLOCK),
    "block -1": put_block(0, 0, 0, -1),
    f"block {NUM_BLOCKS}": put_block(1, 2, 1, NUM_BLOCKS),
    f"block {1 << 60}": put_block(0, 2, 0, 1 << 60),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_what_does_not_exist_is_refused(step: NativeStep, sentence: str) -> None:
    table = rows()
    given = WRONG[sentence](batch(), table)
    with pytest.raises(BadPlan, match=sentence):
        step.forward(table, given, numbers(0, 2))
    assert not any(pool.any() for pool in step.kv.layers), "something was computed"
    assert step.forward(rows(), batch(), numbers(0, 2)).all()


@pytest.mark.parametrize("due", [3, 4, 1 << 40])
def test_only_tokens_of_the_step_are_sampled(step: NativeStep, due: int) -> None:
    with pytest.raises(IndexError):
        step.forward(rows(), batch(), numbers(0, due))
    step.forward(rows(), batch(), numbers(0, 2))
    with pytest.raises(IndexError):
        step.logits(numbers(due))


def test_entries_that_are_not_used_may_hold_anything(step: NativeStep) -> None:
    """Rows that are not in the step, and blocks behind a row's end."""
    table = rows()
    table.tables[0][2, 2] = table.tables[0][1, 0] = 1 << 60
    assert step.forward(table, batch(), numbers(0, 2)).all()


def test_a_step_of_padding_alone_is_computed(step: NativeStep) -> None:
    """As at the end of a padded batch."""
    none, one = numbers(), numbers(0)
    padding = FlatBatch(
        rows=none,
        start=none,
        count=none,
        masked=none > 0,
        tokens=one,
        positions=one,
        places=one,
        lengths=one + 1,
        row_of=one,
        slots=(one - 1, one - 1),
    )
    assert step.forward(rows(), padding, none).all()
    assert not any(pool.any() for pool in step.kv.layers)


class Damaged(Between):
    """Some steps get a table with a block that does not exist."""

    def __init__(self, step: NativeStep, calls: tuple[int, ...]) -> None:
        super().__init__(step)
        self._pool, self._calls, self._count = step.kv, calls, 0

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        self._count += 1
        if self._count in self._calls:
            for pool in self._pool.layers:
                pool[:] = 7.0  # what the failed step left must not be read again
            rows.tables[0][batch.rows[0], 0] = NUM_BLOCKS
        return super().forward(rows, batch, due)


def generate(step: NativeStep, calls: tuple[int, ...]) -> tuple[list[int], list[str], Exception | None]:
    engine = build_engine(CONFIG, CPURunner(CONFIG, Damaged(step, calls)))
    engine.add([5, 9, 11], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    tokens, endings = [], []
    while engine.has_requests:
        events = engine.step()
        tokens += [token for part in events.tokens for token in part.tokens.tolist()]
        endings += [f"{ending.reason.value} {ending.detail}".strip() for ending in events.finished]
    return tokens, endings, engine.last_error


def test_a_refused_step_is_computed_again_from_wiped_blocks(step: NativeStep) -> None:
    expected = generate(step, ())
    tokens, endings, error = generate(step, (4,))
    assert isinstance(error, BadPlan)
    assert tokens == expected[0] and endings == [FinishReason.LENGTH.value]


def test_a_row_whose_plans_stay_wrong_ends_with_an_error(step: NativeStep) -> None:
    tokens, endings, error = generate(step, (4, 5))
    assert isinstance(error, BadPlan)
    assert len(tokens) == 3 and endings == ["error internal_error"]
