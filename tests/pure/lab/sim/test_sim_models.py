"""Several models on one simulated device: the conductor of a server, on virtual time."""

import numpy as np
import pytest

from paceline.cli.sim.run import parse_models
from paceline.errors import InputError
from paceline.lab.report.run_record import FINISHED
from paceline.lab.sim import run
from paceline.lab.sim.run import SharedDevice, simulate
from tests.pure.lab.sim.sim_helpers import make_workload, random_workload, sim_config, small_engine


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.8, 0.2), (1.0, 2.0)])
def test_two_floods_get_their_shares_of_the_device(shares: tuple[float, float]) -> None:
    count = 400
    workload = make_workload(
        [0.0] * count, prompt=30, output=20, tenant=[index % 2 for index in range(count)]
    )
    models = tuple(zip("ab", shares, strict=True))
    config = sim_config(small_engine(num_blocks=256), num_replicas=2, models=models, check=True)
    simulation = SharedDevice(config, workload)
    for index in range(count):
        simulation._arrive(index, 0.0)
    simulation._advance(3.0)  # long before either has done all its work
    spent = np.array([seat.device_s for seat in simulation.conductor.seats])
    assert spent.sum() == pytest.approx(3.0, abs=0.1), "the device is never idle"
    assert spent / spent.sum() == pytest.approx(np.array(shares) / sum(shares), abs=0.02)


def test_a_light_model_beside_a_flood_waits_for_a_step_and_not_for_its_queue() -> None:
    flood, light = [0.0] * 300, [0.5, 1.0, 1.5, 2.0, 2.5]
    order = sorted([(time_s, 0) for time_s in flood] + [(time_s, 1) for time_s in light])
    tenant = [number for _, number in order]
    workload = make_workload([time_s for time_s, _ in order], prompt=30, output=8, tenant=tenant)
    record = simulate(sim_config(num_replicas=2, models=(("a", 1.0), ("b", 1.0)), check=True), workload)
    first_s = (record.first_token_s - record.arrival_s)[np.array(tenant) == 1]
    step_s = 0.01 + 0.0001 * 64
    assert first_s.max() < 4 * step_s
    assert (record.outcome == FINISHED).all()


def test_a_run_is_the_same_every_time_and_one_model_is_as_alone() -> None:
    workload = random_workload(80, 3, tenants=3)
    engine = small_engine(num_blocks=640)
    config = sim_config(engine, num_replicas=3, models=(("a", 1.0), ("b", 3.0), ("c", 0.5)), check=True)
    first, second = (simulate(config, workload) for _ in range(2))
    assert np.array_equal(first.finished_s, second.finished_s) and (first.outcome == FINISHED).all()
    assert first.config["device_s"] == second.config["device_s"]
    alone = simulate(sim_config(small_engine(depth=0)), workload)
    shared = simulate(sim_config(small_engine(depth=0), models=(("a", 1.0),)), workload)
    assert np.array_equal(alone.finished_s, shared.finished_s)


@pytest.mark.parametrize("text", ["a", "a:0", "a:x", ":1", "a:1,a:2", "a:nan", "a:1,,b:1"])
def test_models_that_are_not_understood(text: str) -> None:
    with pytest.raises(InputError, match="--models"):
        parse_models(text)
    assert parse_models("") == () and parse_models("a:1,b:c:2") == (("a", 1.0), ("b:c", 2.0))


def test_blocks_go_to_the_model_that_has_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other the models need more than half of the blocks."""
    peaks = sorted((20.0 * model + 0.001 * index, model) for model in range(2) for index in range(40))
    tenant = [model for _, model in peaks]
    workload = make_workload([time_s for time_s, _ in peaks], prompt=40, output=40, tenant=tenant)
    engine = small_engine(num_blocks=96, max_model_len=96)
    config = sim_config(engine, num_replicas=2, models=(("a", 1.0), ("b", 1.0)), check=True)
    worst_s = []
    for slabs in (
        run.SHARED_SLABS,
        1,
    ):  # of one slab, no model could have a part: the pool is cut by the shares
        monkeypatch.setattr(run, "SHARED_SLABS", slabs)
        simulation = SharedDevice(config, workload)
        simulation.run()
        record = simulation.record("peaks")
        assert (record.outcome == FINISHED).all()
        assert (simulation.trade is None) == (slabs == 1)
        assert simulation.trade is None or simulation.trade.num_reclaimed > 10
        worst_s.append((record.first_token_s - record.arrival_s).max())
    assert worst_s[0] < 0.8 * worst_s[1]
