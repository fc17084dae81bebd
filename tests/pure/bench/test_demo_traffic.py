"""The bursts of the demonstration take about the time that was asked for, be it short or long."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.lab.bench.demo.demo_session import LENGTHS, burst_traffic


@pytest.mark.parametrize("seconds", [0.1, 1.0, 4.0, 8.0, 40.0])
@pytest.mark.parametrize("seed", range(4))
def test_requests_arrive_over_the_time_asked_for(seconds: float, seed: int) -> None:
    count = 60
    workload = burst_traffic(count, count / seconds, seed, LENGTHS["cpu"])
    assert len(workload) == count
    assert 0.6 * seconds < workload.duration_s < 1.5 * seconds


@pytest.mark.parametrize("seconds", [1.0, 4.0, 8.0])
def test_there_are_bursts_in_little_time_too(seconds: float) -> None:
    workload = burst_traffic(60, 60 / seconds, 0, LENGTHS["cpu"])
    assert np.diff(workload.arrival_s).max() > 0.2 * seconds, "a pause between two bursts"


def test_bursts_of_a_moment_are_no_mistake() -> None:
    assert len(burst_traffic(12, 10_000.0, 0, LENGTHS["cpu"])) == 12
