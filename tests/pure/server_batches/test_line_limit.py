"""Batches take what others leave, step back while a request waits, and never quite stop."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.batches.batches import LineLimit, ServerLoad
from paceline.server.batches.work import Gate

IDLE = ServerLoad(rows=64, queue=256, waiting=0, own=0, others=0, others_unstarted=0)


def settled(pace: LineLimit, load: ServerLoad, times: int = 50) -> int:
    """Where it ends when the load stays, lines always taking all they may."""
    for _ in range(times):
        load = replace(load, own=pace.allowed(load))
        pace.observe(load)
    return pace.allowed(load)


def test_an_idle_engine_is_filled_and_a_few_lines_wait() -> None:
    assert LineLimit().allowed(IDLE) == 1
    assert settled(LineLimit(), IDLE) == 64 + 8


def test_others_have_their_rows() -> None:
    assert settled(LineLimit(), replace(IDLE, others=60)) == 4 + 8
    assert settled(LineLimit(), replace(IDLE, others=300)) == 1


def test_while_a_request_waits_no_new_line_goes_and_the_bound_halves() -> None:
    pace = LineLimit()
    assert settled(pace, IDLE) == 72
    busy = replace(IDLE, own=72, waiting=3, others=3, others_unstarted=3)
    assert pace.allowed(busy) == 1
    seen = []
    for _ in range(8):
        pace.observe(busy)
        seen.append(pace.limit)
    assert seen == [36, 18, 9, 4, 2, 1, 1, 1]
    pace.observe(replace(IDLE, own=1))
    assert 1 < pace.allowed(IDLE) < 72, "it comes back step by step"


def test_requests_that_are_being_read_are_not_waiting() -> None:
    """A request without a token, in an engine whose queue is empty, has a row already."""
    assert settled(LineLimit(), replace(IDLE, others=4, others_unstarted=4)) == 64 + 8 - 4


def test_where_memory_is_short_lines_do_not_pile_up() -> None:
    pace = LineLimit()
    settled(pace, IDLE)
    pace.observe(replace(IDLE, own=72, waiting=40))  # 32 run, 40 wait, all of them lines
    assert pace.limit == 32 + 8


def test_the_operator_may_bound_it() -> None:
    assert settled(LineLimit(5), IDLE) == 5


def test_half_of_the_queue_is_left_to_others() -> None:
    assert settled(LineLimit(), replace(IDLE, queue=4)) == 64 + 2
    assert settled(LineLimit(), replace(IDLE, queue=1)) == 64


numbers = st.integers(0, 300)
loads = st.builds(
    ServerLoad,
    rows=st.integers(1, 256),
    queue=st.integers(1, 256),
    waiting=numbers,
    own=numbers,
    others=numbers,
    others_unstarted=numbers,
)


@given(st.lists(loads, max_size=30), loads)
def test_it_is_never_nothing_and_never_more_than_there_is(history: list[ServerLoad], now: ServerLoad) -> None:
    pace = LineLimit()
    for load in history:
        pace.observe(load)
        assert pace.limit >= 1
    assert 1 <= pace.allowed(now) <= max(1, now.rows + now.queue // 2 - now.others)
    if min(now.others_unstarted, now.waiting):
        assert pace.allowed(now) == 1


# ---------------------------------------------------------------- the gate


def test_lines_go_in_their_order_and_some_alone() -> None:
    async def run() -> None:
        room = 2
        gate = Gate(lambda inside: inside < room)
        went: list[str] = []

        async def line(name: str, alone: bool = False) -> None:
            await gate.enter(alone=alone)
            went.append(name)

        tasks = [asyncio.create_task(line(*given)) for given in (("a",), ("b",), ("c", True), ("d",))]
        await asyncio.sleep(0.01)
        assert went == ["a", "b"]
        gate.leave()
        await asyncio.sleep(0.01)
        assert went == ["a", "b"], "one is still inside, and it has to be alone"
        gate.leave()
        await asyncio.sleep(0.01)
        assert went == ["a", "b", "c"] and gate.num_inside == 1, "no line goes beside it"
        gate.leave()
        await asyncio.gather(*tasks)
        assert went == ["a", "b", "c", "d"]
        gate.leave()
        assert gate.num_inside == 0

    asyncio.run(run())


def test_tenants_take_turns() -> None:
    async def run() -> None:
        room = 0
        gate = Gate(lambda inside: inside < room)
        went: list[str] = []

        async def line(tenant: str) -> None:
            await gate.enter(tenant)
            went.append(tenant)

        tasks = [asyncio.create_task(line(tenant)) for tenant in "aaaabbc"]
        await asyncio.sleep(0)
        room = len(tasks)
        gate.admit_waiting()
        await asyncio.gather(*tasks)
        assert "".join(went) == "abcabaa"

    asyncio.run(run())


def test_a_line_that_is_cancelled_lets_the_next_go() -> None:
    async def run() -> None:
        room = 1
        gate = Gate(lambda inside: inside < room)
        await gate.enter()
        waiting = [asyncio.create_task(gate.enter(alone=number == 0)) for number in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        room = 2
        gate.admit_waiting()
        await waiting[1]
        gate.leave()
        waiting[2].cancel()  # it has its turn already, and does not know yet
        await asyncio.gather(*waiting, return_exceptions=True)
        gate.leave()
        assert gate.num_inside == 0

    asyncio.run(run())
