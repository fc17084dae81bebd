"""The statistics, against values worked out by hand."""

import math

import numpy as np
import pytest

from paceline.lab.workload import Workload, describe
from paceline.lab.workload.describe import block_reuse, dispersion, gap_variation, rank_correlation


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
