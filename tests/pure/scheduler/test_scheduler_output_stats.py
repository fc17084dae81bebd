"""Output statistics: lengths of answers by tenant, and how much of prompts is cached."""

import numpy as np
import pytest

from paceline.core.request import FinishReason, Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.scheduler.output_stats import MOST_TENANTS, OutputStats


def ended(
    stats: OutputStats, tenant: int, num_output: int, *, stopped: bool, times: int = 60, cached: int = 0
) -> None:
    for _ in range(times):
        request = Request(RequestId(0), np.arange(100, dtype=np.int32), SamplingParams())
        request.num_cached = cached
        stats.ended(tenant, request, num_output, FinishReason.STOP if stopped else FinishReason.LENGTH)


def left(stats: OutputStats, tenant: int, allowed: int) -> float:
    return float(stats.outputs_left(np.array([tenant]), np.array([allowed]))[0])


def test_before_anything_has_ended_answers_are_as_long_as_they_may_be() -> None:
    assert left(OutputStats(), 0, 4000) == 4000


def test_answers_that_stop_by_themselves_do_not_count_with_what_they_were_allowed() -> None:
    stats = OutputStats()
    ended(stats, 0, 50, stopped=True)
    assert left(stats, 0, 4000) == pytest.approx(50, rel=0.2)
    assert left(stats, 0, 10) == 10  # never more than it may


def test_answers_that_run_to_their_length_do() -> None:
    stats = OutputStats()
    ended(stats, 0, 50, stopped=False)
    assert left(stats, 0, 700) == 700


def test_tenants_have_averages_of_their_own_and_new_ones_those_of_all() -> None:
    stats = OutputStats()
    for _ in range(60):
        ended(stats, 0, 20, stopped=True, times=1, cached=80)
        ended(stats, 1, 400, stopped=True, times=1)
    assert left(stats, 0, 4000) < 100 < 300 < left(stats, 1, 4000)
    assert left(stats, 0, 4000) < left(stats, 2, 4000) < left(stats, 1, 4000)
    shares = stats.cached_share(np.array([0, 1, 0]))
    assert shares[0] == shares[2] > 0.6 > 0.2 > shares[1]


def test_tenants_do_not_pile_up() -> None:
    stats = OutputStats()
    for tenant in range(MOST_TENANTS + 10):
        ended(stats, tenant, 5, stopped=True, times=1)
    assert len(stats._by_tenant) == MOST_TENANTS
