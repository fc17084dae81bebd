"""Static and dynamic batching: when a batch starts, how it is padded, and that all of it leaves together."""

import contextlib
from typing import Any

import pytest

from paceline.config.engine import EngineConfig, GroupSpec, KVConfig, SchedulerConfig
from paceline.core.clock import ManualClock
from paceline.core.request import RequestState
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidTransition, NeverFits
from paceline.factory import build_engine
from paceline.scheduler.invariants import InvariantChecker
from tests.fakes import FakeRunner
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def batching(mode: str, depth: int = 0, **options: Any) -> Bench:
    defaults: dict[str, Any] = {
        "mode": mode,
        "batch_size": 3,
        "batch_timeout_s": 1.0,
        "static_flush_s": 1.0,
        "max_num_batched_tokens": 64,
    }
    return Bench(engine_config(depth=depth, **defaults | options), overlapped=depth > 0)


MODES = ("dynamic", "static")


# -- the gate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_starts_when_it_is_full(mode: str) -> None:
    bench = batching(mode)
    for start in range(2):
        bench.add(prompt(4, start), 3)
    assert bench.step() is None
    bench.add(prompt(4, 2), 3)
    seen = bench.step()
    assert seen is not None and len(seen.spans) == 3
    bench.run()


@pytest.mark.parametrize("mode", MODES)
def test_a_part_filled_batch_starts_after_the_timeout(mode: str) -> None:
    bench = batching(mode)
    bench.clock.advance_to(5.0)
    bench.add(prompt(4), 3)
    bench.clock.advance_to(5.5)
    bench.add(prompt(4, 1), 3)
    assert bench.step() is None
    assert bench.scheduler.next_wakeup_s() == 6.0, "the oldest has waited long enough then"
    bench.clock.advance_to(6.0)
    seen = bench.step()
    assert seen is not None and len(seen.spans) == 2
    assert bench.scheduler.next_wakeup_s() is None, "nothing opens while a batch runs"
    bench.run()


@pytest.mark.parametrize("mode", MODES)
def test_no_request_joins_a_batch_under_way(mode: str) -> None:
    bench = batching(mode)
    first = [bench.add(prompt(4, start), 6) for start in range(3)]
    bench.step()
    second = [bench.add(prompt(4, 10 + start), 6) for start in range(3)]
    while not bench.finished:
        bench.step()
        assert not any(set(second) & {*seen.spans, *seen.decodes} for seen in bench.seen)
    assert bench.finished.keys() == set(first)
    bench.run()


def test_a_batch_is_no_larger_than_the_rows() -> None:
    bench = batching("static", batch_size=9, max_num_seqs=2)
    for start in range(4):
        bench.add(prompt(4, start), 2)
    seen = bench.step()
    assert seen is not None and len(seen.spans) == 2
    bench.run()


def test_an_idle_gate_has_no_opening() -> None:
    for mode in (*MODES, "continuous"):
        assert batching(mode).scheduler.next_wakeup_s() is None


# -- order -------------------------------------------------------------------------------------------------


def test_fifo_takes_them_as_they_came_and_sorted_by_length() -> None:
    lengths = [30, 2, 28, 3, 31, 4]
    batches = {}
    for order in ("fifo", "sorted"):
        bench = batching("static", static_order=order)
        ids = [bench.add(prompt(length, start), 2) for start, length in enumerate(lengths)]
        bench.step()
        running = [name for name, state in bench.states().items() if state is RequestState.RUNNING]
        batches[order] = [lengths[ids.index(name)] for name in running]  # type: ignore[arg-type]
        bench.run()
    assert batches == {"fifo": [30, 2, 28], "sorted": [2, 3, 4]}


def test_sorting_by_length_saves_padding() -> None:
    padded = {}
    for order in ("fifo", "sorted"):
        bench = batching("static", static_order=order)
        for start in range(12):
            bench.add(prompt(1 + 7 * (start % 4), start), 2)
        bench.run()
        padded[order] = sum(seen.plan.pad_tokens for seen in bench.seen)
    assert padded["sorted"] < padded["fifo"]


# -- padding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 2])
def test_prompts_are_padded_to_the_longest(mode: str, depth: int) -> None:
    bench = batching(mode, depth)
    for start, length in enumerate((4, 10, 7)):
        bench.add(prompt(length, start), 3)
    seen = bench.step()
    assert seen is not None
    assert seen.plan.pad_tokens == (10 - 4) + (10 - 7)
    assert seen.plan.joins.pad.tolist() == [6, 0, 3]
    assert seen.plan.work.prefill_tokens == 30
    bench.run()


def test_padding_counts_against_the_budget() -> None:
    bench = batching("static", max_num_batched_tokens=10)
    for start, length in enumerate((2, 12, 5)):
        bench.add(prompt(length, start), 2)
    bench.run()
    steps = [(seen.plan.pad_tokens, sum(seen.spans.values())) for seen in bench.seen]
    assert sum(pad for pad, _ in steps) == 10 + 7
    assert sum(tokens for _, tokens in steps) == 2 + 12 + 5
    assert all(
        pad + tokens + len(seen.decodes) <= 10 for (pad, tokens), seen in zip(steps, bench.seen, strict=True)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_all_leave_together_and_the_finished_compute_padding(mode: str, depth: int) -> None:
    bench = batching(mode, depth)
    outputs = (2, 6, 4)
    for start, length in enumerate(outputs):
        bench.add(prompt(4, start), length)
    bench.run()
    assert len({ending.time_s for ending in bench.finished.values()}) == 1
    assert [ending.num_output for ending in bench.finished.values()] == list(outputs)
    rows = [seen.plan.work.decode_rows for seen in bench.seen if seen.plan.work.decode_rows]
    assert set(rows) == {3}, "the batch stays a rectangle to its end"
    useful = sum(len(seen.decodes) for seen in bench.seen)
    assert useful == sum(length - 1 for length in outputs), "the first token of each came from its prompt"
    wasted = sum(rows) - useful
    known = sum(seen.plan.padding_rows for seen in bench.seen)
    assert wasted >= (6 - 2) + (6 - 4)
    assert known <= wasted, "a row is known to be padding when its last token has been seen"
    if not depth:
        assert known == wasted == 6


def test_a_stop_is_padding_too() -> None:
    """A row that met its stop id waits like one that met its length."""
    bench = batching("static", batch_size=2)
    stopped = bench.add(prompt(4), 30, stop_token_ids=(1 << 19,))
    long = bench.add(prompt(4, 1), 30)
    bench.run()
    assert bench.finished[stopped].reason.value == "stop"
    assert bench.finished[stopped].time_s == bench.finished[long].time_s
    assert bench.finished[stopped].num_output < 30 == bench.finished[long].num_output


def test_memory_is_reserved_for_the_whole_rectangle() -> None:
    bench = batching("static", batch_size=4, num_blocks=17)
    for start, length in enumerate((4, 16, 4, 4)):
        bench.add(prompt(length, start), 5)
    bench.step()
    group = bench.state.kv.groups[0]
    live = [row for row in range(8) if group.held[row]]
    assert len(live) == 2, "two rows of six blocks fit into 16, three do not"
    assert {int(group.held[row]) for row in live} == {6}
    bench.run()


def test_a_batch_that_cannot_be_full_starts_smaller() -> None:
    bench = batching("static", batch_size=3, num_blocks=9)
    for start in range(3):
        bench.add(prompt(20, start), 12)  # one alone takes the whole pool
    bench.run()
    sizes = [len(seen.plan.joins.row) for seen in bench.seen if len(seen.plan.joins.row)]
    assert sizes == [1, 1, 1]


def test_a_padded_batch_shares_no_prefixes() -> None:
    bench = batching("static")
    for _ in range(3):
        bench.add(prompt(16), 2)
    bench.run()
    assert all(ending.num_cached == 0 for ending in bench.finished.values())


@pytest.mark.parametrize("mode", MODES)
def test_an_abort_inside_a_batch_leaves_the_others_alone(mode: str) -> None:
    bench = batching(mode)
    ids = [bench.add(prompt(4, start), length) for start, length in enumerate((2, 9, 4))]
    bench.step(3)
    bench.engine.abort(ids[1])
    bench.flush()
    bench.run()
    assert bench.finished[ids[1]].reason.value == "abort"
    assert bench.finished[ids[0]].time_s == bench.finished[ids[2]].time_s


def test_the_last_abort_lets_the_finished_go() -> None:
    bench = batching("static")
    ids = [bench.add(prompt(4, start), length) for start, length in enumerate((2, 2, 9))]
    bench.step(4)
    assert not bench.finished
    bench.engine.abort(ids[2])
    bench.flush()
    assert bench.finished.keys() == set(ids), "no request is left to wait for"
    bench.run()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_outputs_do_not_depend_on_the_mode(mode: str, depth: int) -> None:
    """O1: the same requests, compared with the reference as they end."""
    bench = batching(mode, depth, batch_size=4, num_blocks=33)
    for start in range(14):
        bench.add(prompt(1 + 5 * start % 17, start), 1 + 3 * start % 7)
    bench.run()
    assert all(ending.reason.value == "length" for ending in bench.finished.values())


@pytest.mark.parametrize("mode", MODES)
def test_a_window_too_small_for_the_rectangle_is_refused_or_served(mode: str) -> None:
    """L6 and B5: an accepted request is served; a head that can never start blocks all requests."""
    sliding = GroupSpec(window=3, num_blocks=22)
    bench = batching(
        mode, block_size=1, num_blocks=65, max_num_batched_tokens=4, groups=(GroupSpec(), sliding)
    )
    with contextlib.suppress(NeverFits):
        bench.add(prompt(12), 18)
    bench.run()


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_was_put_off_promises_no_blocks_it_does_not_have(mode: str) -> None:
    bench = batching(mode, batch_size=2, block_size=1, num_blocks=13, max_preemptions=1)
    ids = [bench.add(prompt(4, start), 2) for start in range(2)]
    bench.step()
    for request in ids:
        assert bench.scheduler.preempt(request)
    bench.run()


def test_in_continuous_mode_there_is_no_padding() -> None:
    bench = Bench()
    for start in range(6):
        bench.add(prompt(1 + 3 * start, start), 1 + start)
    bench.run()
    assert not any(seen.plan.pad_tokens or seen.plan.padding_rows for seen in bench.seen)
    assert len({ending.time_s for ending in bench.finished.values()}) == 6, "each leaves when it is through"


def test_padding_never_keeps_a_batch_from_its_end() -> None:
    """More rows than a step has tokens: rows that have ended come after those that have not."""
    scheduler = SchedulerConfig(
        mode="static",
        batch_size=5,
        max_num_seqs=5,
        max_num_batched_tokens=3,
        max_model_len=16,
        static_flush_s=0.0,
    )
    config = EngineConfig(kv=KVConfig(block_size=4, num_blocks=64), scheduler=scheduler, depth=0)
    engine = build_engine(config, FakeRunner(config), clock=ManualClock(), make_checker=InvariantChecker)
    for start in range(5):
        engine.add([start + 1, 2, 3], SamplingParams(max_tokens=4, seed=start))
    for _ in range(60):
        engine.step()
        if not engine.has_requests:
            break
    assert not engine.has_requests


def test_a_row_that_waits_for_its_batch_cannot_be_branched() -> None:
    scheduler = SchedulerConfig(
        mode="static",
        batch_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        static_flush_s=0.0,
    )
    config = EngineConfig(kv=KVConfig(block_size=4, num_blocks=64), scheduler=scheduler, depth=0)
    engine = build_engine(config, FakeRunner(config), clock=ManualClock(), make_checker=InvariantChecker)
    (short,) = engine.add([1, 2, 3], SamplingParams(max_tokens=1, seed=1))
    engine.add([4, 5, 6], SamplingParams(max_tokens=9, seed=2))
    for _ in range(4):
        engine.step()
    assert short in engine.scheduler.state.requests
    with pytest.raises(InvalidTransition, match="nothing to branch"):
        engine.fork(short, 1)
