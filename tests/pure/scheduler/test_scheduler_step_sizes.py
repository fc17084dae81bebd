"""Sizes of steps are learnt while serving: smaller when the machine is slow, as before when it is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.audit.codec import config_of, plain
from paceline.config.engine import EngineConfig, LearnedSteps, SchedulerConfig
from paceline.core.plan import StepTimes, StepWork
from paceline.errors import ConfigError
from paceline.scheduler.step_sizes import FORGOTTEN_S, LONG_CONTEXT, TOLERATED, StepSizes

LEARNED = LearnedSteps(fixed_s=0.016, token_s=0.004, beside_s=0.1125, alone_s=0.25)
CONFIG = SchedulerConfig(max_num_batched_tokens=24, max_num_prompt_tokens=56, learned_steps=LEARNED)
QUIET = (24, 56)


class Machine:
    """Runs steps that take `slowness` times what was measured, one after the other."""

    def __init__(self, config: SchedulerConfig = CONFIG) -> None:
        self.sizes = StepSizes(config)
        self.now_s = 0.0

    def run(self, slowness: float, steps: int = 1, decoding: int = 0, **more: int) -> tuple[int, int]:
        for _ in range(steps):
            tokens = self.sizes.tokens(decoding)
            took_s = slowness * (LEARNED.fixed_s + LEARNED.token_s * tokens)
            work = StepWork(decode_rows=decoding, prefill_tokens=tokens - decoding, **more)
            times = StepTimes(start_s=self.now_s, end_s=self.now_s + took_s)
            self.now_s += took_s
            self.sizes.learn(work, times, self.now_s)
        return self.sizes.beside, self.sizes.alone


def test_given_sizes_are_constants() -> None:
    machine = Machine(replace(CONFIG, learned_steps=None))
    assert machine.run(30.0, steps=50) == QUIET
    assert [machine.sizes.tokens(decoding) for decoding in (0, 1, 23, 24, 40)] == [56, 24, 24, 24, 24]


@pytest.mark.parametrize("slowness", [0.95, 1.0, 1.5, 2.0])
def test_a_machine_about_as_fast_as_measured_keeps_the_sizes_of_the_start(slowness: float) -> None:
    machine = Machine()
    assert {machine.run(slowness, decoding=decoding) for decoding in (0, 0, 4, 8) * 20} == {QUIET}


def test_sizes_fall_within_a_few_steps_and_are_back_as_soon() -> None:
    machine = Machine()
    slow = machine.run(12.0, steps=8)
    assert slow == (16, 16)
    assert machine.run(1.0, steps=16) == QUIET


def test_steps_of_a_slow_machine_take_about_what_they_may() -> None:
    machine = Machine()
    beside, alone = machine.run(4.5, steps=20)
    longest_s = 4.5 * (LEARNED.fixed_s + LEARNED.token_s * alone)
    assert 16 < alone < 56 and longest_s <= TOLERATED * LEARNED.alone_s
    assert beside == 16


def test_a_start_on_a_busy_machine_is_corrected() -> None:
    busy = LearnedSteps(fixed_s=0.16, token_s=0.04, beside_s=0.1125, alone_s=0.25)
    machine = Machine(
        SchedulerConfig(max_num_batched_tokens=16, max_num_prompt_tokens=16, learned_steps=busy)
    )
    assert machine.run(0.9, steps=16) == QUIET  # what a start on the quiet machine measures


def test_a_line_of_the_wrong_shape_is_corrected_step_by_step() -> None:
    flat = LearnedSteps(fixed_s=0.3, token_s=1e-7, beside_s=0.1125, alone_s=0.25)
    machine = Machine(
        SchedulerConfig(max_num_batched_tokens=16, max_num_prompt_tokens=16, learned_steps=flat)
    )
    longest_s, before_s = 0.0, 0.0
    for _ in range(60):
        before_s = machine.now_s
        machine.run(1.0)
        longest_s = max(longest_s, machine.now_s - before_s)
    assert longest_s < 4 * LEARNED.alone_s


def test_one_stall_moves_little() -> None:
    machine = Machine()
    machine.run(1.0, steps=10)
    assert machine.run(40.0) == QUIET


def test_decoding_rows_are_never_cut_and_prompts_go_on_beside_them() -> None:
    machine = Machine()
    machine.run(8.0, steps=10)
    sizes = machine.sizes
    assert sizes.rows == 24
    assert [sizes.tokens(decoding) for decoding in (1, 4, 8, 20)] == [17, 20, 24, 24]


def test_slowness_that_is_long_ago_is_forgotten_and_speed_is_not() -> None:
    machine = Machine()
    machine.run(12.0, steps=10)
    machine.sizes.look(machine.now_s + FORGOTTEN_S / 2)
    assert machine.sizes.alone == 16
    machine.sizes.look(machine.now_s + FORGOTTEN_S + 0.1)
    assert (machine.sizes.beside, machine.sizes.alone) == QUIET
    quick = machine.run(0.3, steps=20)
    assert quick > QUIET
    machine.sizes.look(machine.now_s + 1e6)
    assert (machine.sizes.beside, machine.sizes.alone) == quick


def test_long_contexts_swaps_and_plain_decode_teach_nothing() -> None:
    machine = Machine()
    assert machine.run(9.0, steps=20, prefill_context_products=LONG_CONTEXT * 56 + 1) == QUIET
    assert machine.run(9.0, steps=20, swap_blocks=1) == QUIET
    machine.sizes.learn(StepWork(decode_rows=4), StepTimes(start_s=1e3, end_s=1e3 + 9), 0.0)
    machine.sizes.learn(StepWork(prefill_tokens=9), StepTimes(), 0.0)
    assert (machine.sizes.beside, machine.sizes.alone) == QUIET


@given(st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 40)), max_size=60))
def test_sizes_keep_their_bounds_whatever_steps_take(steps: list[tuple[float, int]]) -> None:
    config = replace(CONFIG, learned_steps=replace(LEARNED, most=64, most_alone=96))
    one, other = Machine(config), Machine(config)
    for slowness, decoding in steps:
        decoding = min(decoding, one.sizes.rows)
        assert 16 <= one.sizes.tokens(decoding) <= config.most_step_tokens(decoding) == 96
        assert one.sizes.tokens(decoding) >= min(decoding + 16, 24) and decoding <= one.sizes.tokens(decoding)
        if decoding < one.sizes.tokens(decoding):
            assert one.run(slowness, decoding=decoding) == other.run(slowness, decoding=decoding)


def test_a_run_log_has_what_is_learnt_from() -> None:
    config = EngineConfig(scheduler=CONFIG)
    assert config_of(plain(config)) == config
    assert CONFIG.largest_step == LEARNED.most and CONFIG.fewest_step_tokens == 16


@pytest.mark.parametrize("wrong", [{"token_s": 0.0}, {"fixed_s": -1.0}, {"alone_s": math.inf}, {"least": 0}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(LEARNED, **wrong)  # type: ignore[arg-type]
