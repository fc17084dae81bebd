"""Measuring: what the meter writes down is what the events and the state say, counted the slow way."""

import numpy as np
import pytest

from paceline.core.events import Finished, TokenEvents
from paceline.core.plan import StepPlan
from paceline.core.request import FinishReason, RequestId
from paceline.lab.measure import Meter, kv_slots
from paceline.lab.report.run_record import OUTCOMES
from paceline.lab.sim.replica import Replica
from paceline.lab.sim.run import RequestSource
from paceline.scheduler.state import SchedulerState
from tests.pure.lab.sim.sim_helpers import make_workload, random_workload, sim_config, small_engine


def tokens(time_s: float, *requests: int) -> TokenEvents:
    count = len(requests)
    return TokenEvents(
        seq=1,
        time_s=time_s,
        requests=np.array(requests, np.int64),
        tokens=np.zeros(count, np.int32),
        index=np.zeros(count, np.int64),
    )


def test_gaps_are_between_tokens_of_one_request() -> None:
    meter = Meter(make_workload([0.0] * 3))
    for time_s, requests in ((1.0, (0, 2)), (1.5, (2,)), (3.0, (0, 1, 2)), (3.25, (1,))):
        meter.tokens(tokens(time_s, *requests))
    record = meter.record("x", {}, max_num_seqs=1, num_replicas=1, kv_total_slots=1)
    assert sorted(record.itl_s.tolist()) == [0.25, 0.5, 1.5, 2.0]


def test_every_outcome_has_its_place() -> None:
    workload = make_workload([0.0] * 6)
    source = RequestSource(workload, sim_config())
    meter = Meter(workload)
    reasons = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
    for index, reason in enumerate(reasons):
        request = source.make(index)
        request.admitted_s, request.first_token_s = 1.0 + index, None if index == 2 else 2.0 + index
        finished = Finished(
            request=RequestId(index),
            reason=reason,
            detail="",
            time_s=5.0 + index,
            num_prompt=20,
            num_output=index,
            num_cached=8,
            preemptions=index,
        )
        meter.ended(finished, request)
    meter.refused(4, 30.0)
    record = meter.record("x", {"a": 1}, max_num_seqs=4, num_replicas=2, kv_total_slots=100)
    names = [OUTCOMES[code] for code in record.outcome.tolist()]
    assert names == ["finished", "finished", "aborted", "failed", "refused", "unfinished"]
    np.testing.assert_array_equal(record.finished_s, [5.0, 6.0, np.nan, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(record.first_token_s, [2.0, 3.0, np.nan, 5.0, np.nan, np.nan])
    np.testing.assert_array_equal(record.admitted_s, [1.0, 2.0, 3.0, 4.0, np.nan, np.nan])
    assert record.output_len.tolist() == [0, 1, 2, 3, 0, 0]
    assert record.cached_tokens.tolist() == [8, 8, 8, 8, 0, 0]
    assert record.preemptions.tolist() == [0, 1, 2, 3, 0, 0]
    assert (meter.num_ended, record.duration_s, record.num_replicas) == (5, 30.0, 2)


# ---------------------------------------------------------------- steps


def slow_kv_slots(state: SchedulerState) -> tuple[int, int]:
    """The same by looking at every slot of every block."""
    size = state.kv.block_size
    group, rows = state.kv.groups[0], state.rows
    used = {block for block in range(1, group.pool.num_blocks) if group.pool.refs[block] > 0}
    empty: set[tuple[int, int]] = set()
    for row in np.flatnonzero(rows.live).tolist():
        filled = min(int(rows.scheduled[row]), int(rows.max_len[row]))
        for slot in range(filled, int(group.held[row]) * size):
            empty.add((int(group.table[row, slot // size]), slot % size))
    return len(used) * size, len(used) * size - len(empty)


@pytest.mark.parametrize("mode", ["continuous", "dynamic", "static"])
@pytest.mark.parametrize("depth", [0, 1])
def test_the_steps_of_a_replica_are_written_down(mode: str, depth: int) -> None:
    workload = random_workload(40, 11)
    meter = Meter(workload)
    replica = Replica(0, sim_config(small_engine(mode=mode, depth=depth, num_blocks=200)), meter)
    state = replica.engine.scheduler.state
    expected: list[tuple[float, ...]] = []
    written = replica.runner.observe

    def observe(plan: StepPlan, start_s: float, end_s: float) -> None:
        padded = plan.pad_tokens + plan.padding_rows
        work = plan.work
        assert kv_slots(state) == slow_kv_slots(state)
        waiting = len(state.requests) - int(np.count_nonzero(state.rows.live))
        useful = (work.decode_rows - plan.padding_rows, work.prefill_tokens - plan.pad_tokens)
        expected.append((start_s, end_s, *useful, padded, waiting, *kv_slots(state)))
        written(plan, start_s, end_s)

    replica.runner.observe = observe
    source = RequestSource(workload, sim_config())
    for index in range(40):
        replica.add(source.make(index), 0.0)
    while replica.ready_s is not None:
        replica.step()
    record = meter.record("x", {}, max_num_seqs=8, num_replicas=1, kv_total_slots=199 * 8)
    columns = (
        record.step_start_s,
        record.step_end_s,
        record.step_decode,
        record.step_prefill,
        record.step_padded,
        record.step_waiting,
        record.step_kv_used,
        record.step_kv_filled,
    )
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert (record.outcome == OUTCOMES.index("finished")).all()
    # Every prompt token once, every output token but the first once: nothing is computed twice here.
    assert record.step_prefill.sum() == workload.prompt_len.sum()
    # A padded batch learns of a row's end a step late, and till then counts its tokens as wanted.
    late = depth * len(workload) if mode != "continuous" else 0
    wanted = int((workload.output_len - 1).sum())
    assert wanted <= record.step_decode.sum() <= wanted + late
    assert (record.step_padded.sum() > 0) == (mode != "continuous")
    assert (record.step_kv_filled <= record.step_kv_used).all()
    assert record.step_rows.max() <= 8
