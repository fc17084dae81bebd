"""Prefix reuse: across requests, after preemption, behind a request that computes it, and never across tenants."""

from typing import Any

import pytest

from paceline.core.events import DecisionKind
from paceline.core.request import Request, RequestState
from paceline.engine.prefix_keys import PrefixKeyHooks
from tests.dst.injected import CollidingKeyMaker
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt


def computed(bench: Bench, request_id: int) -> int:
    """Known tokens a request has computed so far, over all steps."""
    return sum(seen.spans.get(request_id, 0) for seen in bench.seen)


def test_a_second_request_computes_only_what_is_new() -> None:
    bench = Bench()
    first = bench.add(prompt(16), 2)
    bench.run()
    second = bench.add(prompt(16) + prompt(5, 1), 2)
    bench.run()
    assert computed(bench, first) == 16
    assert computed(bench, second) == 5
    assert bench.finished[second].num_cached == 16
    assert bench.finished[first].num_cached == 0


@pytest.mark.parametrize(("length", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_an_equal_prompt_computes_at_least_its_last_token(length: int, cached: int) -> None:
    bench = Bench()
    for _ in range(2):
        request = bench.add(prompt(length), 2)
        bench.run()
    assert bench.finished[request].num_cached == cached


def test_the_output_is_part_of_what_is_reused() -> None:
    """The next turn of a conversation: prompt, answer, question."""
    bench = Bench()
    first = bench.add(prompt(10), 7)
    bench.run()
    talk = prompt(10) + bench.tokens[first]
    second = bench.add(talk + prompt(3, 1), 2)
    bench.run()
    assert bench.finished[second].num_cached == 16, "17 tokens, of which the last was never computed"


def test_tenants_never_share() -> None:
    bench = Bench()
    bench.add(prompt(16), 2, tenant="a")
    bench.run()
    other = bench.add(prompt(16), 2, tenant="b")
    same = bench.add(prompt(16), 2, tenant="a")
    bench.run()
    assert (bench.finished[other].num_cached, bench.finished[same].num_cached) == (0, 12)


def test_a_tenant_does_not_see_what_another_computes() -> None:
    """O7: what a request finds, and when it ends, does not depend on another tenant's equal prompt."""
    endings = []
    for with_other in (False, True):
        bench = Bench(engine_config(num_blocks=129))
        if with_other:
            bench.add(prompt(20), 4, tenant="b")
            bench.step()
        mine = bench.add(prompt(20), 4, tenant="a", arrival_s=0.0)
        if not with_other:
            bench.clock.advance(0.001)
        bench.run()
        endings.append((bench.tokens[mine], bench.finished[mine].num_cached, bench.finished[mine].time_s))
    assert endings[0] == endings[1]


def test_without_caching_everything_is_computed() -> None:
    bench = Bench(engine_config(enable_prefix_caching=False))
    for _ in range(2):
        request = bench.add(prompt(16), 2)
        bench.run()
    assert computed(bench, request) == 16
    assert bench.finished[request].num_cached == 0


def test_a_preempted_request_finds_what_it_had_computed() -> None:
    bench = Bench()
    request = bench.add(prompt(16), 8)
    bench.step(4)
    assert computed(bench, request) == 16
    assert bench.scheduler.preempt(request)
    bench.run()
    assert computed(bench, request) - 16 == 20 - 16, "of its 20 tokens, four full blocks were there"
    assert bench.finished[request].num_cached == 0, "its own blocks are no saving on the bill"


def test_a_reset_cache_makes_it_slow_and_not_wrong() -> None:
    """K5."""
    bench = Bench()
    bench.add(prompt(16), 8)
    bench.step(3)
    bench.scheduler.reset_prefix_cache()
    second = bench.add(prompt(16), 4)
    bench.run()
    assert bench.finished[second].num_cached == 0


def test_colliding_keys_make_it_slow_and_not_wrong() -> None:
    """K5: every key is the same; outputs are compared with the reference as they end."""
    config = engine_config(num_blocks=33)
    bench = Bench(config, hooks=PrefixKeyHooks(CollidingKeyMaker(4, bytes(32))))
    for start in range(12):
        bench.add(prompt(10, start % 3) + prompt(4, start), 6)
    bench.run()
    assert all(ending.reason.value == "length" for ending in bench.finished.values())


# -- waiting behind a prefix -------------------------------------------------------------------------------


def test_a_request_waits_for_a_prefix_that_another_computes() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8))
    first = bench.add(prompt(24), 3)
    bench.step()
    second = bench.add(prompt(24) + prompt(3, 1), 3)
    bench.step()
    assert bench.states()[second] is RequestState.WAITING
    assert bench.reasons(DecisionKind.DEFER, second) == ["prefix"]
    bench.run()
    assert computed(bench, first) == 24
    assert computed(bench, second) == 3, "it computes only its own tail"
    assert bench.finished[second].num_cached == 24


def test_both_arriving_in_one_step_still_compute_it_once() -> None:
    bench = Bench()
    ids = [bench.add(prompt(12) + prompt(2, start), 3) for start in range(1, 5)]
    bench.run()
    assert sum(computed(bench, request) for request in ids) == 12 + 4 * 2


def test_a_request_that_waits_for_a_prefix_lets_others_pass() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8))
    bench.add(prompt(30), 3)
    bench.step()
    behind = bench.add(prompt(30), 3)
    other = bench.add(prompt(3, 7), 3)
    bench.step()
    assert bench.states()[behind] is RequestState.WAITING
    assert bench.states()[other] is RequestState.RUNNING
    bench.run()


def test_deferral_can_be_switched_off() -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8, defer_shared_prefix=False))
    bench.add(prompt(24), 3)
    bench.step()
    second = bench.add(prompt(24), 3)
    bench.step()
    assert bench.states()[second] is RequestState.RUNNING
    assert "prefix" not in bench.reasons(DecisionKind.DEFER)
    bench.run()


def test_many_that_wait_for_one_prefix_are_put_in_order_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not once for each row that is free, over and over."""
    bench = Bench(engine_config(num_blocks=400, max_num_seqs=3, max_num_batched_tokens=32))
    for number in range(300):
        bench.add([*prompt(40), 50 + number], 1)
    bench.step()
    orders = 0
    waiting_in_order = bench.state.waiting_in_order

    def counted(count: int, *places: Any) -> list[Request]:
        nonlocal orders
        orders += 1
        return waiting_in_order(count, *places)

    monkeypatch.setattr(bench.state, "waiting_in_order", counted)
    behind = bench.add(prompt(3, 900), 1)  # behind all of them, and there is room for it
    bench.step()
    assert orders < 20
    assert behind in bench.finished
    monkeypatch.undo()
    bench.run()


def test_a_short_common_beginning_is_not_waited_for() -> None:
    """Less than a block is shared: there is nothing to wait for."""
    bench = Bench(engine_config(max_num_batched_tokens=8))
    bench.add(prompt(24), 3)
    bench.step()
    second = bench.add(prompt(3) + prompt(5, 1), 3)
    bench.step()
    assert bench.states()[second] is RequestState.RUNNING
    bench.run()


@pytest.mark.parametrize("ending", ["abort", "preempt", "pause"])
def test_no_request_waits_for_a_prefix_that_is_no_longer_computed(ending: str) -> None:
    bench = Bench(engine_config(max_num_batched_tokens=8))
    first = bench.add(prompt(24), 3)
    bench.step()
    second = bench.add(prompt(24), 3)
    bench.step()
    assert bench.states()[second] is RequestState.WAITING
    if ending == "abort":
        bench.engine.abort(first)
    elif ending == "preempt":
        bench.scheduler.preempt(first)
        bench.scheduler.pause(first)
    else:
        bench.scheduler.pause(first)
    bench.flush()
    bench.step()
    assert bench.states()[second] is RequestState.RUNNING
    if ending != "abort":
        bench.scheduler.resume(first)
    bench.run()


def test_eviction_forgets_the_longest_unused_prefix() -> None:
    """S17, end to end: a pool of eight blocks and three prompts of three."""
    bench = Bench(engine_config(num_blocks=9))
    for start in (1, 2, 3):
        bench.add(prompt(12, start), 1)
        bench.run()
    oldest = bench.add([*prompt(12, 1), 5], 1)
    bench.run()
    assert bench.finished[oldest].num_cached < 12, "part of it was evicted"
    again = bench.add([*prompt(12, 3), 5], 1)
    bench.run()
    assert bench.state.kv.groups[0].pool.num_evicted > 0
    assert bench.finished[again].num_cached >= bench.finished[oldest].num_cached


@pytest.mark.parametrize(("eviction", "cached"), [("reuse", 12), ("lru", 0)])
def test_what_a_waiting_request_will_hit_is_evicted_last(eviction: str, cached: int) -> None:
    """One row: the request of a known prompt waits while others need the blocks of older ones."""
    bench = Bench(engine_config(num_blocks=13, max_num_seqs=1, max_model_len=64, eviction=eviction))
    for start in (1, 2):
        bench.add(prompt(12, start), 1)
        bench.run()
    running = bench.add(prompt(4, 3), 32)  # nine blocks in the end: of twelve, six hold prefixes
    bench.step()
    waiting = bench.add([*prompt(12, 1), 5], 1)
    bench.clock.advance(1.0)
    bench.run()
    assert bench.finished[running].num_cached == 0
    assert bench.finished[waiting].num_cached == cached
    assert bench.state.kv.groups[0].wanted == {}
    assert len(bench.state.wishes) == 0
