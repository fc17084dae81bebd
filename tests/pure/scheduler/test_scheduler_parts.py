"""The small parts: policies as pure functions, the queue's columns, the row table, and what policies see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.engine import SchedulerConfig
from paceline.core.request import NO_ROW, Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import ServiceLevel
from paceline.policy import Policy, RequestView, Victim
from paceline.scheduler.policy import make_policy
from paceline.scheduler.policy.fcfs import FirstComeFirstServed
from paceline.scheduler.policy.priority import PriorityWithAgeing
from paceline.scheduler.policy.shortest import ShortestFirst
from paceline.scheduler.rows import Rows
from paceline.scheduler.waiting_queue import WaitingQueue, first
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt
from tests.pure.scheduler.test_scheduler_policies import view_of as view_with

entries = st.lists(st.tuples(st.integers(0, 4), st.integers(-2, 2)), min_size=1, max_size=40)


def view_of(pairs: list[tuple[int, int]], now_s: float = 10.0) -> RequestView:
    """Requests with (arrival, priority), in the order they came."""
    arrivals, priorities = zip(*pairs, strict=True)
    return view_with(len(pairs), now_s, arrival_s=arrivals, priority=priorities)


def request(number: int, length: int = 3, **options: Any) -> Request:
    return Request(
        RequestId(number), np.arange(length, dtype=np.int32), SamplingParams(max_tokens=4), **options
    )


# -- policies ----------------------------------------------------------------------------------------------


@given(entries)
def test_the_victim_is_the_last_in_order(pairs: list[tuple[int, int]]) -> None:
    view = view_of(pairs)
    for policy, rank in (
        (FirstComeFirstServed(SchedulerConfig()), lambda at: (pairs[at][0], at)),
        (PriorityWithAgeing(SchedulerConfig(ageing_s=1e9)), lambda at: (pairs[at][1], pairs[at][0], at)),
    ):
        expected = max(range(len(pairs)), key=rank)
        assert policy.victim(view, 1) == Victim(expected)


@given(entries, st.floats(10, 1e4), st.floats(10, 1e4))
def test_the_order_of_two_requests_never_changes_while_they_wait(
    pairs: list[tuple[int, int]], now_s: float, later_s: float
) -> None:
    policy = PriorityWithAgeing(SchedulerConfig(ageing_s=3.0))
    one, other = (policy.order(view_of(pairs, time_s)) for time_s in (now_s, later_s))
    differences = np.subtract.outer(one, one), np.subtract.outer(other, other)
    assert np.allclose(*differences, atol=1e-6)


@given(entries)
def test_policies_are_pure(pairs: list[tuple[int, int]]) -> None:
    for policy in (
        FirstComeFirstServed(SchedulerConfig()),
        PriorityWithAgeing(SchedulerConfig(ageing_s=3.0)),
    ):
        view = view_of(pairs)
        assert policy.order(view).tolist() == policy.order(view).tolist()
        assert policy.victim(view, 3) == policy.victim(view, 3)


@pytest.mark.parametrize(
    ("share", "budget", "tokens"), [(0.5, 100, 50), (1.0, 7, 7), (0.1, 5, 1), (1e-6, 2048, 1)]
)
def test_the_share_of_a_prompt_is_at_least_one_token(share: float, budget: int, tokens: int) -> None:
    assert (
        FirstComeFirstServed(SchedulerConfig(long_prefill_share=share)).share(view_of([(0, 0)]), budget)
        == tokens
    )


def test_the_config_names_the_policy() -> None:
    assert type(make_policy(SchedulerConfig(scheduling_policy="fcfs"))) is FirstComeFirstServed
    assert type(make_policy(SchedulerConfig(scheduling_policy="priority"))) is PriorityWithAgeing
    assert type(make_policy(SchedulerConfig(scheduling_policy="shortest"))) is ShortestFirst


def shortest(prompt_ms: float, output_ms: float, bound_s: float) -> ShortestFirst:
    return ShortestFirst(
        SchedulerConfig(prompt_handicap_ms=prompt_ms, output_handicap_ms=output_ms, ageing_s=bound_s)
    )


def test_a_long_prompt_counts_as_one_that_came_later() -> None:
    view = view_of([(0, 0), (1, 0), (2, 0), (3, 0)])
    view = replace(view, num_prompt=np.array([5000, 1000, 10, 5000]))
    view = replace(view, max_total=view.num_prompt)
    scores = shortest(1, 0, 10.0).order(view)
    assert first(view, scores, 4).tolist() == [1, 2, 0, 3]  # at 5, 2, 2.01 and 8 seconds
    scores = shortest(0, 1000, 10.0).order(view)
    assert scores.tolist() == [0.0, 1.0, 2.0, 3.0]
    view = replace(view, max_total=view.num_prompt + np.array([9, 1, 1, 1]))
    scores = shortest(0, 1000, 5.0).order(view)
    assert scores.tolist() == [5.0, 2.0, 3.0, 4.0]


def test_no_prompt_is_put_back_without_a_bound() -> None:
    view = replace(view_of([(0, 0), (9, 0)]), num_prompt=np.array([10**6, 10]))
    scores = shortest(1, 1000, 9.0).order(view)
    assert first(view, scores, 2).tolist() == [0, 1]


class OldestGoes(Policy):
    """A policy of one's own, through the seam: the last to come goes first, and swaps."""

    def order(self, view: RequestView) -> Any:
        return -view.arrival_s

    def victim(self, view: RequestView, need: int) -> Victim:
        return Victim(int(np.argmin(view.arrival_s)), swap=True)


def test_a_policy_of_ones_own_decides() -> None:
    bench = Bench(
        engine_config(max_num_seqs=2, num_blocks=7, num_host_blocks=8),
        policy=OldestGoes(SchedulerConfig(long_prefill_share=1.0)),
    )
    ids = [bench.add(prompt(4, start), 18, arrival_s=float(start)) for start in range(3)]
    seen = bench.step()
    assert seen is not None and seen.spans.keys() == {ids[2], ids[1]}
    bench.run()
    assert bench.state.counters.swapped > 0, "it asked for swaps, whatever the config says"


# -- the queue ---------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from((0.0, 1.0, 2.0, 3.5)), min_size=1, max_size=60), st.integers(1, 60))
def test_the_first_of_many_are_what_sorting_gives(scores: list[float], count: int) -> None:
    view = view_of([(0, 0)] * len(scores))
    expected = sorted(range(len(scores)), key=lambda at: (scores[at], at))[:count]
    assert first(view, np.array(scores), count).tolist() == expected


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200)), max_size=250))
def test_the_queue_agrees_with_a_list(moves: list[tuple[bool, int]]) -> None:
    queue = WaitingQueue()
    here: dict[int, Request] = {}
    for number, (push, which) in enumerate(moves):
        if push or not here:
            here[number] = request(
                number, 1 + which % 7, arrival_s=float(which), service_level=ServiceLevel(priority=which % 3)
            )
            queue.push(here[number], order=number, tenant=which % 2)
        else:
            queue.remove(here.pop(sorted(here)[which % len(here)]))
    view = queue.view(0.0)
    assert len(queue) == len(view) == len(here)
    assert queue.num_tokens == sum(r.num_tokens for r in here.values())
    assert sorted(r.id for r in queue) == sorted(here)
    for at in range(len(queue)):
        found = queue.get(at)
        assert found.id in queue
        says = (found.id, found.arrival_s, found.priority, found.num_tokens, found.max_total)
        columns = (view.order, view.arrival_s, view.priority, view.num_tokens, view.max_total)
        assert tuple(column[at] for column in columns) == says


def test_a_view_cannot_be_written() -> None:
    queue = WaitingQueue()
    queue.push(request(1), order=0, tenant=0)
    with pytest.raises(ValueError, match="read-only"):
        queue.view(0.0).priority[0] = 3


def test_the_priority_of_a_waiting_request_is_in_the_column_at_once() -> None:
    queue = WaitingQueue()
    waiting = request(1)
    queue.push(waiting, order=0, tenant=0)
    waiting.service_level = ServiceLevel(priority=-4)
    queue.set_priority(waiting)
    assert queue.view(0.0).priority.tolist() == [-4]


# -- the row table -----------------------------------------------------------------------------------------


def place(rows: Rows, request: Request, order: int = 0, tenant: int = 0) -> int:
    return rows.take(request, order, tenant, 0)


def test_a_row_rests_until_the_steps_before_it_are_done() -> None:
    rows = Rows(2, 16)
    one = request(1)
    row = place(rows, one)
    generation = int(rows.generation[row])
    rows.leave(one, fence=3, completed=1)
    assert rows.num_free == 1 and rows.fenced_rows() == [row]
    assert int(rows.generation[row]) != generation, "a late result is dropped"
    rows.complete(2)
    assert rows.num_free == 1
    rows.complete(3)
    assert sorted(rows.free_rows()) == [0, 1]


def test_a_row_is_written_anew_for_its_next_owner() -> None:
    """S23: nothing of the one before is left in any column."""
    used, fresh = Rows(1, 16), Rows(1, 16)
    before = request(1, 9, service_level=ServiceLevel(priority=3), arrival_s=4.0)
    before.preemptions = 2
    row = place(used, before, order=7, tenant=5)
    for name in ("computed", "scheduled", "pad", "pad_left", "num_tokens"):
        getattr(used, name)[row] = 6
    for name in ("decoding", "padding", "done", "sharing"):
        getattr(used, name)[row] = True
    used.reserve(row)
    used.num_tokens[row] = 9
    used.leave(before, fence=0, completed=0)
    for rows in (used, fresh):
        after = request(2)
        place(rows, after, order=8, tenant=0)
    compared = [name for name, value in vars(used).items() if isinstance(value, np.ndarray)]
    assert len(compared) > 15
    for name in set(compared) - {"generation", "outputs"}:
        assert getattr(used, name).tolist() == getattr(fresh, name).tolist(), name
    assert (used.num_live, used.num_reserved) == (1, 0)


def test_a_request_takes_its_output_along_when_it_leaves() -> None:
    rows = Rows(1, 16)
    mine = request(1)
    row = place(rows, mine)
    rows.outputs[row, :2] = (41, 42)
    rows.num_tokens[row] += 2
    rows.leave(mine, fence=0, completed=0)
    assert mine.tokens.tolist() == [0, 1, 2, 41, 42]
    assert mine.row == NO_ROW
    place(rows, mine)
    assert (rows.num_known[0], rows.num_tokens[0], rows.num_prompt[0]) == (5, 5, 3)


def test_the_lowest_free_row_is_taken() -> None:
    rows = Rows(3, 16)
    requests = [request(number) for number in range(3)]
    assert [place(rows, one) for one in requests] == [0, 1, 2]
    for number in (2, 0):
        rows.leave(requests[number], fence=0, completed=0)
    assert place(rows, request(9)) == 0
    assert rows.high == 3


# ----------------------------------------------------------------
# What policies see: every column of a view is what the requests themselves say, whatever happened to them.


def running(bench: Bench) -> RequestView:
    state = bench.scheduler.state
    return state.row_view(np.flatnonzero(state.rows.live))


def waiting(bench: Bench) -> RequestView:
    state = bench.scheduler.state
    return state.queue.view(state.now_s)


@pytest.mark.parametrize("deadline_s", [None, 50.0])
def test_a_deadline_is_in_the_column_wherever_the_request_is(deadline_s: float | None) -> None:
    bench = Bench(engine_config(max_num_seqs=1))
    first = bench.add(prompt(3), max_tokens=8, deadline_s=deadline_s)
    second = bench.add(prompt(3), max_tokens=8, deadline_s=deadline_s)
    bench.step()
    due_s = math.inf if deadline_s is None else deadline_s
    assert running(bench).deadline_s.tolist() == [due_s]
    assert waiting(bench).deadline_s.tolist() == [due_s]
    bench.scheduler.set_deadline(first, 70.0)
    bench.scheduler.set_deadline(second, 80.0)
    assert running(bench).deadline_s.tolist() == [70.0]
    assert waiting(bench).deadline_s.tolist() == [80.0]
    bench.scheduler.set_deadline(second, None)
    assert waiting(bench).deadline_s.tolist() == [math.inf]


def test_peak_computed_is_kept_when_a_request_is_preempted() -> None:
    bench = Bench(engine_config())
    rid = bench.add(prompt(5), max_tokens=8)
    assert waiting(bench).started.tolist() == [0]
    for _ in range(3):
        bench.step()
    view = running(bench)
    computed = int(view.num_computed[0])
    assert computed >= 6 and view.peak_computed.tolist() == [computed] and view.started.tolist() == [1]
    assert view.num_output.tolist() == [computed - 5 + 1]
    bench.scheduler.preempt(rid)
    view = waiting(bench)
    assert view.row.tolist() == [NO_ROW] and view.started.tolist() == [1]
    assert (view.num_computed.tolist(), view.peak_computed.tolist()) == ([0], [computed])
    assert view.num_output.tolist() == [computed - 5 + 1]
    bench.step()  # computes again what it had: nothing new is peak_computed before it has got on
    assert running(bench).peak_computed[0] >= computed


def test_tokens_kept_on_the_host_count_as_computed() -> None:
    bench = Bench(engine_config(num_host_blocks=16))
    rid = bench.add(prompt(5), max_tokens=8)
    for _ in range(3):
        bench.step()
    computed = int(running(bench).num_computed[0])
    bench.scheduler.preempt(RequestId(rid), swap=True)
    assert waiting(bench).num_computed.tolist() == [computed]
