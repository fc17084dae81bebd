"""Arrival: what can never fit, a bounded queue, the order of waiting requests, and rejections that leave no trace."""

import random
from typing import Any

import numpy as np
import pytest

from paceline.core.events import DecisionKind
from paceline.core.request import Request, RequestId, RequestState
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest, NeverFits, QueueFull
from tests.cases import first
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def describe(bench: Bench) -> dict[str, Any]:
    """Everything the scheduler holds, as plain values: equal before and after what must change nothing."""
    state = bench.state
    groups = [
        (
            group.pool.refs.tolist(),
            group.pool.free_blocks().tolist(),
            dict(group.cache.entries()),
            [group.blocks_of(row).tolist() for row in range(len(group.held))],
            group.reserved_for.tolist(),
            group.reserved,
        )
        for group in state.kv.groups
    ]
    columns = {
        name: value.tolist() for name, value in vars(state.rows).items() if isinstance(value, np.ndarray)
    }
    del columns["outputs"]
    return {
        "groups": groups,
        "rows": columns,
        "free rows": sorted(state.rows.free_rows()),
        "queue": sorted((request.id, request.state, request.num_tokens) for request in state.queue),
        "queued tokens": state.queue.num_tokens,
        "requests": {
            name: (r.state, r.row, len(r.keys), r.preemptions) for name, r in state.requests.items()
        },
        "lists": (dict(state.prefilling), dict(state.computing), dict(state.children), dict(state.orders)),
        "pending": (list(state.leaves), list(state.joins), len(state.flights), state.kv.delta.mark()),
        "places": [sorted(host.free_places()) for host in state.kv.places],
        "tickets": sorted(state.kv.tickets.open),
    }


# -- what can never fit ------------------------------------------------------------------------------------


def test_a_request_longer_than_the_model_is_refused_with_its_numbers() -> None:
    bench = Bench(engine_config(max_model_len=64))
    with pytest.raises(NeverFits) as caught:
        bench.add(prompt(40), 25)
    message = str(caught.value)
    assert "64" in message and "40" in message and "25" in message
    assert caught.value.param == "max_tokens"
    bench.add(prompt(40), 24)
    bench.run()


def test_a_request_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    bench = Bench(engine_config(num_blocks=9, max_model_len=128))
    with pytest.raises(NeverFits) as caught:
        bench.add(prompt(20), 13)
    assert "33" in str(caught.value) and "32" in str(caught.value)


@pytest.mark.parametrize("total", [33, 36, 128])
def test_a_request_of_one_block_more_than_the_pool_is_refused(total: int) -> None:
    """K2 and L6."""
    bench = Bench(engine_config(num_blocks=9, max_model_len=128))
    before = describe(bench)
    with pytest.raises(NeverFits, match=str(total)):
        bench.add(prompt(20), total - 20)
    assert describe(bench) == before
    assert bench.reasons(DecisionKind.REFUSE) == ["kv_capacity"]
    assert bench.state.counters.rejected == 1
    bench.add(prompt(5, 1), 3)
    bench.run()


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("max_tokens", [1, 2, 31])
def test_a_request_of_exactly_the_pool_succeeds_alone(max_tokens: int, depth: int) -> None:
    """K2."""
    bench = Bench(engine_config(depth=depth, num_blocks=9, watermark=0.5), overlapped=depth > 0)
    request = bench.add(prompt(32 - max_tokens), max_tokens)
    bench.run()
    assert len(bench.tokens[request]) == max_tokens


@pytest.mark.parametrize("depth", [0, 2])
def test_a_request_of_nearly_the_pool_waits_and_succeeds(depth: int) -> None:
    """K2: N - 1 blocks while others run."""
    bench = Bench(engine_config(depth=depth, num_blocks=9), overlapped=depth > 0)
    for start in range(3):
        bench.add(prompt(5, start), 5)
    large = bench.add(prompt(20, 9), 8)
    for start in range(3):
        bench.add(prompt(5, 20 + start), 5)
    bench.run()
    assert len(bench.tokens[large]) == 8


def test_a_request_is_accepted_once() -> None:
    bench = Bench()
    request = bench.add(prompt(4), 4)
    with pytest.raises(InvalidRequest, match="already known"):
        bench.scheduler.add([bench.request(request)])
    twin = Request(request, np.arange(3, dtype=np.int32), SamplingParams())
    with pytest.raises(InvalidRequest, match="already known"):
        bench.engine.add_request(twin)
    bench.run()


def test_ids_made_outside_are_not_given_out_again() -> None:
    bench = Bench()
    bench.engine.add_request(Request(RequestId(41), np.arange(3, dtype=np.int32), SamplingParams()))
    bench.expect(RequestId(41), range(3))
    assert bench.add(prompt(3)) == 42
    bench.run()


# -- the bounded queue -------------------------------------------------------------------------------------


def test_the_queue_is_bounded_by_requests() -> None:
    bench = Bench(engine_config(max_queue=3))
    for start in range(3):
        bench.add(prompt(4, start))
    before = describe(bench)
    with pytest.raises(QueueFull, match="3"):
        bench.add(prompt(4, 9))
    assert describe(bench) == before
    bench.step()
    bench.add(prompt(4, 9))
    bench.run()
    counters = bench.state.counters
    assert (counters.added, counters.finished, counters.rejected) == (5, 4, 1)


def test_the_queue_is_bounded_by_tokens() -> None:
    bench = Bench(engine_config(max_queue_tokens=10))
    bench.add(prompt(6))
    before = describe(bench)
    with pytest.raises(QueueFull):
        bench.add(prompt(5, 1))
    assert describe(bench) == before
    bench.add(prompt(4, 1))
    bench.run()


def test_a_queue_full_of_tokens_says_so() -> None:
    bench = Bench(engine_config(max_queue_tokens=13))
    bench.add(prompt(9))
    with pytest.raises(QueueFull, match=r"\b13\b"):
        bench.add(prompt(5, 1))


def test_a_preempted_request_comes_back_into_a_full_queue() -> None:
    bench = Bench(engine_config(max_queue=2, max_num_seqs=1))
    first = bench.add(prompt(4), 6)
    bench.step(2)
    bench.add(prompt(4, 1))
    bench.add(prompt(4, 2))
    assert bench.scheduler.preempt(first)
    with pytest.raises(QueueFull):
        bench.add(prompt(4, 3))
    bench.run()
    assert len(bench.tokens[first]) == 6


def test_branches_are_accepted_all_or_none() -> None:
    """Q4: eight where four have room."""
    bench = Bench(engine_config(max_queue=4))
    before = describe(bench)
    with pytest.raises(QueueFull):
        bench.add_all(prompt(4), n=8)
    assert describe(bench) == before
    assert bench.state.counters.added == bench.state.counters.rejected == 8
    assert len(bench.add_all(prompt(4), n=4)) == 4
    bench.run()


def test_branches_count_against_the_token_bound_together() -> None:
    bench = Bench(engine_config(max_queue_tokens=14))
    with pytest.raises(QueueFull):
        bench.add_all(prompt(5), n=3)
    assert not bench.state.requests and not bench.state.children
    bench.add_all(prompt(5), n=2)
    bench.run()


# -- order -------------------------------------------------------------------------------------------------


def served(bench: Bench) -> list[int]:
    """Requests in the order of their first computation."""
    bench.run()
    order: dict[int, None] = {}
    for seen in bench.seen:
        order.update(dict.fromkeys(seen.spans))
    return list(order)


def test_first_come_first_served_goes_by_arrival_not_by_call() -> None:
    bench = Bench(engine_config(max_num_seqs=1))
    late = bench.add(prompt(4), arrival_s=2.0)
    early = bench.add(prompt(4, 1), arrival_s=1.0)
    same = bench.add(prompt(4, 2), arrival_s=1.0)
    assert served(bench) == [early, same, late]


def test_lower_numbers_go_first_and_ties_by_arrival() -> None:
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy="priority"))
    ids = [bench.add(prompt(4, start), priority=level) for start, level in enumerate((1, 0, -1, 0))]
    assert served(bench) == [ids[2], ids[1], ids[3], ids[0]]


def test_waiting_long_enough_is_worth_a_level() -> None:
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy="priority", ageing_s=10.0))
    low = bench.add(prompt(4), priority=1)
    bench.clock.advance(9.0)
    still_before = bench.add(prompt(4, 1), priority=0)
    bench.clock.advance(2.0)
    too_late = bench.add(prompt(4, 2), priority=0)
    assert served(bench) == [still_before, low, too_late]


def test_the_lowest_priority_is_served_in_bounded_time() -> None:
    """F6: three levels at 0.1 s each, against a stream that never ends."""
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy="priority", ageing_s=0.1))
    low = bench.add(prompt(4), 2, priority=3)
    for start in range(1, 1000):
        bench.add(prompt(2, start), 2)  # each takes two steps: there is always one more waiting
        bench.step(2)
        if low in bench.finished:
            break
    assert bench.finished[low].time_s < 3 * 0.1 + 0.05
    bench.run()


def test_the_priority_of_a_waiting_request_can_be_changed() -> None:
    bench = Bench(engine_config(max_num_seqs=1, scheduling_policy="priority"))
    ids = [bench.add(prompt(4, start)) for start in range(3)]
    bench.scheduler.set_priority(ids[2], -1)
    assert served(bench) == [ids[2], ids[0], ids[1]]


# -- refusals leave no trace -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", first(4, range(12)))
def test_a_refused_admission_changes_nothing(seed: int) -> None:
    """S18: whatever the reason, trying to admit leaves every structure as it was."""
    rng = random.Random(seed)
    bench = Bench(engine_config(num_blocks=13, max_num_seqs=4, num_host_blocks=8))
    reasons = set()
    for start in range(40):
        if rng.random() < 0.6 and len(bench.state.queue) < 6:
            bench.add(prompt(rng.randint(1, 20), rng.choice((1, 2, start))), rng.randint(1, 20))
        running = [name for name, state in bench.states().items() if state is RequestState.RUNNING]
        if running and rng.random() < 0.2:
            bench.scheduler.preempt(RequestId(rng.choice(running)), swap=rng.random() < 0.5)
        admission = bench.scheduler.composer.admission
        for request in list(bench.state.queue):
            before = describe(bench)
            reason = admission.judge(request).rule
            assert describe(bench) == before, "asking changes nothing"
            if reason is not None:
                reasons.add(reason)
                assert admission.admit(request, budget_left=8).rule == reason
                assert describe(bench) == before
        bench.step()
    assert reasons >= {"blocks"}
    bench.run()
