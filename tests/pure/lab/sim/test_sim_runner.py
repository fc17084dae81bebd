"""The timed runner: when steps start and end, and that it answers as a runner that really computes does."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.config.sized import Capacity
from paceline.core.clock import ManualClock
from paceline.core.guide import Guide
from paceline.core.plan import (
    AT_LENGTH,
    RUNNING_ON,
    Pending,
    RowJoins,
    RowSet,
    RowSpans,
    StepPlan,
    StepResult,
    StepWork,
    Swaps,
    i32,
)
from paceline.core.request import RequestId
from paceline.core.sampling import SamplingParams
from paceline.costs.cost_model import StepShape
from paceline.factory import build_engine
from paceline.lab.sim.simulated_runner import TimedRunner
from tests.fakes import FakeRunner


@dataclass
class Steady:
    """Every step takes as long; the shapes asked for are kept."""

    seconds: float = 1.0
    shapes: list[StepShape] = field(default_factory=list)

    def step_seconds(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return self.seconds


def join(row: int, *, tokens: int, limit: int, computed: int = 0, generation: int = 1) -> RowJoins:
    return RowJoins(
        row=i32([row]),
        generation=i32([generation]),
        num_tokens=i32([tokens]),
        num_computed=i32([computed]),
        limit=i32([limit]),
    )


def spans(*pairs: tuple[int, int]) -> RowSpans:
    return RowSpans(row=i32(row for row, _ in pairs), num_scheduled=i32(count for _, count in pairs))


def test_a_step_starts_when_the_device_is_free_and_wait_moves_the_clock_to_its_end() -> None:
    clock = ManualClock(10.0)
    runner = TimedRunner(Steady(2.0), clock, 4)
    first, second = runner.submit(StepPlan(seq=1)), runner.submit(StepPlan(seq=2))
    assert clock.now() == 10.0, "submitting does not wait"
    assert (first.wait().times.start_s, clock.now()) == (10.0, 12.0)
    clock.advance(5.0)  # the host was busy elsewhere: the second step was long over
    times = second.wait().times
    assert (times.start_s, times.end_s, clock.now()) == (12.0, 14.0, 17.0)
    third = runner.submit(StepPlan(seq=3)).wait().times
    assert (third.start_s, third.end_s) == (17.0, 19.0), "the device was idle until it was asked"
    assert (runner.num_submitted, runner.num_completed) == (3, 3)


def test_the_host_cost_is_paid_before_a_step_starts() -> None:
    clock = ManualClock()
    runner = TimedRunner(Steady(1.0), clock, 4, host_step_s=0.25)
    times = runner.submit(StepPlan(seq=1)).wait().times
    assert (times.start_s, times.end_s) == (0.25, 1.25)
    ahead = [runner.submit(StepPlan(seq=seq)) for seq in (2, 3)]
    assert [pending.wait().times.start_s for pending in ahead] == [1.5, 2.5], "hidden behind the step before"


def test_a_stall_multiplies_the_time_of_one_step() -> None:
    factors = iter((1.0, 10.0, 1.0))
    runner = TimedRunner(Steady(0.5), ManualClock(), 4, stretch=lambda reads_prompts: next(factors))
    ends = [runner.submit(StepPlan(seq=seq)).wait().times.end_s for seq in (1, 2, 3)]
    assert ends == [0.5, 5.5, 6.0]


def test_the_cost_model_is_asked_about_the_work_of_the_plan() -> None:
    cost = Steady()
    runner = TimedRunner(cost, ManualClock(), 4, block_bytes=1000)
    work = StepWork(
        decode_rows=3,
        decode_context=300,
        prefill_tokens=7,
        prefill_context_products=28,
        logit_rows=4,
        swap_blocks=5,
    )
    runner.submit(StepPlan(seq=1, work=work))
    assert cost.shapes == [
        StepShape(
            decode_rows=3,
            decode_context=300,
            prefill_tokens=7,
            prefill_context_products=28,
            logit_rows=4,
            copy_bytes=5000,
        )
    ]


def test_a_prompt_in_chunks_gives_a_token_only_with_its_last_chunk() -> None:
    runner = TimedRunner(Steady(), ManualClock(), 4)
    plan = StepPlan(seq=1, joins=join(2, tokens=10, limit=13, computed=4), spans=spans((2, 4)))
    assert runner.submit(plan).wait().count.tolist() == [0]
    result = runner.submit(StepPlan(seq=2, spans=spans((2, 2)))).wait()
    assert (result.rows.tolist(), result.count.tolist()) == ([2], [1])
    assert (result.generation.tolist(), result.tokens.shape, result.finite.tolist()) == ([1], (1, 1), [True])
    decode = [
        runner.submit(StepPlan(seq=3, decode_rows=RowSet(added=i32([2])))),
        runner.submit(StepPlan(seq=4)),
    ]
    assert [pending.wait().finished.tolist() for pending in decode] == [[RUNNING_ON], [AT_LENGTH]]


def test_a_span_that_ends_at_the_limit_finishes_its_row() -> None:
    runner = TimedRunner(Steady(), ManualClock(), 4)
    plan = StepPlan(seq=1, joins=join(0, tokens=5, limit=6), spans=spans((0, 5)))
    assert runner.submit(plan).wait().finished.tolist() == [AT_LENGTH]


def test_a_row_that_leaves_and_joins_again_starts_anew() -> None:
    runner = TimedRunner(Steady(), ManualClock(), 4)
    runner.submit(StepPlan(seq=1, joins=join(1, tokens=2, limit=9), spans=spans((1, 2))))
    runner.submit(StepPlan(seq=2, decode_rows=RowSet(added=i32([1]))))
    plan = StepPlan(
        seq=3, leaves=i32([1]), joins=join(1, tokens=8, limit=10, generation=3), spans=spans((1, 8))
    )
    result = runner.submit(plan).wait()
    assert result.rows.tolist() == [1], "no longer in plain decode"
    assert (result.generation.tolist(), result.finished.tolist()) == ([3], [RUNNING_ON]), "its own counts"


def test_a_row_held_back_for_some_steps_keeps_its_count() -> None:
    """Columns of decoding rows are settled late; a row that rests in between must not lose or gain tokens."""
    runner = TimedRunner(Steady(), ManualClock(), 4)
    runner.submit(StepPlan(seq=1, joins=join(0, tokens=1, limit=5), spans=spans((0, 1))))  # 3 left
    runner.submit(StepPlan(seq=2, joins=join(1, tokens=1, limit=9), spans=spans((1, 1))))
    runner.submit(StepPlan(seq=3, decode_rows=RowSet(added=i32([0, 1]))))  # 2 left
    for seq in (4, 5, 6):
        held = RowSet(removed=i32([0])) if seq == 4 else RowSet()
        assert runner.submit(StepPlan(seq=seq, decode_rows=held)).wait().rows.tolist() == [1]
    result = runner.submit(StepPlan(seq=7, decode_rows=RowSet(added=i32([0])))).wait()
    assert (result.rows.tolist(), result.finished.tolist()) == ([0, 1], [RUNNING_ON, RUNNING_ON])
    assert runner.submit(StepPlan(seq=8)).wait().finished.tolist() == [AT_LENGTH, RUNNING_ON]


def test_swaps_complete_with_their_step() -> None:
    runner = TimedRunner(Steady(), ManualClock(), 4)
    out = Swaps(ticket=i32([7, 7, 9]), group=i32([0, 0, 0]), block=i32([1, 2, 3]), place=i32([0, 1, 2]))
    back = Swaps(ticket=i32([8]), group=i32([0]), block=i32([4]), place=i32([3]))
    assert runner.submit(StepPlan(seq=1, swap_out=out, swap_in=back)).wait().copies_done.tolist() == [7, 8, 9]
    assert runner.submit(StepPlan(seq=2)).wait().copies_done.tolist() == []


def test_a_gap_in_the_plans_is_an_error() -> None:
    runner = TimedRunner(Steady(), ManualClock(), 4)
    runner.submit(StepPlan(seq=1))
    with pytest.raises(AssertionError, match="plan 3"):
        runner.submit(StepPlan(seq=3))


def test_reset_takes_over_the_rows_of_a_full_plan_only() -> None:
    runner = TimedRunner(Steady(), ManualClock(), 4)
    runner.submit(StepPlan(seq=1, joins=join(0, tokens=1, limit=9), spans=spans((0, 1))))
    runner.submit(StepPlan(seq=2, decode_rows=RowSet(added=i32([0]))))
    full = StepPlan(
        seq=2,
        full=True,
        joins=join(3, tokens=4, limit=6, computed=3, generation=5),
        decode_rows=RowSet(added=i32([3])),
    )
    runner.reset(full)
    result = runner.submit(StepPlan(seq=3)).wait()
    assert (result.rows.tolist(), result.generation.tolist()) == ([3], [5])
    assert result.finished.tolist() == [RUNNING_ON]
    assert runner.submit(StepPlan(seq=4)).wait().finished.tolist() == [AT_LENGTH]


# ---------------------------------------------------------------- against a runner that really computes


class Both:
    """Gives every plan to two runners and compares what they say."""

    def __init__(self, config: EngineConfig, clock: ManualClock) -> None:
        self.real = FakeRunner(config, check=False)
        self.timed = TimedRunner(Steady(0.01), clock, Capacity.of(config).num_rows)
        self.compared = 0

    def reset(self, full: StepPlan) -> None:
        raise AssertionError("nothing fails here")

    def submit(self, plan: StepPlan) -> Pending:
        return _BothPending(self, self.real.submit(plan), self.timed.submit(plan))


@dataclass
class _BothPending:
    both: Both
    real: Pending
    timed: Pending

    def supply(self, guides: Mapping[int, Guide]) -> None:
        raise AssertionError("no request has a structure here")

    def wait(self) -> StepResult:
        real, timed = self.real.wait(), self.timed.wait()
        assert real.seq == timed.seq
        assert _by_row(real) == _by_row(timed)
        assert sorted(real.copies_done.tolist()) == timed.copies_done.tolist()
        self.both.compared += len(timed.rows)
        return real


def _by_row(result: StepResult) -> dict[int, list[int | bool]]:
    columns = (result.rows, result.generation, result.count, result.finished, result.finite)
    return {row: rest for row, *rest in zip(*(column.tolist() for column in columns), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["continuous", "dynamic", "static"])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_it_answers_as_a_runner_that_computes(mode: str, depth: int, seed: int) -> None:
    config = EngineConfig(
        kv=KVConfig(block_size=4, num_blocks=40, num_host_blocks=24),
        scheduler=SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=16,
            max_model_len=40,
            mode=mode,
            batch_size=4,
            batch_timeout_s=0.05,
            static_flush_s=0.1,
            preemption="swap" if seed % 2 else "recompute",
        ),
        depth=depth,
    )
    clock = ManualClock()
    both = Both(config, clock)
    engine = build_engine(config, both, clock=clock)
    chance = random.Random(seed)
    live: list[RequestId] = []
    for step in range(300):
        if step < 200 and chance.random() < 0.3:
            prompt = [chance.randrange(5) for _ in range(chance.randint(1, 24))]
            live += engine.add(prompt, SamplingParams(max_tokens=chance.randint(1, 16), temperature=0.0))
        if live and mode == "continuous" and chance.random() < 0.08:
            victim = chance.choice(live)
            if chance.random() < 0.3:
                engine.abort(victim)
            elif victim in engine.scheduler.state.requests:
                engine.scheduler.preempt(victim, swap=chance.random() < 0.5)
        clock.advance(0.01)
        events = engine.step_overlapped() if depth else engine.step()
        live = [request for request in live if request not in {done.request for done in events.finished}]
    engine.drain()
    assert both.compared > 300
