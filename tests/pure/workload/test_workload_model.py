"""The Workload value: its measures, and what cutting it keeps."""

import dataclasses
import math

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.workload import Workload


def make(
    arrivals: list[float],
    prompts: list[int],
    outputs: list[int],
    prefix_ids: tuple[tuple[int, ...], ...] | None = None,
) -> Workload:
    return Workload(
        name="made",
        arrival_s=np.array(arrivals, dtype=np.float64),
        prompt_len=np.array(prompts, dtype=np.int32),
        output_len=np.array(outputs, dtype=np.int32),
        tenant=np.arange(len(arrivals), dtype=np.int32) % 2,
        tenants=("a", "b"),
        prefix_ids=prefix_ids,
        prefix_block=0 if prefix_ids is None else 512,
    )


def test_duration_and_rate() -> None:
    workload = make([1.0, 2.0, 5.0], [1, 1, 1], [1, 1, 1])
    assert len(workload) == 3
    assert workload.duration_s == 5.0
    assert workload.rate == pytest.approx(0.5)


def test_rate_without_a_gap() -> None:
    assert make([2.0], [1], [1]).rate == 0.0
    assert make([0.0, 0.0], [1, 1], [1, 1]).rate == math.inf
    assert make([0.0], [1], [1]).head(0).duration_s == 0.0


def test_head_takes_every_column() -> None:
    workload = make([0.0, 1.0, 2.0], [10, 20, 600], [1, 2, 3], ((1,), (2,), (3, 4)))
    head = workload.head(2)
    assert len(head) == 2
    assert head.arrival_s.tolist() == [0.0, 1.0]
    assert head.prompt_len.tolist() == [10, 20]
    assert head.output_len.tolist() == [1, 2]
    assert head.tenant.tolist() == [0, 1]
    assert head.tenants == ("a", "b")
    assert head.prefix_ids == ((1,), (2,))
    assert head.prefix_block == 512
    assert len(workload.head(99)) == 3


def test_columns_cannot_be_written() -> None:
    workload = make([0.0, 1.0], [1, 1], [1, 1])
    for column in (workload.arrival_s, workload.prompt_len, workload.output_len, workload.tenant):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.name = "other"  # type: ignore[misc]


def test_clipped_shortens_outputs_and_drops_prompts_without_room() -> None:
    #                 fits exactly | output cut to 1 | one token too many | prompt fills it | prompt too long
    workload = make([0.0, 1.0, 2.0, 3.0, 4.0], [60, 99, 50, 100, 300], [40, 7, 51, 1, 1])
    clipped, touched = workload.clipped(100)
    assert touched == 4
    assert clipped.arrival_s.tolist() == [0.0, 1.0, 2.0]
    assert clipped.prompt_len.tolist() == [60, 99, 50]
    assert clipped.output_len.tolist() == [40, 1, 50]
    assert clipped.tenant.tolist() == [0, 1, 0]
    assert workload.output_len.tolist() == [40, 7, 51, 1, 1]


def test_clipped_keeps_prefix_ids_in_step() -> None:
    workload = make([0.0, 1.0, 2.0], [600, 5000, 700], [1, 1, 1], ((1, 2), tuple(range(10, 20)), (1, 3)))
    clipped, touched = workload.clipped(1000)
    assert touched == 1
    assert clipped.prefix_ids == ((1, 2), (1, 3))


def test_clipped_that_changes_nothing() -> None:
    workload = make([0.0, 1.0], [10, 20], [5, 6])
    clipped, touched = workload.clipped(26)
    assert touched == 0
    assert clipped.output_len.tolist() == [5, 6]
    assert clipped.clipped(2**31 + 5)[1] == 0


def test_clipped_with_nothing_left_is_an_error() -> None:
    with pytest.raises(InputError, match=r"no request fits into 10 tokens \(the shortest prompt has 10"):
        make([0.0, 1.0], [10, 20], [5, 6]).clipped(10)


@pytest.mark.parametrize(
    ("arrivals", "prompts", "outputs"),
    [
        ([1.0, 0.0], [1, 1], [1, 1]),
        ([0.0, math.nan], [1, 1], [1, 1]),
        ([-1.0, 0.0], [1, 1], [1, 1]),
        ([0.0, 1.0], [0, 1], [1, 1]),
        ([0.0, 1.0], [1, 1], [1, 0]),
        ([0.0, 1.0], [1, 1, 1], [1, 1]),
    ],
)
def test_broken_columns_are_our_mistake(
    arrivals: list[float], prompts: list[int], outputs: list[int]
) -> None:
    with pytest.raises(AssertionError):
        make(arrivals, prompts, outputs)


def test_prefix_ids_need_a_block_size() -> None:
    workload = make([0.0], [1], [1])
    with pytest.raises(AssertionError):
        dataclasses.replace(workload, prefix_ids=((1,),))
    with pytest.raises(AssertionError):
        dataclasses.replace(workload, prefix_block=512)
