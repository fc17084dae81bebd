"""The judge of a soak finds what it is there for: in facts that are made up, and in a server that really leaks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import pytest

from tests.soak.judge import (
    AT_REST,
    MOVES,
    ClientCounts,
    Evidence,
    Limits,
    growth_mib,
    judge,
    slope_mib_per_min,
)
from tests.soak.run import run_soak
from tests.soak.server import Held, ProcessState

LIMITS = Limits(growth_mib=8.0, slope_mib_per_min=0.5)
STATE = ProcessState(files=15, threads=5, memory_kib=50_000)
HELD = Held(objects=280_000, malloc_kib=14_000)


def good() -> Evidence:
    """A run of which everything is as it should be."""
    return Evidence(
        clients=ClientCounts(
            answered=Counter({"200": 900, "400": 50, "429": 10}),
            good=900,
            refused=5,
            left=60,
            perhaps_unseen=40,
            dripped=3,
        ),
        problems=[],
        complaints=[],
        by_status=Counter({"200": 910, "400": 50, "429": 12, "499": 70}),
        ended=Counter({"stop": 500, "length": 410, "abort": 60}),
        num_logged=1042,
        refused=8,
        timed_out=3,
        stalled=4,
        preemptions=7,
        moved=dict.fromkeys(MOVES, 1.0),
        disk_bytes=500_000,
        at_rest=dict(AT_REST),
        memory={"http": [(second, 50_000 + second % 7) for second in range(600)]},
        before={"http": STATE, "engine": STATE},
        after={"http": STATE, "engine": STATE},
        tasks_before=4,
        tasks_after=4,
        held_before={"http": HELD, "engine": HELD},
        held_after={"http": HELD, "engine": HELD},
        num_between=1000,
    )


def leave(name: str, **changes: int) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        values = {"files": 15, "threads": 5, "memory_kib": 50_000, **changes}
        evidence.after = {**evidence.after, name: ProcessState(**values)}

    return change


def rest(name: str, value: float) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        evidence.at_rest = {**evidence.at_rest, name: value}

    return change


def set_to(**values: object) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        for name, value in values.items():
            setattr(evidence, name, value)

    return change


def count(status: str, more: int) -> Callable[[Evidence], None]:
    def change(evidence: Evidence) -> None:
        evidence.by_status[status] += more
        evidence.num_logged += more

    return change


WRONG: dict[str, tuple[Callable[[Evidence], None], str]] = {
    "an error was seen": (set_to(problems=["500"]), "a client saw"),
    "an error was logged": (set_to(complaints=["{}"]), "the log says"),
    "an answer was not counted": (count("400", -1), "1 more answers with 400 arrived"),
    "an error no client saw": (count("500", 1), "the server counted 1 more answers with 500"),
    "a request was counted twice": (count("200", 31), "the server knows of"),
    "a request was lost": (count("499", -40), "the server knows of"),
    "a line was not logged": (set_to(num_logged=1041), "in the log"),
    "a generation never ended": (set_to(ended=Counter({"stop": 899})), "the server ended 899 well"),
    "a generation failed": (set_to(ended=Counter({"stop": 910, "error": 1})), "ended with an error"),
    "aborts no client asked for": (set_to(ended=Counter({"stop": 910, "abort": 99})), "were aborted"),
    "a refusal too many": (set_to(refused=9), "the server counted 9"),
    "a block leak": (rest("kv_cache_usage_perc", 0.01), "kv_cache_usage_perc"),
    "a place leak": (rest("kv_level_blocks_held", 1), "kv_level_blocks_held"),
    "an adapter reference leak": (rest("adapters_in_use", 1), "adapters_in_use"),
    "a model that was never asleep": (set_to(moved={"model_sleeps_total": 0}), "model_sleeps_total is 0"),
    "a disk beyond its limit": (set_to(disk_bytes=3_000_000), "the folder on disk"),
    "a permit leak": (rest("admission_places_taken", 1), "admission_places_taken"),
    "a queue leak": (rest("num_requests_waiting", 1), "num_requests_waiting"),
    "a broken invariant": (rest("invariant_violations_total", 1), "invariant_violations_total"),
    "a file leak": (leave("http", files=18), "http has 18 files open"),
    "a thread leak": (leave("engine", threads=8), "engine has 8 threads"),
    "a task leak": (set_to(tasks_after=7), "7 tasks"),
    "an object leak": (
        set_to(held_after={"http": HELD, "engine": Held(objects=283_001, malloc_kib=14_000)}),
        "engine holds 3001 more objects",
    ),
    "a kilobyte per request": (
        set_to(held_after={"http": Held(objects=280_000, malloc_kib=15_100), "engine": HELD}),
        "http holds 1100 KiB more",
    ),
    "slow growth": (
        set_to(memory={"http": [(second, 50_000 + second * 10) for second in range(600)]}),
        "http grows by 0.59 MiB a minute",
    ),
    "growth": (
        set_to(memory={"engine": [(second, 50_000 + second * 30) for second in range(600)]}),
        "engine grew by",
    ),
    "no preemption": (set_to(preemptions=0), "no request was preempted"),
    "a new engine": (set_to(is_same_engine=False), "restarted"),
    "a bad end": (set_to(exit_code=70), "code 70"),
}


def test_a_good_run_is_good() -> None:
    assert judge(good(), LIMITS) == []


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    change, told = WRONG[name]
    evidence = good()
    change(evidence)
    assert any(told in failure for failure in judge(evidence, LIMITS)), judge(evidence, LIMITS)


def test_memory_is_measured_behind_its_beginning() -> None:
    series = [(second, 1024 * min(second, 100)) for second in range(400)]
    assert growth_mib(series) == pytest.approx(0.0)
    assert slope_mib_per_min(series) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.campaign
def test_a_server_that_leaks_is_found() -> None:
    """Memory, tasks, permits and blocks, a few of each, in the real processes."""
    evidence, _ = run_soak(0.2, 7, (sys.executable, "-m", "tests.soak.leaky"), rest_s=1.0)
    failures = "\n".join(judge(evidence, LIMITS))
    for told in (
        "kv_cache_usage_perc",
        "admission_places_taken",
        "invariant_violations_total",
        "tasks, ",
        "http holds",
    ):
        assert told in failures
