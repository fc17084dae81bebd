"""Adapters in the simulator: the real scheduler decides which are in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.core.clock import ManualClock
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.sim.replica import TimedReads, draw_of_requests
from paceline.lab.sim.run import Simulation
from paceline.lab.workload.workload import Workload
from tests.fake_adapters import read


def workload(count: int = 150) -> Workload:
    arrival_s = np.arange(count, dtype=np.float64) * 0.01
    return Workload.of_one_tenant(
        "adapters", arrival_s, np.full(count, 200, np.int32), np.full(count, 30, np.int32)
    )


def config(adapters: int, places: int, read_s: float = 0.05) -> SimConfig:
    machine = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
    engine = engine_config(machine, workload(), {"max_loras": places})
    return SimConfig(machine=machine, engine=engine, num_adapters=adapters, adapter_read_s=read_s, check=True)


def test_popular_adapters_are_drawn_more_often() -> None:
    drawn = draw_of_requests(10, 4000, seed=1)
    counts = np.bincount(drawn, minlength=11)
    assert counts[0] == 0 and counts[1] > 1.6 * counts[2] > 1.6 * counts[4] > 0
    assert np.array_equal(drawn, draw_of_requests(10, 4000, seed=1))
    assert not draw_of_requests(0, 5, seed=1).any()


def test_folders_are_read_one_after_the_other() -> None:
    clock = ManualClock()
    reads = TimedReads(clock, 0.5)
    for number in (3, 4):
        reads.start(number, lambda: read(Path("7")))
    assert reads.done() == [] and reads.next_s == 0.5
    clock.advance(0.6)
    assert [number for number, _ in reads.done()] == [3] and reads.next_s == 1.0
    clock.advance(0.5)
    assert [number for number, _ in reads.done()] == [4] and reads.next_s is None


def test_fewer_places_than_adapters_cost_time_and_every_request_ends() -> None:
    runs = {places: Simulation(config(20, places), workload()) for places in (0, 4)}
    for run in runs.values():
        run.run()
    roomy, tight = (run.replicas[0].engine.scheduler.state for run in runs.values())
    assert roomy.adapters.read == 0 and tight.adapters.read > 20
    assert tight.counters.finished == roomy.counters.finished == 150
    assert runs[4].now_s > runs[0].now_s


def test_a_run_is_the_same_again_and_names_its_adapters() -> None:
    one, other = (simulate(config(8, 3), workload(60)) for _ in range(2))
    assert one.config["adapters"] == 8 and one.config["adapter_read_s"] == pytest.approx(0.05)
    assert np.array_equal(one.first_token_s, other.first_token_s)
