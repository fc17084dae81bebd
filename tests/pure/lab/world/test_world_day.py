"""Flows and days by hand: nothing is lost, clocks and distances decide what goes where, deaths are told."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import InputError
from paceline.lab.world.bottlenecks import limits
from paceline.lab.world.day import live
from paceline.lab.world.flow import Flow
from paceline.lab.world.replica_counts import rate_within, sizes_for
from tests.pure.lab.world.world_helpers import CURVE, world


def one_cell(replicas: int = 4) -> Flow:
    return Flow(CURVE, np.ones((1, replicas), np.bool_))


def regions(west: float, east: float, **more: object) -> dict[str, object]:
    """Both with as many requests at all times."""
    plain = {
        "clock": 0,
        "night": 1.0,
        "peak_hour": 12,
        "front_cores": 1,
        "device_hour_price": 2.0,
        "replicas": 32,
    }
    return {
        "regions": [
            {**plain, "name": "west", "peak_rate": west, **more},
            {**plain, "name": "east", "peak_rate": east},
        ]
    }


def test_rows_settle_where_as_many_end_as_come() -> None:
    flow = one_cell()
    for _ in range(400):
        tick = flow.step(np.array([4 * 5.0]))
    # 5 requests/s of 100 tokens, 0.1 s each, on a device that prompts take 5 % of.
    assert tick.rows[0] == pytest.approx(4 * 5.0 * 100 * 0.1 / 0.95, rel=0.02)
    assert tick.rows[0] / 4 == pytest.approx(CURVE.rows_at(5.0), rel=0.02)
    assert tick.finished[0] == pytest.approx(20.0, rel=0.01) and tick.waiting[0] == pytest.approx(
        0.0, abs=1e-6
    )
    assert flow.arrived == pytest.approx(flow.finished + flow.at_once)


def test_what_comes_beyond_the_rate_waits_and_is_told_so() -> None:
    flow = one_cell()
    for _ in range(200):
        tick = flow.step(np.array([4 * 12.0]))
    (counts,) = flow.first_tokens.taken()
    p50_s, p99_s = flow.first_tokens.quantiles(counts, (0.5, 0.99))
    waiting = (12.0 - 9.0) * 200 / 9.0  # about what is behind the last that came, in seconds
    assert tick.waiting[0] > 1000 and tick.rows[0] == pytest.approx(400.0, rel=0.05)
    assert 0.4 * waiting < p50_s < p99_s < 1.2 * waiting
    assert flow.first_tokens.good(counts, 1.0) < 0.5 * flow.arrived


def test_new_requests_go_where_least_is() -> None:
    flow = one_cell(2)
    flow.stages[0, 0, 0] = flow.rows[0, 0] = 50.0
    flow.step(np.array([8.0]))
    assert flow.rows.ravel().tolist() == [50.0, 8.0]


def test_the_dead_leave_everything_to_the_others() -> None:
    flow = one_cell()
    for _ in range(60):
        flow.step(np.array([20.0]))
    before, dead = flow.at_once, np.array([[True, False, False, False]])
    lost, again = flow.die(dead)
    assert again > lost[:-1].sum() > 0.0  # of the output too
    flow.take_over(lost, again, ~dead)
    assert flow.at_once == pytest.approx(before) and flow.rows[0, 0] == 0.0
    flow.step(np.array([20.0]))
    assert flow.wait_s[0, 1] > 0.0 and flow.rows[0, 0] == 0.0
    for _ in range(60):
        flow.step(np.array([20.0]))
    assert flow.wait_s[0, 1] == pytest.approx(0.0, abs=1e-3)


def test_a_busy_region_sends_on_what_waits_longer_than_the_way() -> None:
    day = live(world(**regions(400.0, 100.0)), CURVE)
    last = day.windows[-1]
    assert last.sent_on[0] == pytest.approx(10 * (400 - 32 * CURVE.rate), rel=0.05) and last.sent_on[1] == 0.0
    assert last.waiting[0] < 1.3 * 32 * CURVE.rate * 0.1 + 32 * CURVE.rate
    alone = live(world(follow_the_sun=False, **regions(400.0, 100.0)), CURVE)
    assert alone.windows[-1].sent_on == [0.0, 0.0] and alone.good < 0.9 * day.good
    assert alone.arrived == pytest.approx(day.arrived)


def test_a_region_with_room_keeps_its_requests() -> None:
    day = live(world(**regions(200.0, 100.0)), CURVE)
    assert all(window.sent_on == [0.0, 0.0] for window in day.windows)
    assert day.good == pytest.approx(day.arrived) and day.lost == pytest.approx(0.0, abs=1e-3)


def test_the_way_there_is_part_of_the_first_token() -> None:
    day = live(
        world(
            **regions(400.0, 0.0, replicas=0),
            slo={"ttft_s": 5.0, "token_s": 1.0},
            distances_ms={"west": {"east": 3000}},
        ),
        CURVE,
    )
    # All of west is served by east, which has room for 288 of 400.
    assert day.windows[0].ttft_p50_s[1] > 3.0
    assert day.windows[0].sent_on[0] == pytest.approx(10 * 400.0), "what east has no room for goes there too"


def test_a_rack_that_dies_is_told_of_and_comes_back() -> None:
    deaths = [{"region": "west", "hour": 0.05, "racks": 1, "back_after_s": 60}]
    day = live(world(deaths=deaths, **regions(200.0, 100.0)), CURVE)
    (recovery,) = day.recoveries
    alive = [window.alive[0] for window in day.windows]
    assert (alive[0], min(alive), alive[-1]) == (32.0, 24.0, 32.0)
    assert recovery.resumed > 0 and recovery.worst_p99_s > recovery.before_p99_s
    assert recovery.after_s is not None and recovery.after_s <= 60.0
    assert day.arrived == pytest.approx(day.finished + day.left)


def test_a_region_that_dies_is_served_by_the_other() -> None:
    deaths = [{"region": "west", "hour": 0.05, "back_after_s": 1000}]
    day = live(world(deaths=deaths, **regions(100.0, 100.0)), CURVE)
    last = day.windows[-1]
    assert last.alive == [0.0, 32.0] and last.sent_on[0] == pytest.approx(last.came[0])
    assert day.arrived == pytest.approx(day.finished + day.left)


def test_what_has_died_twice_comes_back_once_both_are_over() -> None:
    deaths = [
        {"region": "west", "hour": 0.02, "back_after_s": 200},
        {"region": "west", "hour": 0.03, "racks": 1, "back_after_s": 30},
    ]
    day = live(world(deaths=deaths, **regions(100.0, 100.0)), CURVE)
    alive = [window.alive[0] for window in day.windows if 80.0 < window.at_s < 260.0]
    assert alive and set(alive) == {0.0} and day.windows[-1].alive[0] == 32.0


def test_a_death_where_nothing_comes_is_no_error() -> None:
    deaths = [{"region": "west", "hour": 0.02, "back_after_s": 60}]
    day = live(world(deaths=deaths, **regions(0.0, 0.0)), CURVE)
    assert day.arrived == 0.0 and day.recoveries[0].resumed == 0.0


def test_a_world_without_any_replica_is_refused() -> None:
    deaths = [{"region": name, "hour": 0.05, "back_after_s": 1000} for name in ("west", "east")]
    with pytest.raises(InputError, match="no replica is left"):
        live(world(deaths=deaths), CURVE)


def test_a_burst_brings_more_for_a_while() -> None:
    bursts = [{"region": "east", "hour": 0.05, "minutes": 1, "factor": 3}]
    day = live(world(bursts=bursts, **regions(100.0, 100.0)), CURVE)
    came = [round(window.came[1]) for window in day.windows]
    assert came.count(3000) == 6 and came.count(1000) == 30


def test_regions_whose_days_differ_need_fewer_replicas_together() -> None:
    day_long = replace(world(hours=24.0), deaths=())
    sizes = sizes_for(day_long, CURVE, 1.0)
    # Each has its peak of 200/s when the other has 100/s: together 300 at all times, alone 400.
    assert (sizes.alone, sizes.together) == (46, 34) and sizes.saved == pytest.approx(1 - 34 / 46)
    assert sizes_for(day_long, CURVE, 0.9).alone < 46


def test_tokens_that_may_not_take_long_allow_a_lower_rate() -> None:
    assert rate_within(CURVE, 1.0) == CURVE.rate
    # 0.1 s where no prompt is read: 0.105 s leave 5 % of the device for prompts of 10 ms.
    assert rate_within(CURVE, 0.105) == pytest.approx((1.0 - 0.1 / 0.105) / 0.01, rel=0.03)
    with pytest.raises(InputError, match=r"slo\.token_s"):
        rate_within(CURVE, 0.05)


def test_columns_that_stand_for_several_say_about_the_same() -> None:
    asked = world(**regions(400.0, 100.0))
    fine, coarse = live(asked, CURVE), live(asked, CURVE, stands_for=4)
    assert coarse.good == pytest.approx(fine.good, rel=0.02) and coarse.arrived == pytest.approx(fine.arrived)


def test_prices_and_limits_are_of_what_there_is() -> None:
    day = live(world(**regions(100.0, 100.0)), CURVE)
    assert day.replica_hours == pytest.approx(6.4) and day.cost == pytest.approx(12.8)
    assert day.cost_per_million == pytest.approx(1e6 * 12.8 / (day.finished * 100.0))
    found = {limit.what: limit for limit in limits(day)}
    assert found["cores of fronts, chunks"].share == pytest.approx(100.0 * 100 / 25_000, rel=0.05)
    assert found["what engines compute"].share == pytest.approx(100.0 / (32 * 9.0), rel=0.05)
    assert limits(day)[0].share == max(limit.share for limit in found.values())
