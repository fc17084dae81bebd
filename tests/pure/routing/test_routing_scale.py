"""How many engines are wanted: by what comes, what waits, what grows; up at once, down one at a time."""

import pytest

from paceline.routing.scale import (
    FILL,
    KV_FILL,
    PATIENCE_S,
    Bounds,
    Demand,
    Figures,
    Limits,
    Mix,
    Wanted,
    capacity,
    wanted,
)

BOUNDS = Bounds(1, 20)
QUIET = Figures(
    engines=4,
    ready=4,
    demand=4 * FILL * 10.0,
    peak=4 * FILL * 10.0,
    growth=0.0,
    waiting_s=0.0,
    capacity=10.0,
    patience_s=2.0,
    kv_use=0.5,
    steady_s=1000.0,
)


def test_as_many_as_what_comes_needs() -> None:
    assert wanted(QUIET, BOUNDS, 15.0) == Wanted(4, "demand")
    assert wanted(QUIET._replace(demand=QUIET.demand * 2.5), BOUNDS, 15.0) == Wanted(10, "demand"), (
        "up at once"
    )
    assert wanted(QUIET._replace(demand=1e6), BOUNDS, 15.0) == Wanted(20, "bounds")


def test_fewer_only_one_at_a_time_and_not_soon_after_a_change() -> None:
    less = QUIET._replace(demand=1.0, peak=1.0, kv_use=0.0)
    assert wanted(less, BOUNDS, 15.0) == Wanted(3, "less")
    assert wanted(less._replace(steady_s=PATIENCE_S - 1.0), BOUNDS, 15.0) == Wanted(4, "patience")
    assert wanted(less._replace(steady_s=170.0), BOUNDS, 180.0) == Wanted(4, "patience"), (
        "a start takes longer"
    )
    assert wanted(less._replace(peak=QUIET.peak), BOUNDS, 15.0) == Wanted(4, "patience"), (
        "it was needed lately"
    )
    assert wanted(less._replace(engines=1, ready=1), BOUNDS, 15.0) == Wanted(1, "demand")


def test_growth_counts_for_as_long_as_a_start_takes() -> None:
    grows = QUIET._replace(growth=0.1)
    assert wanted(grows, BOUNDS, 15.0) == Wanted(5, "growth")
    assert wanted(grows, BOUNDS, 180.0) == Wanted(7, "growth")
    assert wanted(grows._replace(growth=10.0), BOUNDS, 180.0) == Wanted(8, "growth"), "twice at most"
    assert wanted(grows._replace(growth=-1.0), BOUNDS, 180.0).count == 4


def test_a_queue_that_will_be_late_asks_for_more() -> None:
    assert wanted(QUIET._replace(waiting_s=4 * 2.0), BOUNDS, 15.0).count == 4, "all of it is in time"
    assert wanted(QUIET._replace(waiting_s=4 * 2.0 + 45.0), BOUNDS, 15.0) == Wanted(7, "queue")
    assert wanted(QUIET._replace(waiting_s=4 * 2.0 + 45.0), BOUNDS, 180.0) == Wanted(5, "queue")


def test_a_full_kv_cache_asks_for_more() -> None:
    assert wanted(QUIET._replace(kv_use=0.95), BOUNDS, 15.0) == Wanted(5, "kv")
    assert wanted(QUIET._replace(kv_use=KV_FILL), BOUNDS, 15.0).count == 4


# ---------------------------------------------------------------- what one engine serves


def steps(rows: int, context: float, prompt_tokens: float) -> float:
    return 0.010 + 0.0001 * rows + 0.00002 * prompt_tokens


def test_capacity_is_what_goes_in_and_out_without_end() -> None:
    mix = Mix(prompt=500.0, answer=100.0, context=550.0)
    rows = 64
    rate = capacity(steps, mix, Limits(step_s=1.0, rows=rows, kv_tokens=10**9))
    seconds = steps(rows, 0.0, rows * 5.0)
    assert rate == pytest.approx(rows / 100 / seconds)
    assert rate * mix.prompt == pytest.approx(rows * 5.0 / seconds), "prompts are read as fast as they come"


def test_capacity_keeps_the_bound_between_tokens_and_the_memory() -> None:
    mix = Mix(prompt=500.0, answer=100.0, context=550.0)
    most = Limits(step_s=1.0, rows=256, kv_tokens=10**9)
    tight = capacity(steps, mix, most._replace(step_s=0.020))
    # 0.010 + 0.0002 rows <= 0.020
    assert tight == pytest.approx(50 / (100 * 0.020))
    small = capacity(steps, mix, most._replace(kv_tokens=550 * 8))
    assert small == pytest.approx(8 / (100 * steps(8, 0.0, 40.0)))
    assert capacity(steps, mix, most._replace(step_s=0.001)) > 0.0, "one row is served whatever is asked"


# ---------------------------------------------------------------- what comes


def comes(demand: Demand, start_s: int, end_s: int, rate: float) -> None:
    for second in range(start_s, end_s):
        demand.comes(second + 0.5, rate)


def test_an_even_stream_has_no_growth() -> None:
    demand = Demand(300.0)
    assert demand.at(5.0) == (0.0, 0.0, 0.0)
    comes(demand, 0, 200, 8.0)
    lately, peak, growth = demand.at(200.0)
    assert (lately, growth) == (8.0, 0.0) and peak == pytest.approx(8.0, rel=0.2)


def test_a_burst_is_seen_within_seconds_and_its_peak_is_remembered() -> None:
    demand = Demand(120.0)
    comes(demand, 0, 100, 8.0)
    comes(demand, 100, 115, 24.0)
    lately, peak, growth = demand.at(115.0)
    assert lately == peak == 24.0 and growth == pytest.approx(16.0 / 30.0)
    comes(demand, 115, 200, 8.0)
    lately, peak, growth = demand.at(200.0)
    assert lately == 8.0 and peak > 20.0 and growth == 0.0
    comes(demand, 200, 400, 8.0)
    assert demand.at(400.0)[1] < 10.0


def test_the_first_seconds_count_as_what_they_are() -> None:
    demand = Demand(60.0)
    comes(demand, 1000, 1004, 5.0)
    assert demand.at(1004.0)[0] == pytest.approx(5.0, rel=0.2)
