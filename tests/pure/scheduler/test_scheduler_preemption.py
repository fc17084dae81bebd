"""Which requests are preempted when blocks run out, how often, and for which blocks are reserved."""

from collections.abc import Callable

import pytest

from paceline.core.events import DecisionKind
from paceline.core.request import RequestId, RequestState
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def victims(bench: Bench) -> list[int]:
    """Requests preempted for blocks, in order."""
    found = bench.watch.decisions + bench.state.decisions
    return [d.request for d in found if d.kind is DecisionKind.PREEMPT and d.reason.startswith("blocks")]


def crowd(bench: Bench, count: int, max_tokens: int = 20) -> list[RequestId]:
    """Requests that start with one full block each, and will need more at the same time."""
    ids = [bench.add(prompt(4, start), max_tokens) for start in range(count)]
    bench.step()
    return ids


def step_until(bench: Bench, condition: Callable[[], object], limit: int = 300) -> None:
    for _ in range(limit):
        if condition():
            return
        bench.step()
    raise AssertionError("it never happened")


def test_the_youngest_is_preempted() -> None:
    bench = Bench(engine_config(num_blocks=7))
    ids = crowd(bench, 4)
    step_until(bench, lambda: victims(bench))
    assert victims(bench)[0] == ids[3]
    bench.run()


def test_the_lowest_priority_is_preempted_and_among_equals_the_youngest() -> None:
    bench = Bench(engine_config(num_blocks=7, scheduling_policy="priority"))
    ids = [bench.add(prompt(4, start), 20, priority=level) for start, level in enumerate((2, 0, 2, 1))]
    step_until(bench, lambda: len(victims(bench)) >= 2)
    assert victims(bench)[:2] == [ids[2], ids[0]]
    bench.run()


def test_the_first_in_order_is_never_preempted() -> None:
    bench = Bench(engine_config(num_blocks=9, max_model_len=32))
    ids = crowd(bench, 6, max_tokens=26)
    bench.run()
    assert bench.finished[ids[0]].preemptions == 0
    assert sum(ending.preemptions for ending in bench.finished.values()) > 0


def test_a_victim_comes_back_at_its_old_place() -> None:
    """F2: it waits before every request that came after it."""
    bench = Bench(engine_config(num_blocks=7))
    ids = crowd(bench, 4)
    late = bench.add(prompt(4, 9), 4)
    step_until(bench, lambda: ids[3] in victims(bench))
    bench.run()
    order = sorted(bench.finished.values(), key=lambda ending: ending.time_s)
    assert [ending.request for ending in order][-2:] in ([ids[3], late], [late, ids[3]])
    joined = [seen.spans for seen in bench.seen]
    again = next(at for at, spans in enumerate(joined) if at > 5 and ids[3] in spans)
    first = next(at for at, spans in enumerate(joined) if late in spans)
    assert again <= first


@pytest.mark.parametrize("kind", ["recompute", "swap"])
def test_what_was_computed_is_computed_again_or_comes_back(kind: str) -> None:
    bench = Bench(engine_config(num_blocks=7, num_host_blocks=12, preemption=kind))
    crowd(bench, 4)
    step_until(bench, lambda: victims(bench))
    reason = bench.reasons(DecisionKind.PREEMPT)[0]
    assert reason == f"blocks:{kind}"
    expected = RequestState.SWAPPED if kind == "swap" else RequestState.WAITING
    assert bench.states()[victims(bench)[0]] is expected
    bench.run()
    assert (bench.state.counters.swapped > 0) == (kind == "swap")


def test_without_host_places_a_swap_becomes_a_recompute() -> None:
    bench = Bench(engine_config(num_blocks=7, num_host_blocks=0, preemption="swap"))
    crowd(bench, 4)
    step_until(bench, lambda: victims(bench))
    assert bench.reasons(DecisionKind.PREEMPT)[0] == "blocks:recompute"
    bench.run()


def test_a_swapped_request_comes_back_without_computing_its_prompt_again() -> None:
    bench = Bench(engine_config(num_host_blocks=12, enable_prefix_caching=False))
    request = bench.add(prompt(12), 6)
    bench.step(2)
    assert bench.scheduler.preempt(request, swap=True)
    assert bench.states()[request] is RequestState.SWAPPED
    before = len(bench.seen)
    bench.run()
    again = [seen.spans[request] for seen in bench.seen[before:] if request in seen.spans]
    assert again == [1], "only the token whose KV was not there yet"


# -- the bound ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_no_request_is_preempted_more_often_than_allowed(limit: int) -> None:
    """K1 and L5: 8 blocks, 32 requests, all finish."""
    bench = Bench(engine_config(num_blocks=9, max_model_len=24, max_preemptions=limit, max_num_seqs=6))
    for start in range(32):
        bench.add(prompt(3 + start % 5, start), 6 + start % 11)
    bench.run()
    assert 0 < max(ending.preemptions for ending in bench.finished.values()) <= limit
    assert {ending.reason.value for ending in bench.finished.values()} == {"length"}


def often_preempted(bench: Bench, tokens: list[int], max_tokens: int) -> RequestId:
    """A request that has used up its preemptions and waits."""
    request = bench.add(tokens, max_tokens)
    for _ in range(bench.config.scheduler.max_preemptions):
        bench.step()
        assert bench.scheduler.preempt(request)
    return request


def test_after_its_last_preemption_a_request_is_reserved_its_full_length() -> None:
    bench = Bench(engine_config(num_blocks=21, max_preemptions=2))
    request = often_preempted(bench, prompt(6), 14)
    bench.step()
    assert bench.request(request).reserved
    group = bench.state.kv.groups[0]
    held = int(group.held[bench.request(request).row])
    assert group.reserved + held == 6, "five blocks for 20 tokens, and one for a copy on write"
    assert not bench.scheduler.preempt(request), "it is never preempted again"
    for start in range(1, 6):
        bench.add(prompt(8, start), 30)
    bench.run()
    assert bench.finished[request].preemptions == 2


def test_it_waits_until_its_full_length_can_be_reserved() -> None:
    bench = Bench(engine_config(num_blocks=13, max_preemptions=1))
    request = often_preempted(bench, prompt(6), 30)  # nine blocks and one
    other = bench.add(prompt(14, 1), 3, arrival_s=-1.0)  # goes first, and holds four or five of twelve
    bench.step()
    assert bench.states()[other] is RequestState.RUNNING
    assert bench.states()[request] is RequestState.WAITING
    assert bench.reasons(DecisionKind.DEFER, request) == ["reserve"]
    bench.run()


def test_at_most_half_the_pool_is_reserved() -> None:
    bench = Bench(engine_config(num_blocks=21, max_preemptions=1))
    first = often_preempted(bench, prompt(6, 1), 10)
    second = often_preempted(bench, prompt(6, 2), 10)
    third = often_preempted(bench, prompt(6, 3), 10)
    bench.step()
    states = bench.states()
    reserved = [name for name in (first, second, third) if states[name] is RequestState.RUNNING]
    assert reserved == [first, second], "five blocks each, ten of twenty"
    bench.run()


def test_alone_a_request_may_be_reserved_more_than_half() -> None:
    bench = Bench(engine_config(num_blocks=13, max_preemptions=1))
    request = often_preempted(bench, prompt(6), 40)  # twelve of twelve blocks
    bench.step()
    assert bench.request(request).reserved
    bench.run()


def test_without_a_limit_no_request_is_reserved() -> None:
    bench = Bench(engine_config(max_preemptions=0))
    request = bench.add(prompt(6), 14)
    for _ in range(7):
        bench.step()
        assert bench.scheduler.preempt(request)
    bench.step()
    assert not bench.request(request).reserved
    bench.run()
    assert bench.finished[request].preemptions == 7


def test_a_forced_preemption_of_a_request_without_a_row_is_rejected() -> None:
    bench = Bench()
    request = bench.add(prompt(6), 4)
    assert not bench.scheduler.preempt(request)
    bench.step()
    assert bench.scheduler.preempt(request)
    assert not bench.scheduler.preempt(request)
    bench.run()
