"""A waiting request may take the place of a running one: by class, by length, by share, and never without end."""

from pathlib import Path
from typing import Any

import pytest

from paceline.config.engine import PreemptionCosts
from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import RequestState
from paceline.core.service_class import CLASS_PRIORITIES
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

# Waiting never pays, and neither does a copy.
DEAR_TO_WAIT = PreemptionCosts(token_s=1e-4, block_s=1.0, step_s=1.0)


def places_taken(bench: Bench) -> list[Decision]:
    everything = bench.watch.decisions + bench.state.decisions
    return [d for d in everything if d.reason in (Rule.PLACE_RECOMPUTE, Rule.PLACE_SWAP)]


def by_class(**options: Any) -> Bench:
    chosen: dict[str, Any] = {"scheduling_policy": "priority", "preemption_costs": DEAR_TO_WAIT}
    return Bench(engine_config(**{**chosen, **options}))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_higher_class_takes_a_row(depth: int) -> None:
    bench = Bench(
        engine_config(
            depth, max_num_seqs=2, scheduling_policy="priority", preemption_costs=DEAR_TO_WAIT, ageing_s=1e6
        ),
        overlapped=depth > 0,
    )
    first, second = (bench.add(prompt(8, start), 40, priority=2) for start in (1, 2))
    bench.step(6)
    urgent = bench.add(prompt(8, 3), 20, priority=0)
    bench.step(2 + depth)
    (taken,) = places_taken(bench)
    assert (taken.request, taken.against) == (second, urgent)
    assert taken.seconds > 0.0 and taken.detail.startswith("recompute ")
    assert bench.states()[first] is RequestState.RUNNING
    assert bench.states()[urgent] is RequestState.RUNNING
    bench.run()


def test_a_higher_class_takes_blocks_of_as_many_as_it_needs() -> None:
    bench = by_class(num_blocks=17, enable_prefix_caching=False, ageing_s=1e6)
    crowd = [bench.add(prompt(8, start), 24, priority=1 + start % 2) for start in range(1, 6)]
    bench.step(4)
    urgent = bench.add(prompt(24, 9), 4, priority=0)
    bench.step()
    taken = [decision.request for decision in places_taken(bench)]
    assert taken == [crowd[4], crowd[2]]  # of the lowest class, the last to come first, and no more
    assert bench.states()[urgent] is RequestState.RUNNING
    assert all(decision.against == urgent for decision in places_taken(bench))
    bench.run()


def test_the_same_class_waits() -> None:
    bench = by_class(max_num_seqs=1)
    bench.add(prompt(8, 1), 20, priority=1)
    bench.step(3)
    bench.add(prompt(8, 2), 4, priority=1)
    bench.run()
    assert not places_taken(bench)


def test_a_request_that_is_old_enough_is_left_alone() -> None:
    """Ageing: after half of what its level is worth no request of the next level takes its place."""
    for waited_s, count in ((0.4, 1), (0.6, 0)):
        bench = by_class(max_num_seqs=1, ageing_s=1.0)
        bench.add(prompt(8, 1), 30, priority=1)
        bench.step(3)
        bench.clock.advance(waited_s)
        bench.add(prompt(8, 2), 4, priority=0)
        bench.run()
        assert len(places_taken(bench)) == count


def test_no_request_is_displaced_again_before_it_is_further_than_it_was() -> None:
    bench = by_class(max_num_seqs=1, enable_prefix_caching=False, max_num_batched_tokens=4, ageing_s=1e6)
    victim = bench.add(prompt(16, 1), 30, priority=2)
    bench.step(8)
    bench.add(prompt(4, 2), 2, priority=0)
    while bench.states().get(victim) is RequestState.RUNNING or len(bench.states()) > 1:
        bench.step()
    while bench.states()[victim] is not RequestState.RUNNING:
        bench.step()
    (taken,) = places_taken(bench)
    again = bench.add(prompt(4, 3), 2, priority=0)
    while len(places_taken(bench)) < 2:
        bench.step()
        row = bench.request(victim).row
        assert row < 0 or len(places_taken(bench)) == 2 or bench.state.rows.computed[row] <= taken.value + 1
    assert places_taken(bench)[1].value > taken.value
    assert again in bench.states()
    bench.run()


def test_to_wait_for_a_request_that_ends_soon_is_cheaper_and_on_record() -> None:
    costs = PreemptionCosts(token_s=1.0, block_s=10.0, step_s=1e-3)
    bench = by_class(max_num_seqs=1, preemption_costs=costs)
    bench.add(prompt(8, 1), 12, priority=1)
    bench.step(3)
    urgent = bench.add(prompt(8, 2), 4, priority=0)
    bench.run()
    assert not places_taken(bench)
    (deferral,) = [d for d in bench.watch.decisions if d.kind is DecisionKind.DEFER and d.request == urgent]
    assert deferral.reason is Rule.ROWS
    assert "wait" in deferral.detail and "recompute" in deferral.detail


def test_a_much_shorter_request_takes_a_place() -> None:
    options = {"prompt_handicap_ms": 100.0, "output_handicap_ms": 100.0, "ageing_s": 1e6}
    for output, count in ((2, 1), (12, 0)):
        bench = by_class(max_num_seqs=1, scheduling_policy="shortest", **options)
        bench.add(prompt(8, 1), 60)
        bench.step(3)
        bench.add(prompt(4, 2), output)
        bench.run()
        assert len(places_taken(bench)) == count


def test_a_small_request_that_has_waited_takes_the_place_of_a_large_one() -> None:
    bench = by_class(max_num_seqs=1, scheduling_policy="tail", max_model_len=8192, num_blocks=4096)
    bench.add(prompt(4000, 1), 30)
    bench.step(2)
    bench.clock.advance(0.01)
    bench.add(prompt(1, 2), 2)
    bench.step(2)
    assert not places_taken(bench)  # it has just come
    bench.clock.advance(1.0)
    bench.step()
    assert len(places_taken(bench)) == 1
    bench.watch.check = False
    bench.run(limit=4000)


def test_a_tenant_with_little_running_takes_the_place_of_one_that_floods() -> None:
    bench = by_class(max_num_seqs=4, scheduling_policy="fair", flood_tokens=40)
    flood = [bench.add(prompt(8, start), 30, tenant="flood") for start in range(1, 9)]
    bench.step(6)
    quiet = bench.add(prompt(4, 20), 4, tenant="quiet")
    bench.step(2)
    (taken,) = places_taken(bench)
    assert taken.request in flood[:4] and taken.against == quiet
    # The next ones of the same tenant would have to leave the other less than four times of what it has.
    for start in range(21, 24):
        bench.add(prompt(8, start), 4, tenant="quiet")
    bench.step()
    live = bench.state.rows.requests
    running = [request.tenant for request in live if request is not None]
    assert running.count("flood") >= 2
    bench.run()


def test_tenants_that_have_only_just_come_leave_each_other_alone() -> None:
    bench = by_class(max_num_seqs=4, scheduling_policy="fair")
    for start in range(1, 9):
        bench.add(prompt(8, start), 30, tenant="busy")
    bench.step(6)
    bench.add(prompt(4, 20), 4, tenant="quiet")
    bench.run()
    assert not places_taken(bench)


def test_an_urgent_request_gets_its_tokens_before_a_prompt_under_way() -> None:
    bench = by_class(max_num_batched_tokens=8, long_prefill_share=1.0)
    long = bench.add(prompt(64, 1), 4, priority=2)
    bench.step(2)
    urgent = bench.add(prompt(8, 2), 4, priority=0)
    seen = bench.step()
    assert seen is not None and seen.spans == {urgent: 8}
    assert bench.states()[long] is RequestState.RUNNING
    bench.run()


def test_what_an_urgent_request_waits_for_is_as_urgent() -> None:
    """F3: the prompt whose prefix it shares goes on; it is not passed by others of the urgent class."""
    bench = by_class(max_num_batched_tokens=8, long_prefill_share=1.0)
    owner = bench.add(prompt(64, 1), 4, priority=2)
    bench.step(2)
    bench.add([*prompt(64, 1)[:60], 7], 4, priority=0)
    others = [bench.add(prompt(64, start), 4, priority=0) for start in (2, 3)]
    seen = bench.step()
    assert seen is not None and owner in seen.spans
    assert not any(other in seen.spans for other in others)
    bench.run()


def test_a_request_goes_before_those_prompts_only_that_it_outranks() -> None:
    """F3: one that outranks all of them waits for its adapter, and is no reason to pass the first for others."""
    bench = by_class(max_num_batched_tokens=8, long_prefill_share=0.5, max_loras=1, ageing_s=1e6)
    for name in ("1", "2"):
        bench.engine.adapters.load("", Path(name))
    first, last = (bench.add(prompt(64, priority), 4, priority=priority) for priority in (1, 3))
    bench.step()
    assert bench.states()[last] is RequestState.RUNNING
    bench.add(prompt(8, 4), 4, priority=0, adapter=2)
    between = [bench.add(prompt(8, start), 4, priority=2) for start in (5, 6)]
    seen = bench.step()
    assert seen is not None and seen.spans == {first: 4, between[0]: 4}
    bench.reads.finish()
    bench.run()


def test_rows_of_a_lower_class_leave_a_step_to_an_urgent_prompt() -> None:
    bench = by_class(max_num_batched_tokens=8, long_prefill_share=1.0)
    rows = [bench.add(prompt(2, start), 30, priority=2) for start in range(1, 5)]
    bench.step(3)
    urgent = bench.add(prompt(16, 9), 4, priority=0)
    steps = [bench.step() for _ in range(2)]
    assert [seen.spans for seen in steps if seen is not None] == [{urgent: 8}, {urgent: 8}]
    assert all(seen is not None and not seen.decodes for seen in steps)
    seen = bench.step()
    assert seen is not None and seen.decodes == {*rows, urgent}
    bench.run()


def test_first_come_first_served_displaces_no_request() -> None:
    bench = by_class(scheduling_policy="fcfs", max_num_seqs=1)
    bench.add(prompt(8, 1), 20, priority=9)
    bench.step(2)
    bench.add(prompt(2, 2), 1, priority=0)
    bench.run()
    assert not places_taken(bench)


def test_batch_work_never_starves() -> None:
    """Interactive work keeps coming, more than there is room for: batch work runs once its age makes up for that."""
    ageing_s = 0.05
    bench = by_class(max_num_seqs=1, ageing_s=ageing_s)
    levels = CLASS_PRIORITIES["batch"] - CLASS_PRIORITIES["interactive"]
    batch = bench.add(prompt(4, 1), 12, service_class="batch")
    start = 2
    while batch not in bench.finished:
        if sum(request.priority < 0 for request in bench.state.requests.values()) < 3:
            bench.add(prompt(4, start), 6, service_class="interactive")
            start += 1
        bench.step()
        assert bench.clock.now() < 2 * levels * ageing_s, "the bound of its wait has passed"
    assert start > 4, "no request went before it"
    bench.run()
