"""Placed texts in steps: computed alone, copied to where prompts have them, equal whatever was cached."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.audit.story import story
from paceline.core.events import DecisionKind, Rule
from paceline.core.parameters import Pin
from paceline.core.plan import MORE_SPANS
from paceline.core.request import OWN_REQUESTS, Request, RequestId, RequestState
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import ModulePart
from paceline.errors import InvalidRequest, InvalidTransition, NeverFits
from paceline.scheduler.policy.fair import FairShare
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

TEXT = prompt(40, start=500)  # 10 blocks of 4
OTHER = prompt(24, start=700)


def bench(**options: Any) -> Bench:
    return Bench(engine_config(**options))


def around(*texts: list[int], between: int = 3) -> tuple[list[int], list[ModulePart]]:
    """A prompt with texts that are placed, plain tokens before and behind each."""
    tokens, parts = prompt(between), []
    for text in texts:
        parts.append(ModulePart(len(tokens), len(text)))
        tokens = tokens + text + prompt(between, start=900)
    return tokens, parts


def test_a_text_is_computed_alone_and_copied_to_its_place() -> None:
    one = bench()
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=parts)
    one.run()
    module, placing = one.seen[0], next(seen for seen in one.seen if len(seen.plan.placements.row))
    assert module.spans == {OWN_REQUESTS: 32}, "what it places is computed first, by a request of its own"
    placements = placing.plan.placements
    assert (placements.start.tolist(), placements.count.tolist()) == ([3 + 16], [40 - 16])
    assert (placements.shift.tolist(), placements.first.tolist(), len(placements.blocks)) == ([3], [0], 6)
    assert placing.spans == {request: 19 + 3} and placing.plan.spans.start.tolist() == [0, 43]
    assert placing.plan.work.placed_tokens == 24 and placing.plan.work.prefill_tokens == 22
    cost = one.finished[request].cost
    assert (cost.reused, cost.recomputed) == (24, 16)
    assert one.state.counters.reused_tokens == 24


def test_the_second_finds_it_and_the_answer_is_the_same() -> None:
    one = bench()
    tokens, parts = around(TEXT, OTHER)
    first = one.add(tokens, modules=parts)
    one.run()
    steps = len(one.seen)
    other = prompt(5, start=300) + tokens
    one.add(other, modules=[part._replace(start=part.start + 5) for part in parts])
    one.run()
    assert not any(number >= OWN_REQUESTS for seen in one.seen[steps:] for number in seen.spans)
    one.scheduler.reset_prefix_cache()
    again = one.add(tokens, modules=parts)
    one.run()
    assert one.tokens[again] == one.tokens[first]


def test_exact_and_placed_prompts_share_nothing_behind_the_beginning() -> None:
    one = bench()
    tokens, parts = around(TEXT)
    one.add(tokens, modules=parts)
    one.run()
    exact = one.add(tokens)
    one.run()
    assert one.finished[exact].num_cached == 0
    placed = one.add(tokens, modules=parts)
    one.run()
    assert one.finished[placed].num_cached == 44 and one.finished[placed].cost.reused == 0


def test_what_is_found_in_the_cache_is_not_counted_as_placed_too() -> None:
    one = bench()
    tokens, parts = around(TEXT, OTHER)
    one.add([*tokens, 1, 2, 3, 4], modules=parts)
    one.run()
    # The same texts with another question: of the last of them the cache has a part, all, or nothing.
    for num_same in (42, 43, 44, 46, 69, 70, 71, 72):
        one.scheduler.reset_prefix_cache()
        one.add([*tokens, 1, 2, 3, 4], modules=parts)
        one.run()
        asked = one.add(
            [*tokens[:num_same], *prompt(len(tokens) + 9 - num_same, start=100 + num_same)],
            modules=[part for part in parts if part.start + part.num_tokens <= num_same],
        )
        steps = len(one.seen)
        one.run()
        ended = one.finished[asked]
        copied = sum(int(seen.plan.placements.count.sum()) for seen in one.seen[steps:])
        computed = sum(seen.plan.work.prefill_tokens for seen in one.seen[steps:])
        assert ended.cost.reused == copied
        assert ended.num_prompt == ended.num_cached + ended.cost.reused + computed
        assert ended.cost.recomputed <= computed


def test_a_forecast_is_of_what_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench()
    tokens, parts = around(TEXT, OTHER)
    one.add(tokens, modules=parts)
    one.run()
    asked: list[Request] = []
    monkeypatch.setattr(one.scheduler, "forecast", asked.append)
    wanted = SamplingParams(max_tokens=4, temperature=0.0)
    for placed in ([], parts):
        one.engine.forecast(tokens, wanted, modules=placed)
    found = [one.state.kv.match(request.keys, request.num_tokens).num_blocks for request in asked]
    assert found == [0, len(tokens) // 4], "they share nothing behind the beginning"
    assert [len(request.modules) for request in asked] == [0, 2]
    with pytest.raises(NeverFits, match="fewer contexts"):
        bench(num_blocks=22).engine.forecast(tokens, wanted, modules=parts)


def test_two_tenants_share_no_module() -> None:
    one = bench()
    tokens, parts = around(TEXT)
    one.add(tokens, modules=parts, tenant="a")
    one.run()
    steps = len(one.seen)
    one.add(tokens, modules=parts, tenant="b")
    one.run()
    assert one.seen[steps].spans == {OWN_REQUESTS + 1: 32}


def test_a_row_that_is_preempted_in_a_body_places_it_again() -> None:
    one = bench()
    tokens, parts = around(TEXT, OTHER)
    request = one.add(tokens, modules=parts)
    while not any(len(seen.plan.placements.row) for seen in one.seen):
        one.step()
    one.scheduler.preempt(request)
    one.scheduler.reset_prefix_cache()
    one.run()
    assert one.finished[request].cost.reused == 24 + 8, "it is counted once"
    assert len([seen for seen in one.seen if len(seen.plan.placements.row)]) >= 2


def test_a_branch_shares_what_was_placed() -> None:
    one = bench()
    tokens, parts = around(TEXT)
    request = one.add(tokens, 12, modules=parts)
    while not one.tokens[request]:
        one.step()
    one.fork(request, 2)
    one.run()


def test_what_is_too_short_is_computed_like_any_text() -> None:
    one = bench()
    tokens, parts = around(prompt(19, start=500))  # 16 tokens in full blocks
    request = one.add(tokens, modules=parts)
    one.run()
    assert len(one.seen[0].spans) == 1 and not one.finished[request].cost.reused


def test_the_last_token_of_a_prompt_is_computed() -> None:
    one = bench()
    request = one.add(TEXT, modules=[ModulePart(0, len(TEXT))])
    one.run()
    assert one.finished[request].cost.reused == 40 - 16 - 1


def test_a_plan_has_so_many_runs_and_no_more() -> None:
    one = bench(num_blocks=1200, max_model_len=2000, max_num_batched_tokens=4096)
    tokens, parts = around(*[prompt(8, start=500)] * (MORE_SPANS + 6), between=1)
    request = one.add(tokens, modules=[part._replace(recompute=1) for part in parts])
    one.run()
    runs = [len(seen.plan.placements.row) for seen in one.seen if len(seen.plan.placements.row)]
    assert runs == [MORE_SPANS, 6]
    assert one.finished[request].cost.reused == 7 * (MORE_SPANS + 6)


def test_a_module_that_was_evicted_is_computed_again_before_all_others() -> None:
    one = bench(max_num_seqs=4)
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=parts)
    one.step()
    while one.state.modules.computing:
        one.step()
        if not one.state.modules.computing and one.request(request).state is RequestState.WAITING:
            one.scheduler.reset_prefix_cache()
    other = one.add(prompt(6, start=200), 1)
    one.run()
    admitted = [each.request for each in one.watch.decisions if each.kind is DecisionKind.ADMIT]
    assert admitted == [OWN_REQUESTS, OWN_REQUESTS + 1, request, other], "it is not passed a second time"
    assert one.reasons(DecisionKind.DEFER, request) == [Rule.MODULE, Rule.MODULE_EVICTED]
    sentences = story([each for each in one.watch.decisions if each.request == request])
    assert any("was evicted while it waited" in each for each in sentences)
    assert any("24 tokens of its context 1 of 1 were copied to their place" in each for each in sentences)


def admitted(one: Bench) -> list[int]:
    return [each.request for each in one.watch.decisions if each.kind is DecisionKind.ADMIT]


def test_a_module_goes_where_its_request_goes_under_fair_shares() -> None:
    one = bench(scheduling_policy="fair", max_num_seqs=1)
    for start in range(3):
        one.add(prompt(28, start=1000 + 50 * start), 4, tenant="served")
    one.step(3)
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=parts, tenant="new")
    one.run()
    assert admitted(one) == [1, OWN_REQUESTS, request, 2, 3], "its tenant was served less"


def test_a_tenant_is_charged_with_a_prompt_and_not_with_its_modules() -> None:
    one = bench(scheduling_policy="fair")
    tokens, parts = around(TEXT, OTHER)
    request = one.add(tokens, 4, modules=parts)
    one.run()
    one.scheduler.schedule()  # output is charged before the next plan
    assert isinstance(one.state.policy, FairShare)
    assert one.state.policy.counters == {0: len(tokens) + 2.0 * len(one.tokens[request])}


@pytest.mark.parametrize("by_client", [False, True])
def test_a_module_that_passes_changes_no_order_under_fair_shares(by_client: bool) -> None:
    """Behind a request whose module was evicted nothing else passes; a client pays for a context that does."""
    one = bench(scheduling_policy="fair")
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=parts, tenant="new")
    one.step()
    while one.state.modules.computing:
        one.step()
    one.scheduler.reset_prefix_cache()
    if by_client:
        one.engine.add(prompt(20, start=800), SamplingParams(max_tokens=1), tenant="new", is_module=True)
    other = one.add(prompt(6, start=200), 1, tenant="other")
    while not {request, other} <= set(admitted(one)):
        one.engine.step()
    assert (admitted(one)[-2:] == [request, other]) is not by_client


def test_a_request_that_computes_a_module_ends_with_its_prompt() -> None:
    one = bench()
    one.engine.add(TEXT, SamplingParams(max_tokens=1), is_module=True)
    number = next(iter(one.state.requests))
    with pytest.raises(InvalidTransition, match="nothing to branch"):
        one.engine.fork(number, 1)
    while one.engine.has_requests:
        assert not one.engine.step().tokens
    tokens, parts = around(TEXT)
    one.add(tokens, modules=parts)
    assert one.step().spans.keys() == {number + 1}, "it is there"  # type: ignore[union-attr]


def test_what_can_never_be_placed_is_refused() -> None:
    tokens, parts = around(TEXT)
    one = bench(num_blocks=22)
    with pytest.raises(NeverFits, match="beside one another"):
        one.add(tokens, modules=parts)
    with pytest.raises(NeverFits, match="prefix cache"):
        bench(enable_prefix_caching=False).add(tokens, modules=parts)
    with pytest.raises(InvalidRequest, match="do not stand in the prompt"):
        bench().add(tokens, modules=[ModulePart(3, 400)])
    with pytest.raises(NeverFits, match="computed where it stands"):
        bench().add(tokens, modules=parts, prompt_logprobs=1)


def held(one: Bench, tokens: list[int], **options: Any) -> RequestId:
    """A request that has come to its end and is kept."""
    request = one.add(tokens, 4, on_stop="hold", hold_s=30.0, **options)
    while one.request(request).held is None:
        one.step()
    return request


def go_on(one: Bench, request: RequestId) -> list[int]:
    """What it generates until it is held again; then it is dropped."""
    before = one.before[request]
    while one.request(request).held is None:
        one.step()
    found = one.tokens[request][before:]
    one.engine.prune(request)
    one.run()
    return found


@pytest.mark.parametrize("disturbed", ["", "preempted", "evicted"])
def test_an_injected_text_is_placed_as_in_the_same_prompt(disturbed: str) -> None:
    one = bench()
    inserted, parts = around(TEXT, OTHER)
    request = held(one, prompt(6))
    begun = one.request(request).tokens.tolist()
    one.extend(request, inserted, 5, parts)
    placed = [seen for seen in one.seen if len(seen.plan.placements.row)]
    assert not placed and one.request(request).num_tokens == len(begun) + len(inserted)
    while disturbed and not any(len(seen.plan.placements.row) for seen in one.seen):
        one.step()
    if disturbed:
        one.scheduler.preempt(request)
    if disturbed == "evicted":
        one.scheduler.reset_prefix_cache()
    found = go_on(one, request)
    runs = [seen.plan.placements for seen in one.seen if len(seen.plan.placements.row)]
    assert {shift for run in runs for shift in run.shift.tolist()} == {
        len(begun) + part.start for part in parts
    }
    assert one.finished[request].cost.reused == 24 + 8, "it is counted once"
    whole = [part._replace(start=part.start + len(begun)) for part in parts]
    same = one.add(begun + inserted, 5, modules=whole)
    plain = one.add(begun + inserted, 5)
    one.run()
    assert found == one.tokens[same] != one.tokens[plain]


def test_a_prompt_from_the_start_finds_what_an_injection_has_placed() -> None:
    one = bench()
    inserted, parts = around(TEXT)
    request = held(one, prompt(6))
    begun = one.request(request).tokens.tolist()
    one.extend(request, inserted, 3, parts)
    go_on(one, request)
    whole = [part._replace(start=part.start + len(begun)) for part in parts]
    same, exact = one.add(begun + inserted, 3, modules=whole), one.add(begun + inserted, 3)
    one.run()
    assert one.finished[same].num_cached >= len(begun) + len(inserted) - 4
    assert one.finished[exact].num_cached <= len(begun) + 3, "exact and blended ones share nothing of it"


def test_a_running_request_is_extended_twice_by_the_same_text() -> None:
    one = bench(num_blocks=120)
    inserted, parts = around(TEXT)
    request = one.add(prompt(5), 12)
    while len(one.tokens[request]) < 2:
        one.step()
    one.extend(request, inserted, None, parts)
    while len(one.tokens[request]) < 2 + len(inserted) + 2:
        one.step()
    one.extend(request, inserted, None, parts)
    one.run()
    placed = [each for each in one.watch.decisions if each.kind is DecisionKind.PLACE]
    assert [each.detail for each in placed] == [
        "context 1 of 1: 16 tokens computed again",
        "context 2 of 2: 16 tokens computed again",
    ]
    assert one.finished[request].cost.reused == 2 * 24


@pytest.mark.parametrize("cut", [2, 15, 19, 25, 39])
@pytest.mark.parametrize("append", [(), (5, 6, 7)])
def test_a_branch_from_inside_an_injected_text_is_like_a_prompt(cut: int, append: tuple[int, ...]) -> None:
    """Of the text it has its full blocks placed: they may not come out of the parent's longer one."""
    one = bench()
    request = held(one, prompt(6))
    begun = one.request(request).tokens.tolist()
    one.extend(request, TEXT + prompt(3), 5, [ModulePart(0, len(TEXT))])
    while one.request(request).held is None:
        one.step()
    (branch,) = one.fork(request, at=4 + cut, append=append, changes={"on_stop": "end", "max_tokens": 4})
    one.engine.prune(request)
    kept = begun + TEXT[:cut]
    same = one.add([*kept, *append], 4, modules=[ModulePart(len(begun), cut)])
    one.run()
    assert one.tokens[branch] == one.tokens[same]


def test_a_stop_found_in_front_of_an_injected_text_takes_it_away() -> None:
    """A reader sees a stop string late: what was put in behind it is gone, and something else may follow."""
    one = bench()
    request = one.add(prompt(6), 20, on_stop="hold", hold_s=30.0)
    while len(one.tokens[request]) < 4:
        one.step()
    inserted, parts = around(TEXT)
    one.extend(request, inserted, None, parts)
    one.scheduler.finish_at(request, 2)
    assert not one.request(request).stretches and not one.request(request).modules
    begun = one.request(request).tokens.tolist()
    assert len(begun) == 6 + 2 and not one.state.modules.orders
    one.tokens[request] = one.tokens[request][:2]
    one.extend(request, OTHER + prompt(2), 4, [ModulePart(0, len(OTHER))])
    found = go_on(one, request)
    same = one.add(begun + OTHER + prompt(2), 4, modules=[ModulePart(len(begun), len(OTHER))])
    one.run()
    assert found == one.tokens[same]


def test_an_extension_that_can_never_be_placed_changes_nothing() -> None:
    one = bench(num_blocks=22)
    request = held(one, prompt(6))
    before = one.request(request).tokens.tolist()
    inserted, parts = around(TEXT)
    with pytest.raises(NeverFits, match="beside one another"):
        one.extend(request, inserted, 5, parts)
    with pytest.raises(InvalidRequest, match="do not stand"):
        one.extend(request, TEXT, 5, [ModulePart(1, len(TEXT))])
    assert one.request(request).tokens.tolist() == before and not one.request(request).modules
    one.engine.prune(request)
    one.run()


PIN = Pin(ttl_s=600, name="ctx")


def pinning(**options: Any) -> Bench:
    return bench(num_blocks=200, max_pinned_fraction=0.1, max_pinned_fraction_per_key=0.1, **options)


def test_a_lost_pin_of_a_module_is_made_again_where_it_is_placed() -> None:
    one = pinning()
    tokens, parts = around(TEXT)
    wanted = [part._replace(pin=PIN) for part in parts]
    first = one.add(tokens, modules=wanted)
    one.run()
    cost, (pin,) = one.finished[first].cost, one.state.kv.pins
    assert pin.name == "ctx" and len(pin.names) == 10, "the blocks of the module, not those of the prompt"
    assert (cost.pinned, cost.pinned_block_us) == (10, 10 * 600_000_000)
    assert Rule.CONTEXT in one.reasons(DecisionKind.PIN, first)
    again = one.add(prompt(5, start=300) + tokens, modules=[wanted[0]._replace(start=wanted[0].start + 5)])
    one.run()
    assert not one.finished[again].cost.pinned, "it is there: nothing is paid"
    one.scheduler.reset_prefix_cache()
    assert not one.state.kv.pins
    third = one.add(tokens, modules=wanted)
    one.run()
    assert one.finished[third].cost.pinned == 10 and len(one.state.kv.pins) == 1
    one.scheduler.unpin("default", "ctx")


def test_a_module_is_pinned_whole_or_not_at_all() -> None:
    one = bench(num_blocks=91, max_pinned_fraction=0.1, max_pinned_fraction_per_key=0.1)
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=[part._replace(pin=PIN) for part in parts])
    one.run()
    assert one.state.kv.pins.most == 9 and not one.state.kv.pins
    assert one.finished[request].cost.reused == 24 and not one.finished[request].cost.pinned


def test_a_pin_that_is_deleted_under_way_is_not_made_again() -> None:
    one = pinning()
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=[part._replace(pin=PIN) for part in parts])
    one.step()
    one.scheduler.unpin("another", "ctx")
    assert one.request(request).modules[0].pin == PIN
    one.scheduler.unpin("default", "ctx")
    one.run()
    assert not one.state.kv.pins and one.finished[request].cost.reused == 24


def test_an_injected_text_pins_its_module_too() -> None:
    one = pinning()
    inserted, parts = around(TEXT)
    request = held(one, prompt(6))
    one.extend(request, inserted, 3, [part._replace(pin=PIN) for part in parts])
    go_on(one, request)
    assert [pin.name for pin in one.state.kv.pins] == ["ctx"] and one.finished[request].cost.pinned == 10
    one.scheduler.unpin("default", "ctx")


def test_a_module_is_pinned_for_what_is_left_of_its_time() -> None:
    """Counted from when the request came, or the text was put in."""
    one = pinning()
    tokens, parts = around(TEXT)
    pinned = [part._replace(pin=Pin(ttl_s=20, name="ctx")) for part in parts]
    late = one.add(tokens, modules=pinned)
    one.scheduler.pause(late)
    request = held(one, prompt(6))
    one.clock.advance(25.0)
    one.scheduler.resume(late)
    while late not in one.finished:
        one.step()
    assert one.finished[late].cost.reused == 24 and not one.finished[late].cost.pinned
    one.extend(request, tokens, 3, pinned)
    go_on(one, request)
    (pin,) = one.state.kv.pins
    left_us = pin.until_us - one.state.kv.block_time.now_us
    assert 18_000_000 < left_us <= 20_000_000
    one.scheduler.unpin("default", "ctx")


def test_a_module_whose_request_is_paused_is_computed_by_another() -> None:
    one = bench()
    (paused,) = one.engine.add(TEXT, SamplingParams(max_tokens=1), is_module=True)
    one.scheduler.pause(paused)
    tokens, parts = around(TEXT)
    request = one.add(tokens, modules=parts)
    while one.tokens[request] == []:
        assert one.step() is not None
    one.scheduler.resume(paused)
    while one.engine.has_requests:
        one.engine.step()
