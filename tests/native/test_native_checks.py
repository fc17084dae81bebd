"""The checking form of the kernels: what it finds, and that it finds nothing in the steps we compute."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.native.checks import GUARD, VARIABLE, MemoryViolation, aligned, guards_hold
from paceline.runner.native.isa import host_isa
from paceline.runner.native.layout import SUB_BLOCK
from paceline.runner.native.step import NativeStep
from tests.bits import Circumstances
from tests.kernels import checked_code, host_code
from tests.native.random_steps import LONGEST, THREADS, model, run_seed

PROJECT = Path(__file__).parents[2]
KIND = "four bits"
NUM_BLOCKS = 4


@pytest.fixture
def step() -> Iterator[NativeStep]:
    config = Circumstances().config(model(KIND).spec, LONGEST, NUM_BLOCKS)
    made = NativeStep(model(KIND), config, checked_code(), 2)
    yield made
    made.close()


def batch(position: int = 3) -> FlatBatch:
    """One token of row 0, whose first block is block 1."""
    one = np.arange(1)
    return FlatBatch(
        rows=one,
        start=one + position,
        count=one + 1,
        masked=one > 0,
        tokens=one + 7,
        positions=one + position,
        places=one + position,
        lengths=one + position + 1,
        row_of=one,
        slots=(one + SUB_BLOCK + position,),
    )


def rows() -> DeviceRows:
    made = DeviceRows(Circumstances().config(model(KIND).spec, LONGEST, NUM_BLOCKS))
    made.tables[0][0, 0] = 1
    return made


def forward(step: NativeStep, given: DeviceRows | None = None) -> None:
    """Compute a token, past what is refused before the call."""
    memory, due = step.memory, np.arange(1)
    memory.load(batch(), (given or rows()).tables, due)
    step.run()


def test_a_step_that_keeps_to_its_memory_passes(step: NativeStep) -> None:
    forward(step)
    assert np.isfinite(step.memory.logits).all()


@pytest.mark.parametrize("block", [NUM_BLOCKS, 1000, -1, 1 << 40])
def test_a_block_that_does_not_exist_is_found(step: NativeStep, block: int) -> None:
    given = rows()
    given.tables[0][0, 0] = block
    with pytest.raises(MemoryViolation, match=f"a step read {4 * host_isa().lanes} bytes it may not"):
        forward(step, given)
    forward(step)  # and the next one is computed


def test_what_may_only_be_read_is_not_written(step: NativeStep) -> None:
    step.memory.parameters.set(logits=model(KIND).head.at)
    with pytest.raises(MemoryViolation, match=r"a step wrote .* the start of lm_head\.weight"):
        forward(step)


def test_one_byte_past_a_buffer_is_found(step: NativeStep) -> None:
    logits = step.memory.logits
    last_row = step.memory.parameters.get("logits") + logits.nbytes - logits[0].nbytes
    step.memory.parameters.set(logits=last_row)
    forward(step)
    step.memory.parameters.set(logits=last_row + 1)
    with pytest.raises(MemoryViolation, match=r"a step wrote .* the start of logits"):
        forward(step)


def test_changed_bytes_around_a_buffer_are_found(step: NativeStep) -> None:
    residual = step.memory.parameters.kept["residual"]
    assert isinstance(residual.base, np.ndarray)
    residual.base[-1] ^= GUARD
    with pytest.raises(MemoryViolation, match="the bytes around residual have changed"):
        forward(step)


def test_guards_stand_on_both_sides() -> None:
    for size, at in ((5, -1), (64, 0), (100, 63)):
        values = aligned(size)
        assert guards_hold(values) and not values.any()
        assert isinstance(values.base, np.ndarray)
        values.base[at] = 0
        assert not guards_hold(values)


def test_the_code_that_serves_has_no_checks() -> None:
    assert checked_code().is_checked and not host_code().is_checked
    assert checked_code().key != host_code().key


@pytest.mark.parametrize("seed", range(5))
def test_random_steps_touch_nothing_else_and_keep_their_bits(seed: int) -> None:
    """Against one thread that does not yield, in the code that serves."""
    expected = run_seed(host_code(), seed, 60)
    assert run_seed(checked_code(), seed, 60, (THREADS[seed % len(THREADS)],), yields=seed + 1) == expected


def test_digests_tell_runs_apart() -> None:
    runs = [run_seed(host_code(), seed, 20) for seed in range(6)]
    assert len({run.digest for run in runs}) == 6
    assert all(run.settled for run in runs)


# ---------------------------------------------------------------- the long ones


def run(*command: str) -> str:
    environment = os.environ | {VARIABLE: "1", "PYTHONPATH": f"{PROJECT / 'src'}{os.pathsep}{PROJECT}"}
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.campaign
def test_many_random_steps_find_nothing() -> None:
    assert "nothing found" in run("tests.native.random_steps", "--steps", "10000")


@pytest.mark.campaign
def test_many_steps_that_yield_keep_their_bits() -> None:
    assert "nothing found" in run("tests.native.random_steps", "--steps", "4000", "--yields")


@pytest.mark.campaign
def test_the_parity_tests_touch_nothing_else() -> None:
    files = (
        "tests/native/test_native_engine.py",
        "tests/native/test_native_kv.py",
        "tests/torch/test_parity_engine.py",
    )
    only = ("-m", "not campaign", "-k", "native")  # torch computes the other half of the parity tests
    assert "passed" in run("pytest", "-q", "-p", "no:cacheprovider", *only, *files)
