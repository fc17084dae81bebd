"""Clocks, times as people read them, and the plain values that cross the boundary."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.clock import ManualClock, MonotonicClock
from paceline.core.dial import format_time
from paceline.core.plan import EMPTY, StepPlan, i32
from paceline.core.recorder import NoRecorder
from paceline.core.request import NoHooks, Request, RequestId
from paceline.core.sampling import SamplingParams

moves = st.lists(st.tuples(st.booleans(), st.floats(0, 1e6)))


@given(st.floats(-1e6, 1e6), moves)
def test_a_manual_clock_never_goes_back(start_s: float, steps: list[tuple[bool, float]]) -> None:
    clock = ManualClock(start_s)
    assert clock.now() == start_s
    for to, seconds in steps:
        before = clock.now()
        if to:
            clock.advance_to(seconds)
            assert clock.now() == max(before, seconds)
        else:
            clock.advance(seconds)
            assert clock.now() == before + seconds


def test_a_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock(5.0)
    with pytest.raises(AssertionError, match="back"):
        clock.advance(-0.001)
    clock.advance_to(4.0)
    assert clock.now() == 5.0


def test_the_real_clock_is_monotonic() -> None:
    clock = MonotonicClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)


def test_the_shared_empty_column_cannot_be_written() -> None:
    assert EMPTY.dtype == np.int32 and len(EMPTY) == 0
    assert not EMPTY.flags.writeable


def test_i32_makes_columns_of_one_type() -> None:
    assert i32([3, 1]).tolist() == [3, 1]
    assert i32().dtype == i32(iter([1])).dtype == np.int32


def columns(value: Any) -> list[Any]:
    return [getattr(value, spec.name) for spec in fields(value)]


def test_an_empty_plan_holds_only_empty_columns() -> None:
    plan = StepPlan(seq=1)
    parts = (plan.joins, plan.spans, plan.decode_rows, plan.new_blocks, plan.block_copies, plan.row_copies)
    for part in (*parts, plan.swap_out, plan.swap_in):
        assert all(len(column) == 0 for column in columns(part))
    assert not plan.full and len(plan.leaves) == 0 and plan.pad_tokens == 0
    assert columns(plan.work) == [0] * len(columns(plan.work))


def test_plans_are_frozen() -> None:
    with pytest.raises(AttributeError):
        StepPlan(seq=1).seq = 2  # type: ignore[misc]


def test_the_fakes_of_the_seams_do_nothing() -> None:
    request = Request(RequestId(1), i32([1]), SamplingParams())
    hooks = NoHooks()
    hooks.admit(request)
    hooks.finish(request)
    assert list(hooks.new_keys(request)) == []
    NoRecorder().close((), ())


# ----------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0 ms"),
        (0.0005, "0.5 ms"),
        (0.25, "250 ms"),
        (0.9996, "1.0 s"),
        (32.24, "32.2 s"),
        (1e4, "10000.0 s"),
    ],
)
def test_a_time_has_few_digits_and_no_exponent(seconds: float, text: str) -> None:
    assert format_time(seconds) == text
