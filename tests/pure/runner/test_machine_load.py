"""How many threads compute follows from what other processes leave, with hysteresis, and changes are told in words."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.runner import machine_load
from paceline.runner.machine_load import (
    MANY_TOKENS,
    REFRESH_S,
    REFRESHES_TO_GROW,
    SAID_EVERY_S,
    FreeCores,
    LoadNotices,
    MachineLoad,
)


class Machine:
    """Cores, this process and others, on a separate clock."""

    def __init__(self, cores: int) -> None:
        self.now_s = self.used_s = self.own_s = 0.0
        self.competing = 0
        self.load = MachineLoad(
            cores=cores,
            used_s=lambda: self.used_s,
            own_s=lambda: self.own_s,
            runnable=lambda: self.competing,
            clock=lambda: self.now_s,
        )

    def run(self, others: float, own: float = 0.0, seconds: float = REFRESH_S) -> None:
        self.now_s += seconds
        self.used_s += (others + own) * seconds
        self.own_s += own * seconds


def counts(machine: Machine, free: FreeCores, others: float, looks: int) -> list[int]:
    seen = []
    for _ in range(looks):
        machine.run(others, own=0.5)
        seen.append(free.refresh())
    return seen


def test_what_this_process_uses_is_not_counted_as_others() -> None:
    machine = Machine(2)
    machine.run(others=0.3, own=1.6)
    assert machine.load.refresh()
    assert machine.load.others == pytest.approx(0.3)


def test_a_look_comes_only_after_a_while() -> None:
    machine = Machine(2)
    machine.run(others=2.0, seconds=REFRESH_S / 2)
    assert not machine.load.refresh() and machine.load.others is None
    machine.run(others=2.0, seconds=REFRESH_S / 2)
    assert machine.load.refresh() and machine.load.others == 2.0


@pytest.mark.parametrize("cores, others, threads", [(2, 0.3, 2), (2, 0.7, 1), (2, 2.0, 1), (16, 4.2, 12)])
def test_threads_are_given_up_at_once(cores: int, others: float, threads: int) -> None:
    machine = Machine(cores)
    free = FreeCores(machine.load, cores)
    assert not free.is_shared
    assert counts(machine, free, others, 1) == [threads]
    assert free.is_shared == (threads < cores)


def test_a_thread_comes_back_once_its_core_stays_free() -> None:
    machine = Machine(2)
    free = FreeCores(machine.load, 2)
    counts(machine, free, 2.0, 1)
    assert counts(machine, free, 0.1, REFRESHES_TO_GROW - 1) == [1] * (REFRESHES_TO_GROW - 1)
    assert counts(machine, free, 0.4, 1) == [1]  # not free enough: the count begins anew
    assert counts(machine, free, 0.1, REFRESHES_TO_GROW)[-1] == 2


def test_a_load_between_the_two_bounds_changes_nothing() -> None:
    machine = Machine(2)
    free = FreeCores(machine.load, 2)
    assert counts(machine, free, 0.4, 20) == [2] * 20
    counts(machine, free, 1.0, 1)
    assert counts(machine, free, 0.4, 20) == [1] * 20


@pytest.mark.parametrize("competing, threads", [(2, 2), (5, 1)])
def test_large_steps_keep_their_threads_unless_the_cores_are_crowded(competing: int, threads: int) -> None:
    machine = Machine(2)
    free = FreeCores(machine.load, 2)
    machine.competing = competing
    assert counts(machine, free, 2.0, 4)[-1] == 1
    assert free.refresh(tokens=MANY_TOKENS) == threads


def test_a_container_has_no_more_threads_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "usable_cores", lambda: frozenset(range(8)))
    for quota, cores in ((None, 8), (0.5, 1), (1.5, 2), (64.0, 8)):
        monkeypatch.setattr(machine_load, "_quota", lambda quota=quota: quota)
        assert machine_load.cores_allowed() == cores


def test_without_counters_nothing_is_known_and_all_threads_compute() -> None:
    load = MachineLoad(cores=2, used_s=lambda: None)
    assert FreeCores(load, 2).refresh() == 2
    assert not load.is_busy and not load.is_free


def test_a_change_is_told_once_a_minute_at_most() -> None:
    machine = Machine(2)
    notices = LoadNotices(machine.load, reported_busy=False, clock=lambda: machine.now_s)

    def said(others: float, seconds: float) -> str | None:
        machine.run(others, seconds=seconds)
        machine.load.refresh()
        return notices.take()

    assert said(0.1, 1.0) is None
    assert said(1.8, 1.0) == (
        "the machine is busy: other processes use 1.8 of 2 cores; answers will be slower"
    )
    assert said(1.8, 10.0) is None
    assert said(0.1, 10.0) is None  # too soon
    assert said(0.1, SAID_EVERY_S) == "the machine is free again"
    assert said(0.7, SAID_EVERY_S) is None  # neither busy nor free


def test_a_machine_that_was_busy_at_the_start_is_told_to_be_free_later() -> None:
    machine = Machine(2)
    notices = LoadNotices(machine.load, reported_busy=True, clock=lambda: machine.now_s)
    machine.run(0.0, seconds=SAID_EVERY_S)
    machine.load.refresh()
    assert notices.take() == "the machine is free again"


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="there are no counters to read")
def test_the_counters_of_this_machine_are_read() -> None:
    load = MachineLoad(relatives=(os.getppid(), 0))
    assert load.refresh(least_s=0.0)
    assert load.others is not None and 0.0 <= load.others <= load.cores == len(machine_load.usable_cores())
