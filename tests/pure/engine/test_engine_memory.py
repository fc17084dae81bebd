"""E3: a step that runs out of memory is computed again with half as many rows, and nobody fails."""

from __future__ import annotations

from pathlib import Path

from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.plan import StepPlan
from paceline.core.recorder import StepRecorder
from paceline.core.request import FinishReason, RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.factory import build_engine
from paceline.lab.sim.replayer import replay
from tests.fakes import FakeRunner

CONFIG = EngineConfig(
    kv=KVConfig(block_size=4, num_blocks=200),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64),
    depth=1,
)


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


class SmallDevice(FakeRunner):
    """Has memory for so many rows in one step."""

    most_rows = 2

    def submit(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        if plan.work.decode_rows + len(plan.spans.row) > self.most_rows:
            raise OutOfMemoryError("no memory for so many rows")
        return super().submit(plan)


def make(clock: ManualClock, recorder: StepRecorder | None = None) -> tuple[Engine, SmallDevice]:
    runner = SmallDevice(CONFIG)
    return build_engine(CONFIG, runner, clock=clock, recorder=recorder), runner


def drain(engine: Engine, clock: ManualClock) -> dict[RequestId, FinishReason]:
    endings = {}
    for _ in range(400):
        for ending in engine.step_overlapped().finished:
            endings[ending.request] = ending.reason
        clock.advance(0.01)
        if not engine.has_requests and engine.is_idle:
            return endings
    raise AssertionError("it never ends")


def test_nobody_fails_and_the_rows_come_back() -> None:
    clock = ManualClock()
    engine, runner = make(clock)
    params = SamplingParams(max_tokens=6, temperature=0.0, seed=1, ignore_eos=True)
    for number in range(8):
        engine.add([number + 1, 2, 3], params)
    endings = drain(engine, clock)
    assert set(endings.values()) == {FinishReason.LENGTH} and len(endings) == 8
    state = engine.scheduler.state
    assert state.most_rows == 2 and state.counters.failed_steps == 2
    clock.advance(61.0)
    runner.most_rows = 8
    engine.add([9, 9], params)
    drain(engine, clock)
    assert state.most_rows == 8


def test_who_does_not_fit_alone_fails_alone() -> None:
    clock = ManualClock()
    engine, runner = make(clock)
    runner.most_rows = 0
    params = SamplingParams(max_tokens=4, temperature=0.0, seed=1, ignore_eos=True)
    engine.add([1, 2, 3], params)
    assert list(drain(engine, clock).values()) == [FinishReason.ERROR]
    runner.most_rows = 1
    engine.add([1, 2, 3], params)
    assert list(drain(engine, clock).values()) == [FinishReason.LENGTH]


def test_a_recorded_run_replays(tmp_path: Path) -> None:
    clock, path = ManualClock(), tmp_path / "run.jsonl"
    engine, _ = make(clock, RunLogWriter(path, run_header(CONFIG, seed=0)))
    for number in range(6):
        engine.add([number + 1, 2], SamplingParams(max_tokens=5, temperature=0.0, seed=1, ignore_eos=True))
    drain(engine, clock)
    engine.close()
    report = replay(read_run_log(path), output=tmp_path / "again.jsonl")
    assert report.is_equal and report.complete, report.difference
