"""The Workload value: its measures, what cutting it keeps, its statistics, and what is drawn for it."""

import dataclasses
import math

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.workload import Workload, describe, load_workload
from paceline.lab.workload.arrivals import QuantileTable, draw_lengths, normal_levels
from paceline.lab.workload.workload import block_reuse, dispersion, gap_variation, rank_correlation


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


# ----------------------------------------------------------------
# The statistics, against values worked out by hand.


def at(times: list[float], ids: tuple[tuple[int, ...], ...] | None = None) -> Workload:
    count = len(times)
    return Workload(
        name="made",
        arrival_s=np.array(times, dtype=np.float64),
        prompt_len=np.arange(1, count + 1, dtype=np.int32),
        output_len=np.arange(count, 0, -1, dtype=np.int32),
        tenant=np.array([0, 1, 1, 1][:count], dtype=np.int32) if count <= 4 else np.zeros(count, np.int32),
        tenants=("a", "b", "idle"),
        prefix_ids=ids,
        prefix_block=0 if ids is None else 512,
    )


def column(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_rank_correlation_shares_the_rank_of_equal_values() -> None:
    assert rank_correlation(column(1, 2, 3), column(10, 100, 1000)) == pytest.approx(1.0)
    assert rank_correlation(column(1, 2, 3), column(3, 2, 1)) == pytest.approx(-1.0)
    # Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: covariance 4.5, deviations 4.5 and 5.
    assert rank_correlation(column(5, 7, 7, 9), column(1, 2, 3, 4)) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(rank_correlation(column(4, 4), column(1, 2)))


def test_gap_variation() -> None:
    assert gap_variation(at([0.0, 1.0, 2.0, 3.0])) == 0.0
    assert gap_variation(at([0.0, 1.0, 4.0])) == pytest.approx(0.5)  # gaps 1 and 3: mean 2, deviation 1
    assert math.isnan(gap_variation(at([0.0])))
    assert math.isnan(gap_variation(at([0.0, 0.0])))


def test_dispersion_counts_whole_windows_only() -> None:
    # Windows [0, 10) and [10, 20) hold 3 and 1; the arrival at 20 opens a window that is not whole.
    workload = at([0.0, 1.0, 9.999, 10.0, 20.0])
    assert dispersion(workload, window_s=10.0) == pytest.approx(1.0 / 2.0)
    assert math.isnan(dispersion(at([0.0, 19.0]), window_s=10.0))


def test_block_reuse_counts_blocks_of_earlier_requests() -> None:
    assert block_reuse(at([0.0, 1.0, 2.0], ((0, 1), (0, 1, 2), (0, 3)))) == pytest.approx(3 / 7)
    assert block_reuse(at([0.0, 1.0])) is None


def test_describe_puts_it_together() -> None:
    summary = describe(at([0.0, 1.0, 2.0, 3.0], ((0,), (0,), (1,), (2,))))
    assert summary.num_requests == 4
    assert summary.rate == 1.0
    assert summary.prompt_mean == 2.5
    assert summary.prompt_quantiles[2] == 2.5
    assert summary.output_quantiles == summary.prompt_quantiles
    assert summary.rank_correlation == pytest.approx(-1.0)
    assert summary.block_reuse == 0.25
    assert summary.tenant_shares == (0.25, 0.75, 0.0)


# ----------------------------------------------------------------
# What is drawn: always the same for a seed, and from the distributions it was told.


NAMES = ["azure-conv", "azure-code", "mooncake", "multi-tenant"]


@pytest.mark.parametrize("name", [*NAMES, "uniform:1-900x1-300"])
def test_the_same_seed_gives_the_same_workload(name: str) -> None:
    first, again, other = (load_workload(name, seed=seed, num_requests=400) for seed in (7, 7, 8))
    for column in ("arrival_s", "prompt_len", "output_len", "tenant"):
        assert np.array_equal(getattr(first, column), getattr(again, column))
    assert first.prefix_ids == again.prefix_ids
    assert not np.array_equal(first.prompt_len, other.prompt_len)


@pytest.mark.parametrize("name", [*NAMES, "uniform:1-900x1-300"])
@pytest.mark.parametrize("count", [1, 2, 333])
def test_fewer_requests_are_the_first_of_more(name: str, count: int) -> None:
    few = load_workload(name, num_requests=count, seed=2)
    head = load_workload(name, num_requests=1_500, seed=2).head(count)
    for column in ("arrival_s", "prompt_len", "output_len", "tenant"):
        assert np.array_equal(getattr(few, column), getattr(head, column))
    assert few.prefix_ids == head.prefix_ids


@pytest.mark.parametrize(
    ("name", "prompt_sum", "output_sum", "last_s"),
    [
        ("azure-conv", 22_079_810, 4_099_072, 3489.83132),
        ("azure-code", 18_209_173, 256_365, 3396.531517),
        ("mooncake", 145_810_092, 4_134_690, 3540.0),
        ("multi-tenant", 197_473, 375_688, 573.856627),
    ],
)
def test_seed_0_is_the_same_on_every_machine(
    name: str, prompt_sum: int, output_sum: int, last_s: float
) -> None:
    # Written down once. A change means that results measured before can no longer be compared with new ones.
    workload = load_workload(name)
    assert int(workload.prompt_len.sum()) == prompt_sum
    assert int(workload.output_len.sum()) == output_sum
    assert workload.duration_s == pytest.approx(last_s, abs=2e-6)


# ---------------------------------------------------------------- the parts


def test_a_quantile_table_returns_its_quantiles() -> None:
    table = QuantileTable(levels=(0.0, 0.5, 1.0), values=(1.0, 4.0, 4096.0))
    assert table.at(np.array([0.0, 0.25, 0.5, 0.75, 1.0])).tolist() == pytest.approx([1, 2, 4, 128, 4096])
    straight = QuantileTable(levels=(0.0, 0.5, 1.0), values=(-10.0, 10.0, 10.0), geometric=False)
    assert straight.at(np.array([0.0, 0.25, 0.75])).tolist() == pytest.approx([-10, 0, 10])


def test_one_level_is_read_like_many() -> None:
    levels = np.linspace(0.0, 1.0, 101)
    for table in (
        QuantileTable(levels=(0.0, 0.3, 0.31, 1.0), values=(2.0, 2.0, 9.0, 700.0)),
        QuantileTable(levels=(0.0, 0.3, 0.31, 1.0), values=(-5.0, 2.0, 9.0, 700.0), geometric=False),
    ):
        assert [table.at_one(level) for level in levels.tolist()] == pytest.approx(table.at(levels).tolist())


@pytest.mark.parametrize("wanted", [-0.9, -0.3, 0.0, 0.5, 0.95])
def test_the_copula_gives_the_rank_correlation_asked_for(wanted: float) -> None:
    table = QuantileTable(levels=(0.0, 1.0), values=(1.0, 1e6))
    first, second = draw_lengths(20_000, 5, table, table, wanted)
    ranks = np.argsort(np.argsort(first)), np.argsort(np.argsort(second))
    assert np.corrcoef(*ranks)[0, 1] == pytest.approx(wanted, abs=0.02)


def test_normal_levels() -> None:
    assert normal_levels(np.array([-1.959964, 0.0, 1.281552])).tolist() == pytest.approx([0.025, 0.5, 0.9])
