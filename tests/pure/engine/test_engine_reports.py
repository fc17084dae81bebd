"""What an engine says of itself, by which fronts choose: tokens that wait and run, and how fast it is."""

import math

import pytest

from paceline.engine.reports import gauges_of
from paceline.lab.sim.run import Simulation
from paceline.routing.view import Gauges
from tests.pure.lab.sim.sim_helpers import PerToken, make_workload, sim_config, small_engine

BEFORE = Gauges(prefill_per_s=7.0, decode_s=8.0, row_s=9.0)


def test_tokens_are_those_that_wait_and_those_that_rows_hold() -> None:
    # Steps of 64 tokens; five prompts of 40 come at once, and the simulation stops after one step.
    simulation = Simulation(
        sim_config(small_engine(depth=0), PerToken(1.0, 0.0)), make_workload([0.0] * 5, prompt=40)
    )
    for index in range(5):
        simulation._arrive(index, 0.0)
    simulation._advance(0.5)
    scheduler = simulation.replicas[0].engine.scheduler
    gauges = gauges_of(scheduler, BEFORE)
    assert gauges.waiting_tokens + gauges.running_tokens == 5 * 40 and gauges.running_tokens == 64
    assert gauges.rows == 5 and gauges.free_blocks == scheduler.state.kv.free_for()
    assert gauges[4:] == BEFORE[4:], "no step has run yet: speeds are what was said before"


def test_speeds_are_those_of_steps_that_have_run() -> None:
    cost = PerToken(fixed=0.01, per_token=0.001)
    simulation = Simulation(
        sim_config(small_engine(depth=0), cost), make_workload([0.1 * at for at in range(60)], output=20)
    )
    simulation.run()
    gauges = gauges_of(simulation.replicas[0].engine.scheduler, BEFORE)
    assert gauges[:3] == (0, 0, 0)
    assert gauges.prefill_per_s == pytest.approx(64 / (0.01 + 64 * 0.001), rel=0.1)
    assert gauges.row_s == pytest.approx(0.001, rel=0.2) and math.isfinite(gauges.decode_s)
