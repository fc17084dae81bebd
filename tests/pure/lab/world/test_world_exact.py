"""The exact side of the comparison: a rack dies and every request still ends, once, with all its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.costs.presets import device_spec, model_shape
from paceline.lab.report.run_record import FINISHED
from paceline.lab.sim import Machine
from paceline.lab.world.curve import ReplicaMix
from paceline.lab.world.exact import RackDies, Scenario, of_exact, of_flows
from tests.pure.lab.world.world_helpers import CURVE

MIX = ReplicaMix(
    machine=Machine.of(model_shape("llama-3.1-8b"), device_spec("h200")), trace="fixed:100x80", engine={}
)
SMALL = Scenario(replicas=3, dead=1, seconds=3.0, burst_s=(1.0, 2.0), dies_s=2.0, token_slo_s=1.0)


def test_what_the_dead_had_begun_ends_elsewhere() -> None:
    workload = replace(MIX.load(60, 1.0), arrival_s=np.linspace(0.0, 3.0, 60))
    simulation = RackDies(MIX.config(workload, 3), workload, scenario=SMALL)
    simulation.run()
    record = simulation.record("small")
    assert (record.outcome == FINISHED).all() and (record.output_len == 80).all()
    assert record.step_end_s[record.step_replica == 0].max() < 2.2
    crossed = (record.first_token_s < 2.0) & (record.finished_s > 2.0)
    assert crossed.any()


@pytest.mark.slow
def test_both_sides_have_the_same_figures() -> None:
    seen, flows = of_exact(MIX, CURVE, SMALL), of_flows(CURVE, SMALL)
    expected = 3 * CURVE.rate * SMALL.load * (3.0 + 0.5) / 3.0
    assert abs(seen.goodput_per_s / expected - 1.0) < 0.3
    assert abs(flows.goodput_per_s / expected - 1.0) < 0.05
