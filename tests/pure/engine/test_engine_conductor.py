"""Several models on one device: whose turn it is, which of them sleep, and what always holds of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.config.model_set import ModelShare
from paceline.core.standing import WEIGHTS_DROPPED, WEIGHTS_KEPT, Standing
from paceline.engine.conductor import Conductor, Needs, Seat, SleepOrder, broken_rules
from paceline.errors import ConfigError
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def seat(name: str, share: float = 1.0, *, awake: int = 0, kept: int = 0, **config: Any) -> Seat:
    return Seat(config=ModelShare(name=name, share=share, **config), needs=Needs(awake, kept))


def turns(conductor: Conductor, steps_s: list[float], ready: list[bool], count: int) -> list[float]:
    """Device-seconds of each model after so many turns in which the same models are ready."""
    before = [each.device_s for each in conductor.seats]
    for _ in range(count):
        chosen = conductor.next(ready)
        assert chosen is not None and ready[chosen]
        conductor.charge(chosen, steps_s[chosen])
        assert broken_rules(conductor, _awake(conductor)) == []
    return [each.device_s - old for each, old in zip(conductor.seats, before, strict=True)]


_ENGINE = Bench().engine


def _awake(conductor: Conductor) -> list[Any]:
    return [_ENGINE for _ in conductor.seats]


@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (0.2, 0.8), (1, 2, 5)])
@pytest.mark.parametrize("steps_s", [(0.01, 0.01, 0.01), (0.2, 0.003, 0.05)])
def test_device_time_follows_the_shares_whatever_steps_take(
    shares: tuple[float, ...], steps_s: tuple[float, ...]
) -> None:
    conductor = Conductor([seat(f"m{place}", share) for place, share in enumerate(shares)])
    got = turns(conductor, list(steps_s), [True] * len(shares), 4000)
    parts = np.array(got) / sum(got)
    assert parts == pytest.approx(np.array(shares) / sum(shares), abs=0.02)


def test_a_model_alone_has_the_whole_device_and_saves_nothing_up() -> None:
    conductor = Conductor([seat("a"), seat("b")])
    assert turns(conductor, [0.1, 0.1], [True, False], 50) == pytest.approx([5.0, 0.0])
    assert turns(conductor, [0.1, 0.1], [True, True], 50) == pytest.approx([2.5, 2.5], abs=0.11)


def test_one_model_steps_whenever_it_can() -> None:
    conductor = Conductor([seat("a")])
    assert conductor.next([True]) == 0 and conductor.next([False]) is None and conductor.is_settled


def test_a_model_that_was_away_is_served_next_and_not_held_back() -> None:
    conductor = Conductor([seat("a"), seat("b")])
    turns(conductor, [0.1, 0.1], [True, False], 10)
    assert conductor.next([False, False]) is None
    turns(conductor, [0.1, 0.1], [False, True], 3)  # b has got less than a so far
    assert conductor.next([False, False]) is None
    assert turns(conductor, [0.1, 0.1], [True, True], 40) == pytest.approx([2.0, 2.0], abs=0.11)


def test_an_idle_model_sleeps_and_a_request_wakes_it() -> None:
    conductor = Conductor([seat("a", idle_sleep_s=5, sleep_level=2), seat("b"), seat("c", pinned=True)])
    assert not conductor.is_settled
    assert conductor.orders(4.0, [False] * 3) == []
    assert conductor.orders(5.0, [False] * 3) == [SleepOrder(0, WEIGHTS_DROPPED)]
    conductor.slept(0, WEIGHTS_DROPPED)
    assert conductor.orders(9.0, [False, True, True]) == [], "it sleeps already"
    assert conductor.orders(9.5, [True, False, False]) == [SleepOrder(0, 0)]
    conductor.waking(0)
    assert conductor.orders(9.6, [True, False, False]) == []
    conductor.woke(0, 10.0, 0.5)
    assert conductor.seats[0].standing is Standing.AWAKE and conductor.orders(14.9, [False] * 3) == []
    conductor.slept(0, WEIGHTS_DROPPED)
    assert conductor.seats[0].wake_s == 0.5, "as long as the last time"


def test_two_wakes_that_fail_are_the_last_until_an_operator_asks() -> None:
    conductor = Conductor([seat("a"), seat("b")])
    conductor.slept(0, WEIGHTS_KEPT)
    for standing in (Standing.ASLEEP, Standing.FAILED):
        conductor.waking(0)
        conductor.wake_failed(0)
        assert conductor.seats[0].standing is standing
    assert conductor.orders(1.0, [True, True]) == [] and conductor.seats[1].standing is Standing.AWAKE
    conductor.call(0)
    assert conductor.orders(1.5, [False, False]) == [SleepOrder(0, 0)]
    conductor.waking(0)
    conductor.woke(0, 2.0, 0.1)
    assert conductor.seats[0].failed_wakes == 0


def test_another_model_sleeps_where_there_is_no_room() -> None:
    seats = [seat("a", awake=60), seat("b", awake=50), seat("c", awake=40, pinned=True)]
    conductor = Conductor(seats, memory=110)
    for place in (0, 1):
        conductor.slept(place, WEIGHTS_DROPPED)
    assert conductor.orders(1.0, [True, False, True]) == [SleepOrder(0, 0)]
    conductor.waking(0)
    conductor.woke(0, 2.0, 1.0)
    # The one that runs is left alone until it has had time to run, and the other has waited.
    conductor.seats[1].wakes_s[WEIGHTS_DROPPED] = 3.0
    assert conductor.orders(5.0, [True, True, True]) == []
    assert conductor.orders(11.0, [True, True, True]) == []
    found = conductor.orders(13.0, [True, True, True])
    assert found == [SleepOrder(0, WEIGHTS_DROPPED), SleepOrder(1, 0)], "the pinned one never"
    conductor.slept(0, WEIGHTS_DROPPED)
    conductor.waking(1)
    assert broken_rules(conductor, [_asleep(), _asleep(), _ENGINE]) == []
    # One without requests sleeps at once.
    conductor.woke(1, 14.0, 1.0)
    assert conductor.orders(14.1, [True, False, True]) == [SleepOrder(1, WEIGHTS_DROPPED), SleepOrder(0, 0)]


def test_models_that_find_no_room_begin_asleep() -> None:
    seats = [seat("a", awake=60), seat("b", awake=50), seat("c", awake=40, pinned=True)]
    conductor = Conductor(seats, memory=110)
    conductor.begin()
    assert [each.standing for each in seats] == [Standing.AWAKE, Standing.ASLEEP, Standing.AWAKE]
    with pytest.raises(ConfigError, match=r"awake together: c 0.00 GiB, a 0.00 GiB; give at least 100"):
        Conductor(seats, memory=99).begin()


def test_a_pinned_model_has_no_idle_time() -> None:
    with pytest.raises(ConfigError, match="pinned and never sleeps"):
        ModelShare(name="a", pinned=True, idle_sleep_s=5.0)


def _asleep() -> Any:
    bench = Bench()
    bench.engine.sleep()
    return bench.engine


# -- broken states -----------------------------------------------------------------------------------------


def test_m1_models_that_hold_more_than_there_is() -> None:
    conductor = Conductor([seat("a", awake=60), seat("b", awake=50)], memory=100)
    assert [each[:2] for each in broken_rules(conductor, _awake(conductor))] == ["M1"]


def test_m2_a_sleeper_with_rows() -> None:
    conductor, bench = Conductor([seat("a")]), Bench()
    bench.add(prompt(9), 20)
    bench.step(3)
    bench.engine.sleep()
    conductor.slept(0, WEIGHTS_KEPT)
    assert broken_rules(conductor, [bench.engine]) == []
    bench.scheduler.schedule()  # gives it a row again
    assert [each[:2] for each in broken_rules(conductor, [bench.engine])] == ["M2"]


def test_m2_a_model_called_asleep_that_is_not() -> None:
    conductor = Conductor([seat("a")])
    conductor.slept(0, WEIGHTS_KEPT)
    assert [each[:2] for each in broken_rules(conductor, [Bench().engine])] == ["M2"]


def test_m3_a_model_that_is_passed_over() -> None:
    conductor = Conductor([seat("a"), seat("b")])
    for _ in range(3):
        conductor.next([True, True])
        conductor.charge(0, 0.1)
    assert [each[:2] for each in broken_rules(conductor, _awake(conductor))] == ["M3"]


# -- the engine's part -------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_blocks": 20, "num_host_blocks": 12, "preemption": "swap"},
    {"max_num_batched_tokens": 7},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "swap", "chunks"])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("when", [1, 2, 4, 7])
def test_requests_go_on_after_a_sleep_with_the_same_tokens(
    when: int, depth: int, options: dict[str, Any]
) -> None:
    """`Bench` compares every answer with the one it must be."""
    config = engine_config(max_model_len=64, depth=depth, **options)
    bench = Bench(config, overlapped=bool(depth))
    conductor = Conductor([seat("a")])
    for start in range(6):
        bench.add_all(prompt(2 + 6 * start, start % 3), 10, n=1 + start % 2, seed=start)
    for _ in range(2):
        bench.step(when)
        bench.engine.sleep()
        bench.flush()
        conductor.slept(0, WEIGHTS_KEPT)
        assert broken_rules(conductor, [bench.engine]) == []
        bench.add(prompt(5, 1), 6)  # one more comes while it sleeps
        runner = FakeRunner(config)
        bench.engine.wake(runner)
        bench.runner = runner
        conductor.woke(0, 1.0, 0.1)
        assert broken_rules(conductor, [bench.engine]) == []
    bench.run()
    assert bench.state.counters.failed_steps == 0
