"""What requests turn out to be: lengths of answers by tenant, and what of prompts is cached."""

import numpy as np
import pytest

from paceline.scheduler.habits import MOST_TENANTS, Habits


def ended(
    habits: Habits, tenant: int, num_output: int, *, stopped: bool, times: int = 60, cached: int = 0
) -> None:
    for _ in range(times):
        habits.ended(tenant, num_prompt=100, num_output=num_output, num_cached=cached, stopped=stopped)


def left(habits: Habits, tenant: int, allowed: int) -> float:
    return float(habits.outputs_left(np.array([tenant]), np.array([allowed]))[0])


def test_before_anything_has_ended_answers_are_as_long_as_they_may_be() -> None:
    assert left(Habits(), 0, 4000) == 4000


def test_answers_that_stop_by_themselves_do_not_count_with_what_they_were_allowed() -> None:
    habits = Habits()
    ended(habits, 0, 50, stopped=True)
    assert left(habits, 0, 4000) == pytest.approx(50, rel=0.2)
    assert left(habits, 0, 10) == 10  # never more than it may


def test_answers_that_run_to_their_length_do() -> None:
    habits = Habits()
    ended(habits, 0, 50, stopped=False)
    assert left(habits, 0, 700) == 700


def test_tenants_have_habits_of_their_own_and_new_ones_those_of_all() -> None:
    habits = Habits()
    for _ in range(60):
        ended(habits, 0, 20, stopped=True, times=1, cached=80)
        ended(habits, 1, 400, stopped=True, times=1)
    assert left(habits, 0, 4000) < 100 < 300 < left(habits, 1, 4000)
    assert left(habits, 0, 4000) < left(habits, 2, 4000) < left(habits, 1, 4000)
    shares = habits.cached_share(np.array([0, 1, 0]))
    assert shares[0] == shares[2] > 0.6 > 0.2 > shares[1]


def test_tenants_do_not_pile_up() -> None:
    habits = Habits()
    for tenant in range(MOST_TENANTS + 10):
        ended(habits, tenant, 5, stopped=True, times=1)
    assert len(habits._by_tenant) == MOST_TENANTS
