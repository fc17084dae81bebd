"""A simulated engine that keeps a pace or a target: its steps last as long as they should, and its log replays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.audit.codec import config_of, plain
from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.config.engine import EngineConfig
from paceline.core.dial import OFF, DialKind, DialSetting
from paceline.core.recorder import StepRecorder
from paceline.core.sampling import SamplingParams
from paceline.costs.presets import device_spec, model_shape
from paceline.costs.roofline import step_costs
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload import load_workload
from paceline.lab.workload.workload import Workload
from tests.pure.lab.sim.sim_helpers import machine, make_workload
from tests.traffic import engine_with_log, lines_of, run_until_idle, small_config

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


# ----------------------------------------------------------------
# A target held in the simulator, and a run with a dial that is moved and turned, replayed byte for byte.


MACHINE = Machine.of(model_shape("llama-3.1-8b"), device_spec("h200"))
WORKLOAD = load_workload("azure-conv", num_requests=300, seed=3, rate=14.0)


def config(*, knows_costs: bool, **options: object) -> EngineConfig:
    made = engine_config(MACHINE, WORKLOAD, {"max_num_seqs": 256, "max_num_batched_tokens": 2048, **options})
    if knows_costs:
        assert made.scheduler.step_costs is not None
        return made
    return replace(made, scheduler=replace(made.scheduler, step_costs=None))


def run(engine: EngineConfig, recorder: StepRecorder | None = None) -> RunRecord:
    return simulate(SimConfig(machine=MACHINE, engine=engine), WORKLOAD, recorder=recorder)


@pytest.mark.parametrize("knows_costs", [True, False])
def test_a_target_is_held_with_and_without_step_costs(knows_costs: bool, tmp_path: Path) -> None:
    engine = config(knows_costs=knows_costs, target_itl_p99_ms=25.0)
    path = tmp_path / "run.jsonl"
    record = run(engine, RunLogWriter(path, run_header(engine, seed=0)))
    late = np.sort(record.itl_s[np.isfinite(record.itl_s)][len(record.itl_s) // 3 :])
    assert late[int(0.99 * len(late))] == pytest.approx(0.025, rel=0.15)
    kinds = Counter(entry[0] for line in lines_of(path)[1:] for entry in line["decisions"])
    assert knows_costs or kinds["dial"] >= 2  # it began with steps of 50 ms
    assert replay(read_run_log(path), output=tmp_path / "again.jsonl").is_equal
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_turning_up_gives_throughput_and_turning_down_shorter_gaps() -> None:
    crowd = replace(WORKLOAD, arrival_s=np.zeros(len(WORKLOAD)))
    records = []
    for position in (0.3, 1.0):
        sim = SimConfig(machine=MACHINE, engine=config(knows_costs=True, dial=position))
        records.append(simulate(sim, crowd))
    low, high = records
    assert np.nanpercentile(low.itl_s, 99) < 0.6 * np.nanpercentile(high.itl_s, 99)
    assert high.duration_s < 0.95 * low.duration_s


def test_turns_of_an_operator_replay_byte_for_byte(tmp_path: Path) -> None:
    engine = engine_with_log(small_config(depth=1), tmp_path / "run.jsonl")
    turns = {
        3: DialSetting(kind=DialKind.POSITION, value=0.0),
        9: DialSetting(kind=DialKind.ITL, value=5.0),
        15: DialSetting(kind=DialKind.TTFT, value=50.0),
        20: OFF,
    }
    for number in range(30):
        if number in turns:
            engine.scheduler.set_dial(turns[number])
        if number % 2:
            engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=4))
        engine.step_overlapped()
    run_until_idle(engine)
    inputs = [entry for line in lines_of(tmp_path / "run.jsonl")[1:] for entry in line["inputs"]]
    assert [entry[2:] for entry in inputs if entry[0] == "dial"] == [
        ["position", 0.0],
        ["itl_p99_ms", 5.0],
        ["ttft_p99_ms", 50.0],
        ["off", 0.0],
    ]
    assert replay(read_run_log(tmp_path / "run.jsonl"), output=tmp_path / "again.jsonl").is_equal
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "run.jsonl").read_bytes()
