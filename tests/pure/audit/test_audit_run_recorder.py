"""The run log of an engine that serves: written beside the steps, bounded, and there after a crash."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import cast

import pytest

from paceline.audit.run_recorder import RunRecorder, check_run_log, keep_earlier
from paceline.audit.runlog import read_run_log, run_header
from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.inputs import Done, Idle
from paceline.core.plan import StepPlan
from paceline.core.recorder import StepRecord
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.errors import InputError
from paceline.factory import build_engine
from paceline.lab.sim.replayer import replay
from tests.fakes import FakeRunner
from tests.waiting import wait_until

HEADER = {"seed": 1}
LIMITS = {"max_bytes": 1 << 20, "max_files": 2}


def record(seq: int) -> StepRecord:
    plan = StepPlan(seq=seq)
    return StepRecord(t_plan=1.0, t_done=1.0, inputs=[(1.0, Idle())], plan=plan, result=None, decisions=())


def engine_with(path: Path, **more: object) -> Engine:
    config = EngineConfig(
        kv=KVConfig(block_size=4, num_blocks=20),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64),
        run_log=str(path),
        **more,  # type: ignore[arg-type]
    )
    return build_engine(config, FakeRunner(config), clock=ManualClock(1.0))


def run(engine: Engine, count: int) -> None:
    for number in range(count):
        engine.add([number, 2, 3, 4, 5], SamplingParams(max_tokens=8, ignore_eos=True))
        engine.step_overlapped()
    while engine.has_requests:
        engine.step_overlapped()


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_a_config_with_a_run_log_writes_one_that_replays(tmp_path: Path, name: str) -> None:
    engine = engine_with(tmp_path / name)
    run(engine, 6)
    engine.close()
    log = read_run_log(tmp_path / name)
    report = replay(log)
    assert report.is_equal and report.complete and report.num_steps == engine.num_submitted
    assert log.config.run_log == str(tmp_path / name)


def test_what_was_written_is_there_while_the_engine_runs(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    recorder = RunRecorder(path, HEADER, interval_s=0.01, **LIMITS)
    for seq in (1, 2, 3):
        recorder.step(record(seq))
    log = read_run_log(path, allow_cut=True)
    wait_until(lambda: len(list(log)) == 3)
    assert log.damage is not None and log.is_unfinished  # the compressed stream has no end yet
    recorder.close([], ())
    assert len(list(read_run_log(path))) == 3
    recorder.close([], ())  # does nothing


def test_a_log_ends_at_its_largest_size_and_the_engine_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    recorder = RunRecorder(path, HEADER, interval_s=0.01, max_bytes=2_000, max_files=0)
    for seq in range(1, 401):
        recorder.step(record(seq))
        time.sleep(0.0005)
    recorder.close([], ())
    log = read_run_log(path)
    assert 0 < len(list(log)) < 400 and log.end is None
    assert "ends here: it has reached 2,000 bytes" in caplog.text


def test_a_log_that_falls_behind_ends_without_a_gap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    recorder = RunRecorder(path, HEADER, interval_s=60.0, most_waiting=5, **LIMITS)
    for seq in range(1, 20):
        recorder.step(record(seq))
    recorder.close([], ())
    log = read_run_log(path)
    assert [step.seq for step in log] in ([], [1, 2, 3, 4, 5]) and log.end is None
    assert "5 steps behind" in caplog.text


def test_a_full_disk_fails_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("there is no /dev/full")
    path = tmp_path / "run.jsonl"
    path.symlink_to(full)
    recorder = RunRecorder(path, HEADER, interval_s=0.01, max_bytes=1 << 20, max_files=0)
    for seq in (1, 2, 3):
        recorder.step(record(seq))
    recorder.close([], ())
    assert "No space left" in caplog.text


def test_a_step_that_cannot_be_written_ends_the_log_and_no_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = RunRecorder(tmp_path / "run.jsonl", HEADER, interval_s=0.01, **LIMITS)
    bad = StepRecord(
        t_plan=1.0,
        t_done=1.0,
        inputs=[(1.0, Done(seq=cast(int, object())))],
        plan=StepPlan(seq=1),
        result=None,
        decisions=(),
    )
    recorder.step(bad)
    wait_until(lambda: "could not be written" in caplog.text)
    recorder.step(record(2))
    recorder.close([], ())
    assert list(read_run_log(tmp_path / "run.jsonl")) == []


def test_logs_of_earlier_runs_are_kept_under_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    for run_number in range(4):
        RunRecorder(path, {"seed": run_number}, **LIMITS).close([], ())
    seeds = {
        each.name: json.loads(gzip.open(each, "rt").readline())["seed"]  # noqa: SIM115
        for each in tmp_path.iterdir()
    }
    assert seeds == {"run.jsonl.gz": 3, "run.jsonl.gz.1": 2, "run.jsonl.gz.2": 1}
    keep_earlier(path, 0)
    assert path.exists()  # and is written over


def test_a_place_where_nothing_can_be_written_is_told_before_anything_else(tmp_path: Path) -> None:
    check_run_log(str(tmp_path / "run.jsonl"))
    with pytest.raises(InputError, match="make it first"):
        check_run_log(str(tmp_path / "nowhere" / "run.jsonl"))
    with pytest.raises(InputError, match="name a file in it"):
        check_run_log(str(tmp_path))
    with pytest.raises(InputError, match="cannot write run log"):
        RunRecorder(tmp_path / "nowhere" / "run.jsonl", run_header(EngineConfig()), **LIMITS)
