"""The pace of steps: tokens that keep a target, waiting requests, what is learnt, and what a composed step carries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.audit.codec import config_of, plain
from paceline.config.engine import EngineConfig, LearnedSteps, SchedulerConfig, StepCosts
from paceline.core.plan import StepTimes, StepWork
from paceline.errors import ConfigError
from paceline.scheduler.step.pace import FASTEST, SLOWEST, LongPrompts, Pace, make_pace, step_budget
from paceline.scheduler.step_sizes import FORGOTTEN_S, LONG_CONTEXT, TOLERATED, StepSizes
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

FRESH = (0, 0)  # no row computes a prompt
# A millisecond, and another for each 100 tokens.
COSTS = StepCosts(
    sizes=(100, 200, 400, 800, 1600),
    seconds=(0.002, 0.003, 0.005, 0.009, 0.017),
    context_s=1e-7,
    product_s=1e-8,
    row_s=1e-5,
)


def pace(target_ms: float = 10.0, costs: StepCosts = COSTS, **options: Any) -> Pace:
    chosen = {"max_num_batched_tokens": 4096, "step_patience_s": 0.2, "step_stretch": 2.0} | options
    made = make_pace(SchedulerConfig(step_target_ms=target_ms, step_costs=costs, **chosen))
    assert made is not None
    return made


# -- when there is a pace ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_target_ms": 0.0, "step_costs": COSTS},
        {"step_target_ms": None, "step_costs": COSTS},
        {"step_target_ms": 10.0},
        {"step_target_ms": 10.0, "step_costs": COSTS, "mode": "static"},
    ],
)
def test_without_a_target_or_costs_there_is_no_pace(options: dict[str, Any]) -> None:
    config = SchedulerConfig(**options)
    assert make_pace(config) is None
    assert config.fewest_step_tokens == config.max_num_batched_tokens


@pytest.mark.parametrize(
    "wrong",
    [
        {"sizes": (), "seconds": ()},
        {"sizes": (1, 2), "seconds": (0.1,)},
        {"sizes": (2, 1), "seconds": (0.1, 0.2)},
        {"sizes": (0, 1), "seconds": (0.1, 0.2)},
        {"sizes": (1, 2), "seconds": (0.2, 0.1)},
        {"sizes": (1,), "seconds": (float("nan"),)},
        {"sizes": (1,), "seconds": (0.1,), "context_s": -1e-9},
    ],
)
def test_costs_that_no_step_can_have_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        StepCosts(**wrong)


# -- the target ----------------------------------------------------------------------------------------------


def test_the_target_is_stretched_while_a_request_waits_long() -> None:
    of = pace().target_s
    assert of(0.0) == of(0.2) == pytest.approx(0.010)
    assert of(0.3) == pytest.approx(0.015)
    assert of(0.4) == of(60.0) == pytest.approx(0.020)


# -- the budget ----------------------------------------------------------------------------------------------


def test_the_budget_is_the_largest_size_that_keeps_the_target() -> None:
    costs = StepCosts(sizes=COSTS.sizes, seconds=COSTS.seconds)
    assert [pace(ms, costs).budget(0, 0, FRESH, 0.0) for ms in (2.9, 3.0, 8.9, 9.0, 500.0)] == [
        100,
        200,
        400,
        800,
        1600,
    ]


def test_context_rows_and_earlier_tokens_of_a_prompt_take_from_it() -> None:
    one = pace(12.5)
    assert one.budget(0, 0, FRESH, 0.0) == 800
    assert one.budget(0, 10_000, FRESH, 0.0) == 400  # one more millisecond
    assert one.budget(200, 0, FRESH, 0.0) == 400  # two
    assert one.budget(0, 0, (1000, 800), 0.0) == 400  # eight, and four instead of three for 400
    assert one.budget(0, 0, (1000, 10), 0.0) == 800  # a tenth: the rest of the step is for others


def test_a_request_that_waits_long_makes_it_larger() -> None:
    assert (pace().budget(0, 0, FRESH, 0.0), pace().budget(0, 0, FRESH, 0.4)) == (400, 800)


def test_prompts_go_on_however_much_the_rows_read() -> None:
    one = pace()
    assert one.budget(0, 10**9, FRESH, 0.0) == 100
    assert one.budget(90, 10**9, FRESH, 0.0) == 200  # at least 100 beside the rows, on a size
    assert one.budget(1550, 10**9, FRESH, 0.0) == 1650  # there is no such size


def test_no_step_has_more_tokens_than_configured() -> None:
    assert pace(500.0, max_num_batched_tokens=300).budget(0, 0, FRESH, 0.0) == 300
    assert pace(1.0, max_num_batched_tokens=300).budget(290, 0, FRESH, 0.0) == 300
    assert pace(1.0, max_num_batched_tokens=50).budget(0, 0, FRESH, 0.0) == 50


@given(
    rows=st.integers(0, 3000),
    context=st.integers(0, 10**7),
    done=st.integers(0, 10**5),
    rest=st.integers(0, 10**5),
    waited_s=st.floats(0.0, 1e6),
    target_ms=st.floats(0.01, 1e3),
    most=st.integers(1, 4096),
)
def test_the_budget_lies_between_floor_and_ceiling_and_keeps_the_target(
    rows: int, context: int, done: int, rest: int, waited_s: float, target_ms: float, most: int
) -> None:
    one = pace(target_ms, max_num_batched_tokens=most)
    budget = one.budget(rows, context, (done, rest), waited_s)
    assert min(rows + COSTS.sizes[0], most) <= budget <= max(most, 1)
    least = min([size for size in COSTS.sizes if size >= rows + 100], default=rows + 100)
    if budget > least:
        tokens = budget - rows
        first = min(tokens, rest)
        products = first * done + first**2 // 2
        work = StepWork(
            decode_rows=rows,
            decode_context=context,
            prefill_tokens=tokens,
            prefill_context_products=products,
        )
        larger = min(size for size in COSTS.sizes if size >= budget)
        slack = COSTS.seconds[COSTS.sizes.index(larger)] - COSTS.seconds[COSTS.sizes.index(larger) - 1]
        assert one.expected_s(work) <= one.target_s(waited_s) + slack * (budget == most) + 1e-9


# -- long prompts --------------------------------------------------------------------------------------------


def test_a_prompt_is_long_that_takes_longer_than_a_request_is_patient() -> None:
    one = pace()  # 200 ms: with 10.6 us for a token, 10 ns for a pair
    assert not one.is_long(5_000) and one.is_long(6_000)  # 0.18 and 0.24 s


def test_a_long_prompt_alone_has_half_of_the_target_and_any_row_makes_the_difference() -> None:
    one, far = pace(40.0), LongPrompts(100_000)  # a millisecond for each token
    assert one.beside_long(0, 0, far, 0.0).for_long == 37  # 38 ms beside what the least step takes
    near = LongPrompts(0)
    assert one.beside_long(1, 0, near, 0.0).for_long < 0.55 * one.beside_long(0, 0, near, 0.0).for_long


def test_long_prompts_get_a_share_of_the_seconds_while_others_could_use_them() -> None:
    alone = pace(100.0).beside_long(0, 0, LongPrompts(100_000), 0.0)
    room = pace(100.0).beside_long(0, 0, LongPrompts(100_000, others=800, share=0.5), 0.0)
    assert alone.tokens == alone.for_long == 96
    assert room.for_long == 48 and room.tokens == 848


def test_long_prompts_go_on_however_far_they_are() -> None:
    room = pace().beside_long(90, 10**9, LongPrompts(10**6, others=50), 0.0)
    assert room.for_long == StepCosts.LONG and room.tokens >= 90 + StepCosts.LONG


@given(
    rows=st.integers(0, 1500),
    context=st.integers(0, 10**7),
    done=st.integers(0, 10**6),
    others=st.integers(0, 10**5),
    target_ms=st.floats(1.0, 1e3),
)
def test_the_room_beside_long_prompts_keeps_the_target(
    rows: int, context: int, done: int, others: int, target_ms: float
) -> None:
    one = pace(target_ms)
    room = one.beside_long(rows, context, LongPrompts(done, others, 0.5), 0.0)
    assert room.for_long >= StepCosts.LONG
    assert rows + room.for_long <= room.tokens <= 4096
    least = min([size for size in COSTS.sizes if size >= rows + room.for_long], default=rows + room.for_long)
    if room.for_long > StepCosts.LONG and room.tokens > least:
        tokens, first = room.tokens - rows, room.for_long
        work = StepWork(
            decode_rows=rows,
            decode_context=context,
            prefill_tokens=tokens,
            prefill_context_products=first * done + first**2 // 2,
        )
        assert one.expected_s(work) <= one.target_s(0.0) + 1e-9


# -- learning ------------------------------------------------------------------------------------------------

WORK = StepWork(decode_rows=10, decode_context=10_000, prefill_tokens=300, prefill_context_products=100_000)
EXPECTED_S = 0.005 + 0.001 + 0.001 + 0.0001


def test_a_step_takes_what_the_table_says() -> None:
    assert pace().expected_s(WORK) == pytest.approx(EXPECTED_S)


def learn(one: Pace, seconds: float, work: StepWork = WORK, times: int = 200) -> float:
    for number in range(times):
        one.learn(work, StepTimes(start_s=number + 1.0, end_s=number + 1.0 + seconds))
    return one.ratio


def test_steps_that_take_longer_make_the_next_ones_smaller() -> None:
    one = pace(14.0)
    before = one.budget(0, 0, FRESH, 0.0)
    assert learn(one, 1.4 * EXPECTED_S) == pytest.approx(1.4, abs=1e-3)
    assert one.budget(0, 0, FRESH, 0.0) < before


def test_what_is_learnt_is_bounded() -> None:
    assert learn(pace(), 1.0) == pytest.approx(SLOWEST, abs=1e-3)
    assert learn(pace(), 1e-6) == pytest.approx(FASTEST, abs=1e-3)
    assert learn(pace(), 1.0, times=1) < 1.05, "one stall is no new speed"


@pytest.mark.parametrize(
    "work",
    [
        StepWork(decode_rows=300, decode_context=1000),
        StepWork(prefill_tokens=99),
        StepWork(prefill_tokens=1601),
        StepWork(prefill_tokens=300, swap_blocks=1),
    ],
)
def test_steps_the_table_does_not_speak_of_teach_nothing(work: StepWork) -> None:
    assert learn(pace(), 0.1, work) == 1.0


def test_a_runner_that_tells_no_times_teaches_nothing() -> None:
    one = pace()
    one.learn(WORK, StepTimes())
    assert one.ratio == 1.0


def test_the_time_a_step_waits_for_the_one_before_it_is_not_its_own() -> None:
    one = pace()
    one.learn(StepWork(decode_rows=1), StepTimes(start_s=0.0, end_s=5.0))
    one.learn(WORK, StepTimes(start_s=1.0, end_s=5.0 + EXPECTED_S))
    assert one.ratio == pytest.approx(1.0)


# -- composed steps ------------------------------------------------------------------------------------------

SMALL = StepCosts(sizes=(4, 8, 16, 24), seconds=(0.004, 0.008, 0.016, 0.024), context_s=1e-3)


def bench(target_ms: float, **options: Any) -> Bench:
    chosen: dict[str, Any] = {"step_costs": SMALL, "step_patience_s": 1.0, "long_prefill_share": 1.0}
    chosen |= options
    return Bench(engine_config(step_target_ms=target_ms, **chosen))


def spans(one: Bench) -> dict[int, int]:
    seen = one.step()
    assert seen is not None
    return seen.spans


def test_a_prompt_is_computed_in_chunks_that_keep_the_pace() -> None:
    one = bench(16.0)
    first = one.add(prompt(40), 20)
    assert [spans(one) for _ in range(3)] == [{first: 16}, {first: 16}, {first: 8}]


def test_what_decoding_rows_read_makes_the_next_chunk_smaller() -> None:
    one = bench(24.0)
    decoding = one.add(prompt(10), 20)
    one.step()
    long = one.add(prompt(60, 1), 4)
    seen = one.step()
    assert seen is not None and decoding in seen.decodes
    assert seen.spans == {long: 7}  # 13 ms are left for 8 tokens, one of them the row's
    one.run()


def test_a_full_house_leaves_the_fewest_tokens_to_a_prompt() -> None:
    one = bench(1.0)
    rows = [one.add(prompt(4, start), 30) for start in range(6)]
    for _ in range(8):
        one.step()
    long = one.add(prompt(60, 9), 4)
    seen = one.step()
    assert seen is not None and seen.decodes == set(rows)
    assert seen.spans == {long: 10}  # six rows and at least four tokens: the size is 16
    one.run()


def test_steps_grow_while_a_request_waits() -> None:
    one = bench(8.0, step_stretch=3.0, num_blocks=200)
    first = one.add(prompt(100), 4)
    assert spans(one) == {first: 8}
    one.clock.advance(2.0)
    assert spans(one) == {first: 24}
    one.run()


def test_the_share_of_a_prompt_is_a_share_of_the_step() -> None:
    one = bench(16.0, long_prefill_share=0.5, max_num_seqs=2)
    ids = [one.add(prompt(60, start), 4) for start in range(3)]
    assert spans(one) == {ids[0]: 8, ids[1]: 8}


def test_a_step_without_prompts_is_not_held_to_a_pace() -> None:
    one = bench(1.0)
    rows = [one.add(prompt(1, start), 8) for start in range(8)]
    while one.state.prefilling or len(one.state.queue):
        one.step()
    seen = one.step()
    assert seen is not None and seen.decodes <= set(rows)
    assert one.state.config.max_num_batched_tokens == one.scheduler.composer.last_draft.budget


# -- no row decodes ------------------------------------------------------------------------------------------


def sizes_of_steps(bench: Bench, count: int) -> list[tuple[int, int]]:
    """Rows that decode and tokens of prompts of the next steps."""
    found = []
    for _ in range(count):
        bench.step()
        work = bench.watch.seen[-1].plan.work
        found.append((work.decode_rows, work.prefill_tokens))
    return found


def test_a_prompt_goes_in_large_steps_until_a_row_decodes() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8, max_num_prompt_tokens=32, num_blocks=200))
    bench.add(prompt(40, 1), 3)
    assert sizes_of_steps(bench, 2) == [(0, 32), (0, 8)]
    bench.add(prompt(40, 2), 3)
    # The first one's last token is in the third step: it waits for that one too.
    assert sizes_of_steps(bench, 4) == [(1, 7), (1, 7), (0, 26), (1, 0)]
    bench.run()


def test_a_row_that_stands_still_keeps_steps_short() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8, max_num_prompt_tokens=32, num_blocks=200))
    bench.add(prompt(4, 1), 9)
    bench.step(2)
    assert step_budget(bench.state, None, bench.state.rows.decoding[:1] & False, []) == 8


@pytest.mark.parametrize("alone", [0, 5])
def test_steps_without_waiting_requests_are_never_the_smaller_ones(alone: int) -> None:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_prompt_tokens=alone)
    assert (config.step_tokens(0), config.step_tokens(3), config.largest_step) == (64, 64, 64)


# ----------------------------------------------------------------
# Sizes of steps are learnt while serving: smaller when the machine is slow, as before when it is not.


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
    machine.sizes.forget_old(machine.now_s + FORGOTTEN_S / 2)
    assert machine.sizes.alone == 16
    machine.sizes.forget_old(machine.now_s + FORGOTTEN_S + 0.1)
    assert (machine.sizes.beside, machine.sizes.alone) == QUIET
    quick = machine.run(0.3, steps=20)
    assert quick > QUIET
    machine.sizes.forget_old(machine.now_s + 1e6)
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


def test_steps_get_smaller_the_further_a_prompt_is_where_they_would_take_far_too_long() -> None:
    config = replace(CONFIG, learned_steps=replace(LEARNED, product_s=LEARNED.token_s / 1000))
    sizes, alike = StepSizes(config), StepSizes(CONFIG)
    for decoding in (0, 3):
        whole = alike.tokens(decoding)
        found = [sizes.tokens(decoding, done) for done in (0, 1000, 10_000, 100_000, 10**9)]
        assert found[:2] == [whole, whole] and found == sorted(found, reverse=True)
        assert found[3] < whole and found[-1] == min(decoding + LEARNED.least, whole)
        assert alike.tokens(decoding, 10**9) == whole
