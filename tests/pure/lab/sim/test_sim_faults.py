"""Faults: drawn from the seed, as often as asked for, and harmless to what must hold."""

import numpy as np
import pytest

from paceline.core.clock import ManualClock
from paceline.core.request import NoHooks
from paceline.errors import InputError
from paceline.factory import build_scheduler
from paceline.lab.sim.faults import (
    BURST_SIZE,
    NEVER,
    FaultSpec,
    ReplicaFaults,
    draw_aborts,
    parse_faults,
    with_bursts,
)
from paceline.lab.sim.run import RequestSource
from tests.pure.lab.sim.sim_helpers import make_workload, random_workload, sim_config, small_engine


def test_a_spec_is_read_from_text() -> None:
    spec = parse_faults("aborts=0.1, stalls=0.01,alloc=1,preempt=0,bursts=.5")
    assert spec == FaultSpec(aborts=0.1, stalls=0.01, alloc=1.0, preempt=0.0, bursts=0.5)
    assert parse_faults("") == FaultSpec()
    assert not FaultSpec(aborts=0.5, bursts=0.5).any_per_step
    assert FaultSpec(preempt=0.1).any_per_step


@pytest.mark.parametrize(
    "text",
    [
        "abort=0.1",
        "aborts",
        "aborts=",
        "aborts=x",
        "aborts=1.1",
        "aborts=-0.1",
        "aborts=nan",
        "aborts=0.1,aborts=0.2",
        "0.1",
    ],
)
def test_bad_specs_are_refused_in_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_faults(text)
    assert "faults" in str(caught.value) and "\n" not in str(caught.value)


def test_bursts_add_copies_of_requests_at_common_moments() -> None:
    workload = random_workload(400, 3, tenants=3)
    more = with_bursts(workload, 0.25, seed=1)
    assert len(more) == 500
    assert (np.diff(more.arrival_s) >= 0).all()
    moments, counts = np.unique(more.arrival_s, return_counts=True)
    bursts = counts[counts > 1]
    assert bursts.tolist() and bursts.max() == BURST_SIZE and bursts.sum() == 100
    assert moments.max() <= workload.duration_s
    triples = set(
        zip(workload.prompt_len.tolist(), workload.output_len.tolist(), workload.tenant.tolist(), strict=True)
    )
    assert (
        set(zip(more.prompt_len.tolist(), more.output_len.tolist(), more.tenant.tolist(), strict=True))
        <= triples
    )
    np.testing.assert_array_equal(more.arrival_s, with_bursts(workload, 0.25, seed=1).arrival_s)
    assert with_bursts(workload, 0.0, seed=1) is workload


def test_bursts_copy_prefixes_along() -> None:
    workload = make_workload([0.0, 9.0], prompt=[32, 64], prefix_ids=[(1,), (2, 3)], prefix_block=32)
    more = with_bursts(workload, 1.0, seed=4)
    assert more.prefix_ids is not None and len(more) == 4
    assert all(
        len(ids) * 32 == length for ids, length in zip(more.prefix_ids, more.prompt_len.tolist(), strict=True)
    )


def test_aborts_come_at_a_time_or_at_a_token_and_at_most_once() -> None:
    workload = random_workload(4000, 5)
    aborts = draw_aborts(workload, 0.3, seed=2)
    assert aborts is not None
    by_time, by_token = np.isfinite(aborts.at_s), aborts.at_token != NEVER
    assert not (by_time & by_token).any()
    assert 0.27 < (by_time | by_token).mean() < 0.33
    assert by_time.sum() > 100
    assert (aborts.at_token[by_token] < workload.output_len[by_token]).all()
    assert (aborts.at_s[by_time] >= workload.arrival_s[by_time]).all()
    again = draw_aborts(workload, 0.3, seed=2)
    assert again is not None
    np.testing.assert_array_equal(aborts.at_token, again.at_token)
    assert draw_aborts(workload, 0.0, seed=2) is None


def test_stalls_come_as_often_as_asked_and_repeat_by_seed() -> None:
    factors = [ReplicaFaults(FaultSpec(stalls=0.2), 7, 0).stretch() for _ in range(1)]
    faults = ReplicaFaults(FaultSpec(stalls=0.2), 7, 0)
    drawn = [faults.stretch() for _ in range(3000)]
    assert drawn[:1] == factors
    stalled = [factor for factor in drawn if factor != 1.0]
    assert 0.17 < len(stalled) / len(drawn) < 0.23
    assert min(stalled) >= 2.0 and max(stalled) <= 50.0 and max(stalled) > 30.0
    other = ReplicaFaults(FaultSpec(stalls=0.2), 7, 1)
    assert [other.stretch() for _ in range(100)] != drawn[:100], "replicas stall at different times"
    never = ReplicaFaults(FaultSpec(), 7, 0)
    assert {never.stretch() for _ in range(100)} == {1.0}


def test_forced_preemptions_and_refusals_reach_the_scheduler() -> None:
    faults = ReplicaFaults(FaultSpec(alloc=0.5, preempt=1.0), 3, 0)
    scheduler = build_scheduler(small_engine(), ManualClock(), NoHooks())
    pool = scheduler.state.kv.groups[0].pool
    workload = make_workload([0.0] * 4)
    source = RequestSource(workload, sim_config())
    scheduler.add([source.make(index) for index in range(4)])
    faults.before_step(scheduler)
    assert scheduler.state.counters.preempted == 0, "no request runs yet"
    pool.withheld = 0
    assert scheduler.schedule() is not None
    refused = []
    for _ in range(40):
        faults.before_step(scheduler)
        refused.append(pool.available == 0)
    assert scheduler.state.counters.preempted > 0
    assert 5 < sum(refused) < 35
