"""Threads between host places and a store: tickets come back once, failed ones as failed, late ones touch nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from paceline.core.plan import Moves, StepPlan
from paceline.core.request import BlockKey
from paceline.core.store import BlockHead
from paceline.runner.stores.store_threads import Bytes, StoreThreads
from tests.fake_store import FakeStore

SIZE = 64


class Places:
    """Host places as rows of bytes."""

    def __init__(self) -> None:
        self.rows = np.zeros((16, SIZE), np.uint8)

    def pack(self, place: int, into: Bytes) -> None:
        into[:] = self.rows[place]

    def unpack(self, place: int, source: Bytes) -> None:
        self.rows[place] = source


def head_of(number: int) -> BlockHead:
    return BlockHead(number.to_bytes(32, "big"), bytes(16))


def moves(ticket: int, hosts: list[int], places: list[int]) -> Moves:
    return Moves(
        ticket=np.full(len(hosts), ticket, np.int32),
        group=np.zeros(len(hosts), np.int32),
        host=np.array(hosts, np.int32),
        disk=np.array(places, np.int32),
        contents=tuple(BlockKey(head_of(place).key, b"", head_of(place).check) for place in places),
        uses_left=(0,) * len(places),
    )


def ended(threads: StoreThreads, count: int = 1) -> tuple[list[int], list[int]]:
    """Waits until so many tickets have ended."""
    done: list[int] = []
    failed: list[int] = []
    while len(done) + len(failed) < count:
        reported = threads.completed(wait=True)
        done += reported.done.tolist()
        failed += reported.failed.tolist()
    return sorted(done), sorted(failed)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def host() -> Places:
    return Places()


@pytest.fixture
def threads(store: FakeStore, host: Places) -> Iterator[StoreThreads]:
    made = StoreThreads(store, host, SIZE)
    yield made
    store.may_go.set()
    made.close()


def test_blocks_go_to_the_store_and_come_back(threads: StoreThreads, host: Places) -> None:
    host.rows[:4] = np.arange(4)[:, None] + 1
    threads.submit(StepPlan(seq=1, store=moves(5, [0, 1], [7, 3]), fetch=moves(6, [9], [2])))
    assert ended(threads, 2) == ([5], [6])  # there was nothing in place 2
    threads.submit(StepPlan(seq=2, fetch=moves(8, [10, 11], [3, 7])))
    assert ended(threads) == ([8], [])
    assert host.rows[10].tolist() == [2] * SIZE and host.rows[11].tolist() == [1] * SIZE
    work = threads.work()
    assert (work.blocks_written, work.blocks_read, work.bad, work.failed) == (2, 2, 1, 0)
    assert threads.completed(wait=True).done.size == 0


def test_a_ticket_fails_if_one_of_its_blocks_does(threads: StoreThreads) -> None:
    threads.submit(StepPlan(seq=1, store=moves(1, [0], [0])))
    assert ended(threads) == ([1], [])
    threads.submit(StepPlan(seq=2, fetch=moves(2, [1, 2], [0, 1])))
    assert ended(threads) == ([], [2])


def test_bad_bytes_do_not_turn_a_store_off_but_three_errors_do(
    threads: StoreThreads, store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    for ticket in range(1, 6):
        threads.submit(StepPlan(seq=ticket, fetch=moves(ticket, [0], [ticket])))
    ended(threads, 5)
    assert not threads.is_off
    store.error = OSError("the disk is full")
    for ticket in range(10, 13):
        threads.submit(StepPlan(seq=ticket, store=moves(ticket, [0], [0])))
    assert ended(threads, 3) == ([], [10, 11, 12])
    assert threads.is_off and threads.work().is_off and threads.work().failed == 3
    assert "is off until the server is started again" in caplog.text
    store.error = None
    threads.submit(StepPlan(seq=20, store=moves(20, [0], [0])))
    assert ended(threads) == ([], [20])
    assert not store.kept


def test_a_dropped_ticket_touches_no_host_memory_later(
    threads: StoreThreads, store: FakeStore, host: Places
) -> None:
    host.rows[0] = 1
    threads.submit(StepPlan(seq=1, store=moves(1, [0], [0])))
    ended(threads)
    store.may_go.clear()
    store.is_called.clear()
    threads.submit(StepPlan(seq=2, fetch=moves(2, [5], [0])))
    store.is_called.wait()
    threads.forget()
    host.rows[5] = 9
    store.may_go.set()
    threads.submit(StepPlan(seq=3, fetch=moves(3, [6], [0])))
    assert ended(threads) == ([3], [])
    threads.close()
    assert host.rows[5].tolist() == [9] * SIZE and host.rows[6].tolist() == [1] * SIZE


def test_a_store_that_hangs_fails_its_tickets(store: FakeStore, host: Places) -> None:
    threads = StoreThreads(store, host, SIZE, patience_s=0.01)
    store.may_go.clear()
    threads.submit(StepPlan(seq=1, store=moves(1, [0], [0]), fetch=moves(2, [1], [1])))
    time.sleep(0.02)
    assert ended(threads, 2) == ([], [1, 2])
    assert threads.work().failed == 2
    store.may_go.set()
    threads.close()
