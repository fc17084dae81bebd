"""How often the feed looks at the engine: often while that is cheap, less often where it is dear."""

from __future__ import annotations

import pytest

from paceline.server.feed import INTERVAL_S, LONGEST_INTERVAL_S, MOST_SHARE, Pace


def share_after(look_s: float, *, seconds: float = 60.0) -> tuple[float, float]:
    """The share of the time that looks take at last when each takes so long, and the time between them."""
    pace, now_s, cpu_s = Pace(), 100.0, 5.0
    interval_s = 0.0
    while now_s < 100.0 + seconds:
        interval_s = pace.interval_s(cpu_s, now_s)
        cpu_s += look_s
        now_s += interval_s
    return look_s / interval_s, interval_s


def test_cheap_looks_are_frequent() -> None:
    assert share_after(0.0005)[1] == INTERVAL_S


@pytest.mark.parametrize("look_s", [0.002, 0.005, 0.009])
def test_dear_looks_take_no_more_than_their_share(look_s: float) -> None:
    share, interval_s = share_after(look_s)
    assert share <= MOST_SHARE * 1.05
    assert INTERVAL_S < interval_s < LONGEST_INTERVAL_S


def test_nobody_waits_forever_for_a_picture() -> None:
    assert share_after(1.0)[1] == LONGEST_INTERVAL_S


def test_an_engine_that_was_started_anew_is_judged_anew() -> None:
    pace = Pace()
    pace.interval_s(50.0, 0.0)
    pace.interval_s(50.5, 10.0)
    assert pace.interval_s(0.0, 20.0) == pace.interval_s(0.0, 20.1)
    assert pace.interval_s(0.001, 40.0) == INTERVAL_S
