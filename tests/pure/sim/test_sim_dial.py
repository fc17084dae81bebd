"""A target held in the simulator, and a run with a dial that is moved and turned, replayed byte for byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.config.engine import EngineConfig
from paceline.core.dial import OFF, DialKind, DialSetting
from paceline.core.recorder import StepRecorder
from paceline.core.sampling import SamplingParams
from paceline.costs.presets import device_spec, model_shape
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim import Machine, SimConfig, engine_config, simulate
from paceline.lab.sim.replayer import replay
from paceline.lab.workload import load_workload
from tests.traffic import engine_with_log, lines_of, run_until_idle, small_config

pytestmark = pytest.mark.slow

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
