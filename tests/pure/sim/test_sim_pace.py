"""A simulated engine that keeps a pace: its steps last as long as they should, and its log replays what it learnt."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.audit.codec import config_of, plain
from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.config.engine import EngineConfig
from paceline.costs.roofline import step_costs
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload.workload import Workload
from tests.pure.sim.sim_helpers import machine, make_workload

pytestmark = pytest.mark.slow

TARGET_MS = 25.0


def busy_workload(count: int = 60, gap_s: float = 0.05) -> Workload:
    random = np.random.default_rng(5)
    return make_workload(
        (gap_s * np.arange(count)).tolist(),
        prompt=random.integers(200, 3000, count).tolist(),
        output=random.integers(20, 60, count).tolist(),
    )


def paced(workload: Workload, of: Machine, **options: object) -> SimConfig:
    given = {"step_target_ms": TARGET_MS, "step_stretch": 1.0, "max_num_batched_tokens": 4096, **options}
    return SimConfig(machine=of, engine=engine_config(of, workload, given), check=True)


def prompt_steps(record: RunRecord) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    seconds: np.ndarray[tuple[int], np.dtype[np.float64]] = record.step_end_s - record.step_start_s
    return seconds[record.step_prefill > 0]


def test_steps_with_prompts_last_about_as_long_as_they_should() -> None:
    workload, of = busy_workload(), machine()
    steps = prompt_steps(simulate(paced(workload, of), workload))
    free = prompt_steps(simulate(paced(workload, of, step_target_ms=0.0), workload))
    assert steps.max() < 1.05e-3 * TARGET_MS < 2e-3 * TARGET_MS < free.max()
    assert np.quantile(steps, 0.75) > 0.8e-3 * TARGET_MS


def test_steps_grow_when_more_comes_than_can_be_computed() -> None:
    workload, of = busy_workload(gap_s=0.01), machine()
    config = paced(workload, of, step_stretch=2.0, step_patience_s=0.1)
    steps = prompt_steps(simulate(config, workload))
    assert 1.8e-3 * TARGET_MS < np.quantile(steps, 0.75) <= steps.max() < 2.06e-3 * TARGET_MS


def with_wrong_costs(config: SimConfig, factor: float) -> SimConfig:
    """The engine believes that steps take `factor` times what they do."""
    right = step_costs(config.machine.cost)
    wrong = replace(
        right,
        seconds=tuple(factor * seconds for seconds in right.seconds),
        context_s=factor * right.context_s,
        product_s=factor * right.product_s,
        row_s=factor * right.row_s,
    )
    scheduler = replace(config.engine.scheduler, step_costs=wrong)
    return replace(config, engine=replace(config.engine, scheduler=scheduler))


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_a_wrong_table_is_corrected_by_the_steps_that_run(factor: float) -> None:
    workload, of = busy_workload(120), machine()
    steps = prompt_steps(simulate(with_wrong_costs(paced(workload, of), factor), workload))
    late = steps[len(steps) // 2 :]
    assert 0.85e-3 * TARGET_MS < np.quantile(late, 0.75) <= late.max() < 1.05e-3 * TARGET_MS


def test_a_log_replays_what_was_learnt(tmp_path: Path) -> None:
    workload, of, path = busy_workload(), machine(), tmp_path / "run.jsonl"
    config = with_wrong_costs(paced(workload, of), 0.8)
    simulate(config, workload, recorder=RunLogWriter(path, run_header(config.engine)))
    report = replay(read_run_log(path), output=tmp_path / "again.jsonl")
    assert report.is_equal and report.complete, report.difference
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_a_header_holds_the_costs_of_steps() -> None:
    config: EngineConfig = paced(busy_workload(3), machine()).engine
    assert config.scheduler.keeps_pace and config_of(plain(config)) == config
    assert paced(busy_workload(3), machine(), step_target_ms=0.0).engine.scheduler.step_costs is None
