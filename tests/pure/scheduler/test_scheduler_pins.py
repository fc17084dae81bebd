"""Requests that pin their prompts: what they keep, what they are refused, and what is said of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.audit.story import story
from paceline.core.events import DecisionKind, Rule
from paceline.core.parameters import Pin
from paceline.core.request import FinishReason, Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.errors import InvalidRequest, InvalidTransition, PinsFull
from paceline.scheduler.step import pinning
from tests.pure.engine.engine_helpers import Bench, engine_config, prompt

SIZE = 4  # tokens of a block


def make_bench(**options: Any) -> Bench:
    """A cache of 30 blocks, of which pins may have 15, and requests of at most 40 tokens."""
    chosen: dict[str, Any] = {
        "num_blocks": 31,
        "max_pinned_fraction": 0.5,
        "max_pinned_fraction_per_key": 0.28,
        "max_model_len": 40,
    }
    return Bench(engine_config(**{**chosen, **options}))


def flood(bench: Bench, count: int = 6) -> None:
    """Other prompts that take all there is."""
    for number in range(count):
        bench.add(prompt(36, 50 + number), 2)
        bench.run()


def cached(bench: Bench, tokens: list[int], tenant: str = "default") -> int:
    """Tokens of a prompt that a request found."""
    request = bench.add([*tokens, 7], 1, tenant=tenant)
    bench.run()
    return bench.finished[request].num_cached


def test_a_pinned_prompt_is_found_after_a_flood_and_its_time_is_paid_for() -> None:
    bench = make_bench()
    first = bench.add(prompt(18), 3, pin=Pin(ttl_s=600))
    bench.run()
    cost = bench.finished[first].cost
    assert (cost.pinned, cost.pinned_block_us) == (4, 4 * 600_000_000)
    flood(bench)
    assert cached(bench, prompt(16)) == 16
    bench.clock.advance(601.0)
    flood(bench)
    assert cached(bench, prompt(16)) == 0 and not bench.state.kv.pins


def test_the_price_of_a_pin_is_known_before_it_is_made() -> None:
    """As much as it will be, and nothing where as much is paid for already."""
    bench = make_bench()
    wanted = SamplingParams(max_tokens=3, pin=Pin(ttl_s=600))

    def price(length: int) -> tuple[int, int]:
        tokens = prompt(length)
        request = Request(RequestId(99), np.array(tokens, np.int32), wanted, keys=bench.hooks_keys(tokens))
        return pinning.price_of(bench.state, request)

    whole = 600_000_000
    assert price(18) == (4 * whole, 4 * whole)
    assert price(38) == (8 * whole, 8 * whole), "as many blocks as its key may pin"
    first = bench.add(prompt(18), 3, pin=Pin(ttl_s=600))
    bench.run()
    assert bench.finished[first].cost.pinned_block_us == 4 * whole
    bench.clock.advance(60.0)
    bench.step()
    now, most = price(22)
    assert most == 5 * whole and 0 < now - (whole + 4 * 60_000_000) < 4 * 1_000_000


def test_only_the_beginning_that_was_asked_for_is_pinned() -> None:
    bench = make_bench()
    bench.add(prompt(18), 3, pin=Pin(ttl_s=600, name="ctx", num_tokens=9))
    bench.run()
    assert bench.state.kv.pins.num_blocks == 9 // SIZE


@pytest.mark.parametrize("depth", (0, 1, 2))
def test_a_request_that_comes_for_a_pin_ends_without_output(depth: int) -> None:
    bench = Bench(engine_config(depth, num_blocks=31, max_model_len=40), overlapped=depth > 0)
    request = bench.add(prompt(13), 1, pin=Pin(ttl_s=60, name="ctx", computes=True))
    bench.run()
    ending = bench.finished[request]
    assert (ending.reason, ending.num_output, ending.cost.pinned) == (FinishReason.STOP, 0, 3), (
        "a tenth of 30 blocks"
    )
    assert bench.tokens[request] == []
    assert any(
        d.reason is Rule.CONTEXT and d.kind is DecisionKind.FINISH for d in bench.engine.decisions_of(request)
    )


def test_a_pin_beyond_the_limit_is_refused_with_the_limit() -> None:
    bench = make_bench()
    full = "9 KV blocks more would be pinned and 8 may be: this key may pin 8 and has 0"
    with pytest.raises(PinsFull, match=full):
        bench.add(prompt(39), 1, pin=Pin(ttl_s=60, name="ctx", computes=True))
    request = bench.add(prompt(35), 1, pin=Pin(ttl_s=60, name="ctx", computes=True))
    bench.run()
    assert bench.finished[request].cost.pinned == 8


def test_a_request_that_only_would_like_a_pin_is_served_without_one() -> None:
    bench = make_bench(max_pinned_fraction=0.0)
    request = bench.add(prompt(18), 3, pin=Pin(ttl_s=600))
    bench.run()
    assert len(bench.tokens[request]) == 3 and not bench.finished[request].cost.pinned


@pytest.mark.parametrize("options", ({"enable_prefix_caching": False}, {"mode": "static", "batch_size": 2}))
def test_engines_without_a_prefix_cache_compute_no_pins(options: dict[str, Any]) -> None:
    bench = make_bench(**options)
    with pytest.raises(InvalidRequest, match="this engine keeps no prefixes"):
        bench.add(prompt(18), 1, pin=Pin(ttl_s=60, computes=True))


def test_pins_leave_room_for_the_longest_request() -> None:
    bench = make_bench(max_pinned_fraction=1.0, max_pinned_fraction_per_key=1.0, max_model_len=64)
    pins = bench.state.kv.pins
    assert pins.most == 30 - 64 // SIZE - 2
    for number in range(4):
        bench.add(prompt(20, number), 2, pin=Pin(ttl_s=600))
        bench.run()
    assert pins.num_blocks == pins.most
    longest = bench.add(prompt(50, 9), 14)
    bench.run()
    assert bench.finished[longest].reason is FinishReason.LENGTH and pins.num_blocks == pins.most


def test_tenants_share_no_pin() -> None:
    bench = make_bench()
    bench.add(prompt(16), 2, tenant="alice", pin=Pin(ttl_s=600))
    bench.run()
    assert cached(bench, prompt(16), "bob") == 0
    assert cached(bench, prompt(16), "alice") == 16


def test_a_deleted_pin_is_not_made_again_by_what_uses_it() -> None:
    bench = make_bench()
    wanted = Pin(ttl_s=600, name="ctx", num_tokens=16)
    bench.add(prompt(16), 1, pin=wanted)
    bench.run()
    user = bench.add([*prompt(16), 1, 2], 6, pin=wanted)
    bench.step(2)
    assert bench.scheduler.unpin("default", "ctx")
    assert not bench.scheduler.unpin("default", "ctx")
    bench.run()
    assert len(bench.tokens[user]) == 6 and not bench.state.kv.pins


def test_a_context_is_not_pinned_for_longer_by_what_uses_it() -> None:
    """What is left of its time was counted when the request came, not when it ended."""
    bench = make_bench()
    bench.add(prompt(13), 1, pin=Pin(ttl_s=60, name="ctx", computes=True))
    bench.run()
    used = bench.add(prompt(14), 6, pin=Pin(ttl_s=60, name="ctx", num_tokens=13))
    late = bench.add(prompt(14), 6, pin=Pin(ttl_s=20, name="late", num_tokens=13))
    while not (bench.tokens[used] and bench.tokens[late]):
        bench.step()
    bench.clock.advance(30.0)
    bench.run()
    assert bench.finished[used].cost.pinned_block_us <= 3 * 1_000_000, (
        "its time was paid for, but for a second"
    )
    assert not bench.finished[late].cost.pinned, "it was over while the request ran"
    bench.clock.advance(31.0)
    flood(bench)
    assert not bench.state.kv.pins


def test_a_failed_step_loses_pins_and_the_next_request_pins_again() -> None:
    bench = make_bench()
    wanted = Pin(ttl_s=600, name="ctx", num_tokens=16)
    bench.add(prompt(16), 1, pin=wanted)
    bench.run()
    bench.scheduler.reset_prefix_cache()
    assert not bench.state.kv.pins
    bench.add([*prompt(16), 1], 2, pin=wanted)
    bench.run()
    assert bench.state.kv.pins.num_blocks == 4 and bench.state.counters.pins_lost == 1


def test_nothing_is_put_behind_what_ends_with_its_prompt() -> None:
    bench = make_bench()
    request = bench.add(prompt(30), 1, pin=Pin(ttl_s=60, computes=True))
    with pytest.raises(InvalidTransition, match="ends with its prompt"):
        bench.engine.extend(request, [1], max_tokens=1)
    bench.run()


def test_the_story_of_a_pin() -> None:
    bench = make_bench()
    request = bench.add(prompt(18), 1, pin=Pin(ttl_s=60, name="ctx"))
    bench.run()
    bench.scheduler.unpin("default", "ctx")
    bench.add(prompt(5, 3), 1)
    bench.run()
    told = story([each for each in bench.watch.decisions if each.request == request])
    assert any(
        "the first 16 tokens of a context (4 blocks) were pinned before step 2, for 60" in each
        for each in told
    )
    assert any("the pin of its first 16 tokens ended" in each and "it was deleted" in each for each in told)


@pytest.mark.parametrize(
    "given", ({"ttl_s": 0}, {"ttl_s": 86_401}, {"ttl_s": 1, "num_tokens": 0}, {}, {"ttl": 3}, 5)
)
def test_a_pin_that_makes_no_sense_is_refused(given: object) -> None:
    with pytest.raises(InvalidRequest, match="pin") as refused:
        Pin.of(given)
    assert refused.value.param == "pin"
