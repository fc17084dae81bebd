"""Places for adapters: who gets one, who keeps one, and that none waits for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.events import DecisionKind, Rule
from paceline.core.request import RequestId, RequestState
from paceline.errors import ConfigError
from paceline.scheduler.adapters import AdapterOrder, AdapterPlaces
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def places(most: int, known: int) -> AdapterPlaces:
    made = AdapterPlaces(most)
    for number in range(1, known + 1):
        made.register(number, f"{number:064x}")
    return made


def test_the_first_are_in_memory_as_far_as_there_are_places() -> None:
    assert list(places(0, 5).resident) == [1, 2, 3, 4, 5]
    assert list(places(2, 5).resident) == [1, 2]


def test_a_request_has_its_adapter_read_ahead_of_its_turn() -> None:
    made = places(2, 4)
    made.add_request(1)
    made.add_request(3)  # 2 is in memory for no request
    assert made.orders == [AdapterOrder(2, comes=False), AdapterOrder(3, comes=True)] and made.coming == {3}
    made.add_request(4)  # all others are wanted
    assert len(made.orders) == 2
    made.arrived(3, failed=False)
    assert made.is_there(1) and made.is_there(3) and not made.is_there(4)


def test_the_one_that_rows_left_longest_ago_goes_first() -> None:
    made = places(3, 4)
    for number in (1, 2, 3, 1):
        made.take_row(number)
        made.leave_row(number, 0)
    made.add_request(4)
    assert made.orders[0] == AdapterOrder(2, comes=False)


def test_what_a_step_under_way_may_touch_leaves_behind_it() -> None:
    made = places(1, 2)
    made.take_row(1)
    made.leave_row(1, submitted=7)
    made.begin_step(5)
    made.want(2)
    assert made.leaving == {1: 7} and not made.orders
    made.begin_step(6)
    made.want(2)
    assert made.leaving == {1: 7} and not made.orders, "no second place is made"
    made.begin_step(7)
    made.want(2)
    assert made.orders == [AdapterOrder(1, comes=False), AdapterOrder(2, comes=True)]


def test_what_a_request_before_needs_is_not_taken() -> None:
    made = places(1, 2)
    made.users = {1: 1, 2: 1}
    made.begin_step(0)
    made.claim(1)
    made.want(2)
    assert not made.orders and made.is_there(1)
    made.begin_step(0)
    made.want(2)  # now it comes before the request that has 1
    assert made.orders == [AdapterOrder(1, comes=False), AdapterOrder(2, comes=True)]


def test_a_place_with_rows_is_closed_and_one_at_a_time() -> None:
    made = places(2, 4)
    for number in (1, 1, 2):
        made.take_row(number)
    made.begin_step(0)
    made.want(3)
    made.want(4)
    assert made.is_there(1) and not made.is_there(2)
    made.users = {3: 1, 4: 1, 2: 1}
    made.leave_row(2, submitted=0)
    made.add_request(4)  # comes later than the request that waits for the place
    assert not made.orders
    made.begin_step(0)
    made.want(3)
    assert made.orders == [AdapterOrder(2, comes=False), AdapterOrder(3, comes=True)]


def test_one_that_cannot_be_read_takes_no_place() -> None:
    made = places(1, 2)
    made.add_request(2)
    made.arrived(2, failed=True)
    assert not made.coming and not made.resident
    made.add_request(1)
    assert made.coming == {1}


def test_a_number_that_is_forgotten_is_nowhere() -> None:
    made = places(2, 2)
    made.add_request(2)
    made.drop_request(2)
    made.forget(2)
    assert list(made.resident) == [1] and not made.users and not made.is_there(2)


def bench(most: int, known: int, **options: Any) -> Bench:
    made = Bench(engine_config(max_loras=most, **options))
    for number in range(1, known + 1):
        made.engine.adapters.load("", Path(str(number)))
    return made


def test_others_pass_a_request_whose_adapter_is_read() -> None:
    made = bench(1, 2)
    first = made.add(prompt(5, 1), 4, adapter=2)
    second = made.add(prompt(5, 2), 4)
    made.step(1)
    assert made.request(first).state is RequestState.WAITING
    assert made.request(second).state is RequestState.RUNNING
    assert made.reasons(DecisionKind.DEFER, first) == [Rule.ADAPTER]
    made.reads.finish()
    made.step(1)
    assert made.request(first).state is RequestState.RUNNING


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_no_adapter_starves_behind_popular_ones(policy: str) -> None:
    """A place for two, clients that keep both of them busy, and one request of a third."""
    made = bench(2, 3, max_num_seqs=6, scheduling_policy=policy)
    serial = 0

    def keep_busy() -> None:
        nonlocal serial
        while len(made.state.requests) < 10:
            serial += 1
            # Of unequal lengths: no adapter happens to be without rows.
            made.add(prompt(5, serial), 5 + 7 * (serial // 2 % 3), adapter=1 + serial % 2)

    keep_busy()
    made.step(4)
    rare = made.add(prompt(5, 999), 4, adapter=3)
    for _ in range(200):
        keep_busy()
        made.step(1)
        made.reads.finish()
        if RequestId(rare) not in made.state.requests:
            break
    assert RequestId(rare) not in made.state.requests, "the request of the third adapter never ran"


def test_padded_batches_have_all_their_adapters() -> None:
    with pytest.raises(ConfigError, match="--max-loras needs --mode continuous"):
        engine_config(max_loras=2, mode="static")
