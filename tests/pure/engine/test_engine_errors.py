"""What fails and which requests end: hooks, single steps, the whole device, single rows (E1 to E5)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.audit.runlog import RunLogWriter, read_run_log, run_header
from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.events import DecisionKind
from paceline.core.plan import StepPlan
from paceline.core.recorder import StepRecorder
from paceline.core.request import BlockKey, FinishReason, Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.engine.engine import Engine
from paceline.engine.prefix_keys import PrefixKeyHooks
from paceline.errors import EngineFailed
from paceline.factory import build_engine
from paceline.kv.prefix import KeyMaker
from paceline.lab.sim.replayer import replay
from tests.dst.injected import HookFault
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, BreakingRunner, engine_config, prompt


class CountingHooks(PrefixKeyHooks):
    """Raises at the chosen use of a hook by one request."""

    def __init__(self, hook: str = "", use: int = 0) -> None:
        super().__init__(KeyMaker(2, bytes(32)))
        self.hook, self.use = hook, use
        self.victim: int | None = None
        self.used = 0

    def admit(self, request: Request) -> None:
        self._maybe("admit", request)

    def new_keys(self, request: Request) -> Sequence[BlockKey]:
        self._maybe("new_keys on a row" if request.row >= 0 else "new_keys on arrival", request)
        return super().new_keys(request)

    def finish(self, request: Request) -> None:
        self._maybe("finish", request)

    def _maybe(self, hook: str, request: Request) -> None:
        if hook == self.hook and self.victim in (None, request.id):
            self.used += 1
            if self.used == self.use:
                raise HookFault(f"{hook} of {request.id}")


def crowded_run(hooks: CountingHooks, depth: int = 0) -> tuple[Bench, RequestId]:
    """Six requests, one of them put off its row twice, so that every hook is used again and again."""
    config = engine_config(depth=depth, block_size=2, num_blocks=60, num_host_blocks=30)
    bench = Bench(config, hooks=hooks, overlapped=depth > 0)
    ids = [bench.add(prompt(3 + 4 * start, start % 4), 16) for start in range(6)]
    victim = ids[2]
    hooks.victim = victim
    for swap in (False, hooks.hook != "admit"):  # a request that is swapped back in is not admitted again
        bench.step(5)
        if victim in bench.state.requests:
            bench.scheduler.preempt(victim, swap=swap)
            bench.flush()
    bench.run()
    return bench, victim


# -- E4: one request's hook --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("hook", ["admit", "new_keys on a row"])
@pytest.mark.parametrize("use", [1, 2, 3])
def test_a_hook_that_raises_fails_its_own_request_alone(hook: str, use: int, depth: int) -> None:
    untroubled, _ = crowded_run(CountingHooks(), depth)
    hooks = CountingHooks(hook, use)
    bench, victim = crowded_run(hooks, depth)
    assert hooks.used == use
    ending = bench.finished[victim]
    assert (ending.reason, ending.detail) == (FinishReason.ERROR, "internal_error")
    assert bench.reasons(DecisionKind.FAIL, victim) == ["request_failed"]
    for name, tokens in untroubled.tokens.items():
        if name != victim:
            assert bench.tokens[name] == tokens
            assert bench.finished[name].reason is FinishReason.LENGTH
    again = bench.add(prompt(5, 50), 3)
    bench.run()
    assert bench.finished[again].reason is FinishReason.LENGTH, "the next good request succeeds"


@pytest.mark.parametrize("use", [1, 3])
def test_a_finish_hook_that_raises_takes_nothing_from_other_requests(use: int) -> None:
    untroubled, _ = crowded_run(CountingHooks())
    hooks = CountingHooks("finish", use)
    config = engine_config(block_size=2, num_blocks=60)
    bench = Bench(config, hooks=hooks)
    for start in range(6):
        bench.add(prompt(3 + 4 * start, start % 4), 16)
    bench.run()
    assert hooks.used == 6, "the hook of every request was called once"
    assert bench.tokens == untroubled.tokens
    assert bench.reasons(DecisionKind.FAIL) == ["finish_hook"]


@pytest.mark.parametrize("use", [1, 3])
def test_keys_that_cannot_be_made_keep_the_request_out(use: int) -> None:
    hooks = CountingHooks("new_keys on arrival", use)
    bench = Bench(engine_config(block_size=2), hooks=hooks)
    for start in range(4):
        if start == use - 1:
            with pytest.raises(HookFault):
                bench.add(prompt(8, start), 5)
        else:
            bench.add(prompt(8, start), 5)
        bench.step()
    bench.run()
    assert len(bench.finished) == 3
    assert bench.state.counters.added == 3


def test_keys_that_cannot_be_made_at_a_fork_leave_the_parent_alone() -> None:
    hooks = CountingHooks("new_keys on arrival", 2)
    bench = Bench(engine_config(block_size=2), hooks=hooks)
    parent = bench.add(prompt(8), 12)
    bench.step(4)
    with pytest.raises(HookFault):
        bench.fork(parent)
    assert bench.state.children == {}
    bench.run()
    assert bench.finished[parent].reason is FinishReason.LENGTH


def test_what_a_failed_request_computed_is_not_offered_to_others() -> None:
    """S16: never from a request that ended with an error."""
    hooks = CountingHooks("new_keys on a row", 1)
    bench = Bench(engine_config(block_size=2), hooks=hooks)
    bench.add(prompt(8), 12)
    bench.run()
    assert len(bench.state.kv.groups[0].cache) == 0


# -- E1: one step fails ------------------------------------------------------------------------------------


def busy(runner: BreakingRunner, depth: int) -> Bench:
    bench = Bench(runner.config, runner=runner, overlapped=depth > 0)
    for start in range(5):
        bench.add_all(prompt(2 + 5 * start, start % 3), 10, n=1 + start % 2, seed=start)
        bench.step()
    first = next(iter(bench.state.requests), None)
    if first is not None:
        bench.scheduler.preempt(first, swap=True)
        bench.flush()
    bench.run()
    return bench


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kind", ["submit", "wait"])
@pytest.mark.parametrize("number", [1, 2, 4, 6, 7, 8, 11])
def test_a_step_that_fails_once_changes_no_output(kind: str, number: int, depth: int) -> None:
    config = engine_config(depth=depth, num_blocks=40, num_host_blocks=20, preemption="swap")
    runner = BreakingRunner(config, **{f"fail_{kind}": (number,)})  # type: ignore[arg-type]
    bench = busy(runner, depth)
    assert bench.state.counters.failed_steps == 1 and len(runner.resets) == 1
    assert isinstance(bench.engine.last_error, RuntimeError)
    assert all(ending.reason is FinishReason.LENGTH for ending in bench.finished.values())
    lost = [record for record in bench.watch.records if record.result is None]
    assert 1 <= len(lost) <= depth + 1


def test_two_failures_with_progress_between_are_two_first_failures() -> None:
    config = engine_config(num_blocks=40)
    bench = busy(BreakingRunner(config, fail_wait=(4, 12)), 0)
    assert bench.state.counters.failed_steps == 2
    assert all(ending.reason is FinishReason.LENGTH for ending in bench.finished.values())


def test_a_request_whose_step_fails_twice_ends_with_an_error() -> None:
    config = engine_config(max_num_seqs=1)
    bench = Bench(config, runner=BreakingRunner(config, fail_wait=(3, 4)))
    poisoned, waiting = bench.add(prompt(4), 8), bench.add(prompt(4, 1), 8)
    bench.run()
    assert (bench.finished[poisoned].reason, bench.finished[poisoned].detail) == (
        FinishReason.ERROR,
        "internal_error",
    )
    assert bench.finished[waiting].reason is FinishReason.LENGTH, "it took no part in what failed"


def test_nothing_computed_before_a_failure_is_trusted() -> None:
    config = engine_config()
    bench = Bench(config, runner=BreakingRunner(config, fail_wait=(3,)))
    bench.add(prompt(16), 1)
    bench.step()
    assert len(bench.state.kv.groups[0].cache) == 4
    bench.add(prompt(9, 1), 9)
    bench.step(2)
    assert len(bench.state.kv.groups[0].cache) == 0
    bench.run()


# -- E2: the device is lost --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", ["submit", "wait"])
def test_three_failures_in_a_row_end_the_engine_and_every_request_is_answered(kind: str, depth: int) -> None:
    config = engine_config(depth=depth, num_host_blocks=16)
    numbers = tuple(range(4, 40))
    bench = Bench(
        config,
        runner=BreakingRunner(config, **{f"fail_{kind}": numbers}),  # type: ignore[arg-type]
        overlapped=depth > 0,
    )
    ids = [bench.add(prompt(6, start), 30) for start in range(12)]
    bench.step(2)
    bench.scheduler.pause(ids[0])
    with pytest.raises(EngineFailed, match="3 failed steps: DeviceFault") as caught:
        bench.run()
    assert caught.value.exit_code == 70
    bench.flush()
    assert bench.finished.keys() == set(ids), "one terminal event each"
    assert {ending.reason for ending in bench.finished.values()} == {FinishReason.ERROR}
    assert {ending.detail for ending in bench.finished.values()} <= {"internal_error", "engine_failed"}
    bench.check_empty()


def test_a_success_in_between_starts_the_count_again() -> None:
    config = engine_config(num_blocks=40)
    bench = busy(BreakingRunner(config, fail_wait=(3, 4, 6, 7)), 0)
    assert bench.state.counters.failed_steps == 4


def test_a_device_that_cannot_be_reset_is_lost_at_once() -> None:
    config = engine_config()
    runner = BreakingRunner(config, fail_wait=(2,), fail_reset=True)
    bench = Bench(config, runner=runner)
    request = bench.add(prompt(6), 9)
    with pytest.raises(EngineFailed):
        bench.run()
    bench.flush()
    assert bench.finished[request].detail == "engine_failed"


# -- E5: numbers of one row --------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("when", [1, 2, 3, 6])
def test_numbers_that_are_not_finite_fail_their_request_alone(when: int, depth: int) -> None:
    config = engine_config(depth=depth, max_num_batched_tokens=16)
    runner = BreakingRunner(config, nan_row=(when, 1))
    bench = Bench(config, runner=runner, overlapped=depth > 0)
    ids = [bench.add(prompt(12, start), 9) for start in range(3)]
    bench.run()
    failed = [name for name in ids if bench.finished[name].reason is FinishReason.ERROR]
    assert len(failed) == 1
    assert bench.finished[failed[0]].detail == "numerical_error"
    keys = {key.payload for group in bench.state.kv.groups for key in group.cache.entries().values()}
    theirs = {key.payload for key in bench.hooks_keys(prompt(12, ids.index(failed[0])))}
    assert not keys & theirs, "its blocks are not in the cache"
    healthy = next(name for name in ids if name not in failed)
    assert keys & {key.payload for key in bench.hooks_keys(prompt(12, ids.index(healthy)))}


def test_what_a_neighbour_had_entered_stays_when_a_reader_fails() -> None:
    """Only blocks the failed request computed itself are taken out."""
    config = engine_config()
    runner = BreakingRunner(config, nan_row=(4, 0))
    bench = Bench(config, runner=runner)
    bench.add(prompt(12), 2)
    bench.run()
    reader = bench.add(prompt(12) + prompt(8, 1), 5)
    bench.run()
    assert bench.finished[reader].detail == "numerical_error"
    again = bench.add(prompt(12) + prompt(8, 1), 2)
    bench.run()
    assert bench.finished[again].num_cached == 12


def test_a_late_result_of_an_aborted_row_is_not_looked_at() -> None:
    """B29: the row is gone; what comes of it, finite or not, is dropped."""
    config = engine_config(depth=2)
    runner = BreakingRunner(config, nan_row=(3, 0))
    bench = Bench(config, runner=runner, overlapped=True)
    gone = bench.add(prompt(6), 20)
    bench.step(3)
    bench.engine.abort(gone)
    bench.flush()
    successor = bench.add(prompt(6, 1), 6)
    bench.run()
    assert bench.finished[gone].reason is FinishReason.ABORT
    assert bench.finished[successor].reason is FinishReason.LENGTH


# ----------------------------------------------------------------
# E3: a step that runs out of memory is computed again with half as many rows, and no request fails.


CONFIG = EngineConfig(
    kv=KVConfig(block_size=4, num_blocks=200),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64),
    depth=1,
)


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


class SmallDevice(FakeRunner):
    """Has memory for a limited number of rows in one step."""

    most_rows = 2

    def submit(self, plan: StepPlan):  # type: ignore[no-untyped-def]
        if plan.work.decode_rows + len(plan.spans.row) > self.most_rows:
            raise OutOfMemoryError("no memory for this number of rows")
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


def test_no_request_fails_and_the_rows_come_back() -> None:
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


def test_a_request_that_does_not_fit_alone_fails_alone() -> None:
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
