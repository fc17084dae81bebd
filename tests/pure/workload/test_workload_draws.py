"""What is drawn: always the same for a seed, and from the distributions it was told."""

import numpy as np
import pytest

from paceline.lab.workload import load_workload
from paceline.lab.workload.arrivals import QuantileTable, draw_lengths, normal_levels

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
