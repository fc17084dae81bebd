"""Eviction orders in the whole engine: what they find, runs with either that replay, and the flag that compares."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.cli.sim.flags import SimOptions
from paceline.cli.sim.run import plan_runs
from paceline.errors import InputError
from paceline.lab.report.summary import summarize
from paceline.lab.sim import SimConfig, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload import Workload
from tests.pure.lab.sim.sim_helpers import make_workload, sim_config, small_engine


def returning_users() -> Workload:
    """Ten users with a conversation of 4 blocks come back every 100 s; a flood of other requests passes between."""
    rng = random.Random(1)
    found = [(4.0 * number, tuple(1000 + 10 * number + part for part in range(4))) for number in range(500)]
    for user in range(10):
        start = rng.uniform(0, 100)
        found += [(start + 100.0 * turn, tuple(10 * user + part for part in range(4))) for turn in range(20)]
    found.sort()
    times, ids = zip(*found, strict=True)
    return make_workload(list(times), prompt=70, output=2, prefix_ids=list(ids), prefix_block=16)


def config_of(eviction: str, num_blocks: int = 120) -> SimConfig:
    engine = small_engine(num_blocks=num_blocks)
    order = "reuse" if eviction == "belady" else eviction
    engine = replace(engine, kv=replace(engine.kv, eviction=order))
    return sim_config(engine, clairvoyant=eviction == "belady", check=True)


def test_users_who_return_are_found_more_often() -> None:
    workload = returning_users()
    shares = [
        summarize(simulate(config_of(name), workload)).prefix_hit_share or 0.0
        for name in ("lru", "reuse", "belady")
    ]
    lru, reuse, belady = shares
    assert lru < 0.02 < reuse < belady
    assert reuse > 3 * lru


@pytest.mark.parametrize("eviction", ["lru", "reuse"])
def test_a_run_with_either_order_replays_byte_for_byte(eviction: str, tmp_path: Path) -> None:
    config, path = config_of(eviction, num_blocks=40), tmp_path / "run.jsonl"
    simulate(config, returning_users(), recorder=RunLogWriter(path, run_header(config.engine)))
    report = replay(read_run_log(path), output=tmp_path / "again.jsonl")
    assert report.is_equal and report.complete
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_a_log_says_which_order_it_was_recorded_with(tmp_path: Path) -> None:
    """Played with the other order, the run is another one; a log from before there was a choice has lru."""
    config, path = config_of("lru"), tmp_path / "run.jsonl"
    simulate(config, returning_users(), recorder=RunLogWriter(path, run_header(config.engine)))
    header, *lines = path.read_text().splitlines()
    for order, is_equal in ((None, True), ("reuse", False)):
        changed = json.loads(header)
        del changed["config"]["kv"]["eviction"]
        if order is not None:
            changed["config"]["kv"]["eviction"] = order
        other = tmp_path / f"{order}.jsonl"
        other.write_text("\n".join([json.dumps(changed), *lines]) + "\n")
        assert replay(read_run_log(other)).is_equal == is_equal


# -- the flag ------------------------------------------------------------------------------------------------


def options(**given: str) -> SimOptions:
    return SimOptions(trace="fixed:100x10", num_requests=4, rate="4", **given)


def test_orders_are_compared_beside_each_other() -> None:
    runs = plan_runs(options(evictions="lru,reuse,belady"), {})
    assert [run.label for run in runs] == ["lru", "reuse", "belady"]
    assert [run.config.engine.kv.eviction for run in runs] == ["lru", "reuse", "reuse"]
    assert [run.config.clairvoyant for run in runs] == [False, False, True]


def test_one_order_is_no_part_of_a_label_and_modes_multiply() -> None:
    assert [run.label for run in plan_runs(options(evictions="lru"), {})] == ["continuous"]
    runs = plan_runs(options(evictions="lru,reuse", modes="continuous,static"), {})
    assert [run.label for run in runs] == ["continuous lru", "continuous reuse", "static lru", "static reuse"]
    assert [run.mode for run in runs] == ["continuous", "continuous", "static", "static"]


def test_unknown_orders_and_logs_of_the_clairvoyant_one_are_refused() -> None:
    with pytest.raises(InputError, match="--eviction 'arc' is not known; the orders are reuse, lru, belady"):
        plan_runs(options(evictions="lru,arc"), {})
    with pytest.raises(InputError, match="cannot be replayed"):
        plan_runs(options(evictions="belady", log="run.jsonl"), {})
    with pytest.raises(InputError, match="one eviction order"):
        plan_runs(options(evictions="lru,reuse", log="run.jsonl"), {})
