"""The threads of a step: started, ended, missing, left behind by a fork, and interrupted."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline import LLM, SamplingParams
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.machine_load import FreeCores, MachineLoad
from paceline.runner.native import team as team_module
from paceline.runner.native.layout import LINE, PHASES, SEMAPHORE, SYNC_BYTES, Y_ASLEEP
from paceline.runner.native.model import build_model
from paceline.runner.native.step import TIMED_EVERY, NativeStep
from paceline.runner.native.team import JOIN_S, StepInterrupted
from tests.bits import Changing, Circumstances
from tests.kernels import host_code
from tests.model_folder import write_model
from tests.native.random_steps import LONGEST, VOCAB, model, tiny
from tests.native.runs import step_threads
from tests.native.test_native_plans import batch
from tests.quantized_helpers import QuantizedSource
from tests.waiting import wait_until

KIND = "a window"
CONFIG = Circumstances().config(model(KIND).spec, LONGEST, 6)


def make(threads: int) -> NativeStep:
    return NativeStep(model(KIND), CONFIG, host_code(), threads)


def compute(step: NativeStep) -> bytes:
    assert step.forward(DeviceRows(CONFIG), batch(), np.arange(1)).all()
    return step.logits(np.arange(1)).tobytes()


@pytest.fixture
def step() -> Iterator[NativeStep]:
    made = make(3)
    yield made
    made.close()


def interrupt(step: NativeStep, phase: int) -> None:
    """Send the signal once a step has ended a phase."""
    while step.memory.parameters.get("phase") == phase:
        time.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)


def test_time_in_phases_only_grows_and_is_the_time_in_steps(step: NativeStep) -> None:
    """As a counter of Prometheus has to, however prompts fall into the steps that are timed."""
    before: dict[str, float] = {}
    spent_s = 0.0
    for number in range(5 * TIMED_EVERY):
        began_s = time.perf_counter()
        compute(step)
        spent_s += time.perf_counter() - began_s
        if number % 3 == 0:
            now = step.work().phase_s
            assert all(now[phase] >= spent for phase, spent in before.items())
            before = now
    work = step.work()
    assert before.keys() == set(PHASES)
    assert 0 < sum(before.values()) <= work.threads * work.call_s
    assert work.call_s <= spent_s


def test_threads_sleep_at_meetings_while_others_use_the_cores() -> None:
    """The numbers are the same, and no thread is left asleep."""
    alone = make(1)
    step = NativeStep(model(KIND), CONFIG, host_code(), 8, Changing((8,)))
    try:
        expected, slept = compute(alone), []
        for _ in range(200):
            assert compute(step) == expected
            slept.append(step.memory.parameters.get("sleeps"))
        assert slept == [1, 0] * 100
    finally:
        step.close()
        alone.close()


class Taken(FreeCores):
    """Cores of which others use a part all the time."""

    def refresh(self, tokens: int = 1) -> int:
        self.count = 0
        return self.most


def wake_ups(step: NativeStep) -> list[int]:
    """Of the two lines of meetings: wake-ups that no thread waits for, less those that the next ones will take."""
    libc, found = ctypes.CDLL(None), []
    for line in range(Y_ASLEEP, SYNC_BYTES, LINE):
        value, at = ctypes.c_int(), step.memory.parameters.get("sync") + line
        libc.sem_getvalue(ctypes.c_void_p(at + SEMAPHORE), ctypes.byref(value))
        found.append(value.value + ctypes.c_int64.from_address(at).value)
    return found


def test_threads_that_do_not_come_to_sleep_leave_no_wake_ups_behind() -> None:
    """They would add up, and every sleep and every meeting would take longer than the one before."""
    step = NativeStep(model(KIND), CONFIG, host_code(), 32, Taken(MachineLoad(), 32))
    try:
        for _ in range(800):
            compute(step)
        wait_until(lambda: not any(wake_ups(step)), 5.0)  # threads are on their way out of the last meeting
    finally:
        step.close()


def test_a_step_with_fewer_threads_waits_for_one_that_is_late() -> None:
    """A thread that has not left the last step's last meeting could lose its wake-up to one of the next."""
    step = NativeStep(model(KIND), CONFIG, host_code(), 2, Changing((2, 2, 1)))
    try:
        expected = compute(step)
        late = step.team._sleeping[LINE // 8 + 2 :]  # of the other thread: whether it is in a step
        assert compute(step) == expected
        while late[0]:
            time.sleep(0)
        late[0] = 1
        found: list[bytes] = []
        computing = threading.Thread(target=lambda: found.append(compute(step)))
        computing.start()
        computing.join(0.3)
        assert computing.is_alive()
        late[0] = 0
        computing.join(10)
        assert found == [expected]
    finally:
        step.close()


@pytest.mark.parametrize("naps_s", [0.0, 0.3])
def test_closing_ends_the_threads_awake_and_asleep(
    step: NativeStep, naps_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    before = step_threads()
    compute(step)
    time.sleep(naps_s)
    started_s = time.monotonic()
    step.close()
    assert time.monotonic() - started_s < 2 * JOIN_S  # each thread is waited for no longer than that
    assert step_threads() == before - 2
    assert not caplog.records
    step.close()


def test_fewer_threads_where_the_system_gives_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "step-2":
            raise RuntimeError("can't start new thread")
        start(thread)

    expected = make(1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with caplog.at_level(logging.WARNING, "paceline"):
        step = make(8)
    try:
        assert [record.getMessage() for record in caplog.records] == [
            "steps run on 2 threads instead of 8: can't start new thread"
        ]
        assert compute(step) == compute(expected)
    finally:
        step.close()
        expected.close()


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_process_is_refused_and_ends(step: NativeStep) -> None:
    """Its threads stayed in the other process: a step would wait for them for ever."""
    before = compute(step)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            compute(step)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            step.close()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == (
            "the threads that compute steps are in another process: load the model after the fork"
        )
    assert os.waitpid(child, 0) == (child, 0)
    assert compute(step) == before


def test_an_interrupt_during_a_step_is_raised_when_that_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is longer than a quarter of a second where sizes are not given; none follows the interrupt."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
    llm = LLM(str(write_model(tmp_path, **sizes)), load_format="dummy", num_blocks=64, cpu_threads=2)
    run, steps = NativeStep.run, 0

    def watched(step: NativeStep, *, timed: bool = False) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            phase = step.memory.parameters.get("phase")
            threading.Thread(target=interrupt, args=(step, phase)).start()
        run(step, timed=timed)

    monkeypatch.setattr(NativeStep, "run", watched)
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a text of some length, " * 2] * 8, sampling, use_tqdm=False)
    assert steps in (3, 4), "steps went on"  # 4: the third had ended before the signal came
    monkeypatch.undo()
    (output,) = llm.generate(["hi"], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


@pytest.fixture
def long_step() -> Iterator[NativeStep]:
    """Computes long enough to be met by a signal."""
    spec = replace(
        tiny(inner=1024),
        hidden_size=512,
        num_heads=8,
        num_layers=6,
        windows=(None,) * 6,
        layer_ropes=(0,) * 6,
    )
    made = NativeStep(build_model(QuantizedSource(spec, "Q4_0"), LONGEST), LONG, host_code(), 2)
    yield made
    made.close()


LONG = Circumstances(budget=LONGEST - 1).config(tiny(), LONGEST, 12)


def prompt() -> tuple[DeviceRows, FlatBatch]:
    """All tokens of row 0 but the last."""
    rows, tokens = DeviceRows(LONG), np.arange(LONGEST - 1)
    rows.tables[0][0, :6] = np.arange(1, 7)
    one = np.zeros(1, np.int64)
    batch = FlatBatch(
        rows=one,
        start=one,
        count=one + len(tokens),
        masked=one > 0,
        tokens=tokens % VOCAB,
        positions=tokens,
        places=tokens,
        lengths=tokens + 1,
        row_of=tokens * 0,
        slots=(tokens + 16,),
    )
    return rows, batch


def compute_often(step: NativeStep, due: NDArray[np.int64]) -> None:
    """A signal may meet the end of a step; it then ends the next one."""
    for _ in range(20):
        step.forward(*prompt(), due)


def test_a_step_that_goes_on_after_an_interrupt_is_ended(
    long_step: NativeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    due = np.arange(LONGEST - 1)
    assert long_step.forward(*prompt(), due).all()
    expected = long_step.logits(due).copy()
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        monkeypatch.setattr(team_module, "PATIENCE_S", 0.0)
        phase = long_step.memory.parameters.get("phase")
        threading.Thread(target=interrupt, args=(long_step, phase)).start()
        with pytest.raises(StepInterrupted):
            compute_often(long_step, due)
    finally:
        signal.signal(signal.SIGINT, before)
    assert long_step.forward(*prompt(), due).all()
    assert np.array_equal(long_step.logits(due), expected)


def test_only_the_step_that_was_met_is_ended(long_step: NativeStep) -> None:
    team = long_step.team
    assert team.running_step() is None
    team.interrupt(1)
    assert long_step.forward(*prompt(), np.arange(1)).all()


def test_a_patient_interrupt_lets_short_steps_end(step: NativeStep) -> None:
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        threading.Thread(target=interrupt, args=(step, step.memory.parameters.get("phase"))).start()
        first = compute(step)
        deadline_s = time.monotonic() + 2 * team_module.PATIENCE_S
        while time.monotonic() < deadline_s:
            assert compute(step) == first
    finally:
        signal.signal(signal.SIGINT, before)
