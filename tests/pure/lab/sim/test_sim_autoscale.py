"""Replicas that start and stop: when, in what time, and what it costs; nothing is lost on the way."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from paceline.cli.sim.flags import SimOptions
from paceline.cli.sim.run import plan_runs
from paceline.errors import InputError
from paceline.lab.report.run_record import OUTCOMES, RunRecord
from paceline.lab.report.summary import summarize
from paceline.lab.sim.run import Simulation
from paceline.lab.sim.settings import Scaling, SimConfig
from paceline.lab.workload.workload import Workload
from paceline.routing.view import EngineState
from tests.pure.lab.sim.sim_helpers import PerToken, make_workload, sim_config, small_engine

pytestmark = pytest.mark.slow
SLOW_STEPS = PerToken(fixed=0.2, per_token=0.004)  # one replica serves about 1.3 requests a second


def bursty(seconds: int = 300) -> Workload:
    """Quiet, but for four times as much in the middle third."""
    arrival_s: list[float] = []
    for second in range(seconds):
        count = 4 if seconds // 3 <= second < 2 * seconds // 3 else 1
        arrival_s += [second + at / count for at in range(count)]
    return make_workload(arrival_s, prompt=40, output=10)


def config_of(rule: str, **more: Any) -> SimConfig:
    scaling = Scaling(rule=rule, start_s=15.0, ttft_s=5.0, itl_s=1.0)
    return sim_config(small_engine(), SLOW_STEPS, num_replicas=6, scaling=scaling, **more)


def run(config: SimConfig, workload: Workload) -> tuple[Simulation, RunRecord]:
    simulation = Simulation(config, workload)
    simulation.run()
    return simulation, simulation.record("run")


@cache
def of_bursts(rule: str) -> RunRecord:
    return run(config_of(rule), bursty())[1]


def changes(record: RunRecord) -> list[tuple[float, int, str]]:
    found: Any = record.config["changes"]
    return list(found)


@pytest.mark.parametrize("rule", ["wanted", "keda"])
def test_replicas_come_with_the_load_and_everything_is_served(rule: str) -> None:
    record = of_bursts(rule)
    assert (record.outcome == OUTCOMES.index("finished")).all(), "a replica that stops ends what it has"
    assert max(count for _, count, _ in changes(record)) >= 3
    last_s = float(record.arrival_s.max())
    assert record.replica_s is not None and last_s < record.replica_s < 6 * last_s
    assert summarize(record, device_hour_price=3600.0).cost_per_million_tokens == pytest.approx(
        record.replica_s * 1e6 / summarize(record).useful_tokens
    )


def test_after_a_burst_replicas_go_one_by_one() -> None:
    found = changes(of_bursts("wanted"))
    counts = [1, *(count for _, count, _ in found)]
    downs = [before - after for before, after in pairwise(counts) if after < before]
    assert downs and set(downs) == {1} and max(np.diff(counts)) > 1, "up at once"


def test_wanted_misses_less_than_the_usual_rule() -> None:
    late = {rule: summarize(of_bursts(rule)).ttft_s.mean or 0.0 for rule in ("wanted", "keda")}
    assert late["wanted"] < 0.9 * late["keda"]


def test_a_replica_gets_requests_only_when_its_start_is_over() -> None:
    record = of_bursts("wanted")
    at_s, count, _ = changes(record)[0]
    assert count > 1
    assert record.step_start_s[record.step_replica > 0].min() >= at_s + 15.0


def test_a_replica_that_comes_again_has_forgotten_its_prefixes() -> None:
    ids = [(1, 2)] * 40
    workload = make_workload([0.5 * at for at in range(40)], prompt=40, output=4, prefix_ids=ids)
    simulation, _ = run(config_of("keda", router="round-robin"), workload)
    assert simulation.front is not None and simulation.front.scaler is not None
    front, scaler = simulation.front, simulation.front.scaler
    assert front.view.prefixes.held(0)
    scaler._stop()
    assert front.view.state[0] == EngineState.DRAINING
    scaler.pass_time(100.0)
    assert front.view.state[0] == EngineState.ABSENT and not front.view.prefixes.held(0)
    scaler._start(100.0)
    scaler.pass_time(116.0)
    front.hear(120.0, lambda until_s: None)
    assert front.view.state[0] == EngineState.READY and not front.view.prefixes.held(0)


def test_the_same_run_twice_is_the_same() -> None:
    one, other = of_bursts("wanted"), run(config_of("wanted"), bursty())[1]
    np.testing.assert_array_equal(one.finished_s, other.finished_s)
    assert one.config["changes"] == other.config["changes"]


def test_options_and_their_mistakes() -> None:
    options = SimOptions(
        trace="fixed:10x10", num_requests=4, replicas=4, autoscale="wanted", slo="ttft=1", start_s=9.0
    )
    (planned,) = plan_runs(options, {})
    assert planned.config.scaling == Scaling(rule="wanted", least=1, start_s=9.0, ttft_s=1.0)
    with pytest.raises(InputError, match="fewer --min-replicas"):
        plan_runs(replace(options, min_replicas=4), {})
    with pytest.raises(InputError, match="wanted, keda"):
        Scaling(rule="more")
