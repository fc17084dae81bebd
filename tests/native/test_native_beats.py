"""A step shows that it goes on, and a step that hangs does not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from paceline.core.standing import Pulse
from paceline.runner.device_rows import DeviceRows
from paceline.runner.native.step import NativeStep, PhaseBeats
from tests.bits import Circumstances
from tests.kernels import host_code
from tests.native.random_steps import LONGEST, model
from tests.native.runs import step_threads
from tests.native.test_native_plans import batch

PROJECT = Path(__file__).parents[2]
LOOK_S = 0.002
PATIENCE_S = 10.0


@dataclass
class Heard:
    """Listens to a pulse, and says how far the phases are."""

    beats: int = 0
    phase: int = 0
    pulse: Pulse = field(default_factory=Pulse)

    def on_beat(self) -> None:
        self.beats += 1

    def listen(self) -> None:
        self.pulse.on_beat = self.on_beat


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def beats(heard: Heard) -> Iterator[PhaseBeats]:
    made = PhaseBeats(heard.pulse, lambda: heard.phase, LOOK_S)
    yield made
    made.close()


def test_a_long_step_beats_as_long_as_its_phases_end(heard: Heard, beats: PhaseBeats) -> None:
    heard.listen()
    with beats:
        deadline_s = time.monotonic() + PATIENCE_S
        while heard.beats < 5 and time.monotonic() < deadline_s:
            heard.phase += 1
            time.sleep(LOOK_S)
    assert heard.beats >= 5


def test_a_step_that_hangs_does_not_beat(heard: Heard, beats: PhaseBeats) -> None:
    heard.listen()
    with beats:
        time.sleep(LOOK_S)
        heard.phase += 1
        time.sleep(50 * LOOK_S)
    assert heard.beats <= 1


def test_between_steps_there_is_no_beat(heard: Heard, beats: PhaseBeats) -> None:
    """The thread that computes speaks for itself then, over the same socket."""
    heard.listen()
    with beats:
        pass
    before = heard.beats
    for _ in range(20):
        heard.phase += 1
        time.sleep(LOOK_S)
    assert heard.beats == before


def test_a_beat_that_is_under_way_ends_before_the_step_does(heard: Heard, beats: PhaseBeats) -> None:
    ended: list[bool] = []
    started = threading.Event()

    def slow() -> None:
        started.set()
        time.sleep(0.1)
        ended.append(True)

    heard.pulse.on_beat = slow
    with beats:
        while not started.wait(LOOK_S):
            heard.phase += 1
    assert ended


def test_without_a_listener_there_is_no_thread(beats: PhaseBeats) -> None:
    before = step_threads()
    with beats:
        assert step_threads() == before


def test_a_native_step_beats_and_ends_its_thread_with_itself(heard: Heard) -> None:
    heard.listen()
    config = Circumstances().config(model("a window").spec, LONGEST, 6)
    before = step_threads()
    step = NativeStep(model("a window"), config, host_code(), 2, pulse=heard.pulse, look_s=LOOK_S)
    deadline_s = time.monotonic() + PATIENCE_S
    while not heard.beats and time.monotonic() < deadline_s:
        step.forward(DeviceRows(config), batch(), np.arange(1))
    assert heard.beats
    del step
    assert step_threads() == before


HANGING = """
    import os, threading, time
    from paceline.core.standing import Pulse
    from paceline.runner.native.step import PhaseBeats
    from paceline.runner.native.team import Parameters, Team
    from tests.kernels import host_code

    parameters, beats, pulse = Parameters(), [], Pulse()
    team = Team(host_code(), parameters, 2)
    team.close()
    parameters.set(threads=2)  # the second has gone
    pulse.on_beat = lambda: beats.append(1)

    def judge():
        time.sleep(1.0)
        print(len(beats), parameters.get("phase"), flush=True)
        os._exit(0)

    threading.Thread(target=judge).start()
    with PhaseBeats(pulse, lambda: parameters.get("phase"), 0.01):
        host_code().enter(0, parameters.address)
    print("it ended")
"""


def test_a_native_step_that_hangs_does_not_beat() -> None:
    """One thread waits at the first meeting for another that does not exist."""
    command = [sys.executable, "-c", textwrap.dedent(HANGING)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["0", "0"], done.stderr
