"""How often the feed looks at the engine, and what it keeps of the last minute."""

from __future__ import annotations

import pytest

from paceline.process.client import EngineStats
from paceline.server.live.feed import (
    FREE_SHARE,
    INTERVAL_S,
    LONGEST_INTERVAL_S,
    MOST_SHARE,
    LookInterval,
    Past,
)


def settled(look_s: float, busy: float) -> float:
    """The time between looks at last, when each takes so long of an engine that is busy for a share of the time."""
    pace, now_s, watch_s, interval_s = LookInterval(), 100.0, 0.0, 0.0
    while now_s < 160.0:
        stats = EngineStats(watch_cpu_s=watch_s, cpu_s=watch_s + busy * (now_s - 100.0))
        interval_s = pace.interval_s(stats, now_s)
        watch_s += look_s
        now_s += interval_s
    return interval_s


def test_cheap_looks_are_frequent() -> None:
    assert settled(0.0005, busy=0.5) == INTERVAL_S
    assert settled(0.0001, busy=0.0) == INTERVAL_S


@pytest.mark.parametrize("busy", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("look_s", [0.0008, 0.002, 0.004])
def test_dear_looks_take_no_more_than_their_share(look_s: float, busy: float) -> None:
    interval_s = settled(look_s, busy)
    assert look_s / interval_s <= MOST_SHARE * (busy + look_s / interval_s) * 1.1
    assert INTERVAL_S <= interval_s < LONGEST_INTERVAL_S


def test_an_engine_with_nothing_to_do_is_looked_at_all_the_same() -> None:
    assert settled(0.001, busy=0.0) == pytest.approx(0.001 / FREE_SHARE, rel=0.1)


def test_nobody_waits_forever_for_a_picture() -> None:
    assert settled(1.0, busy=0.5) == LONGEST_INTERVAL_S


def test_an_engine_that_was_started_anew_is_judged_anew() -> None:
    pace = LookInterval()
    pace.interval_s(EngineStats(watch_cpu_s=1.0, cpu_s=50.0), 0.0)
    dear = pace.interval_s(EngineStats(watch_cpu_s=2.0, cpu_s=51.0), 10.0)
    assert dear > INTERVAL_S
    assert pace.interval_s(EngineStats(watch_cpu_s=0.0, cpu_s=0.1), 20.0) == dear
    assert pace.interval_s(EngineStats(watch_cpu_s=0.0001, cpu_s=9.0), 40.0) == INTERVAL_S


def test_the_last_minute_is_kept_with_the_state_before_it() -> None:
    past = Past(seconds=60.0)
    for now_s in range(0, 200, 2):
        past.add(b"%d" % now_s, float(now_s))
    assert past.messages() == [b"%d" % now_s for now_s in range(136, 200, 2)]
    past.drop(1000.0)
    assert past.messages() == [b"198"], "of a time long gone only the state counts"


def test_the_last_minute_takes_a_bounded_number_of_bytes() -> None:
    past = Past(most_bytes=1000)
    for now_s in range(50):
        past.add(bytes(100), float(now_s))
    assert len(past) == 10
    past.add(bytes(5000), 51.0)
    assert len(past) == 1, "the newest is kept, however large it is"
