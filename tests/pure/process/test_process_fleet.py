"""A fleet of engines without processes: where requests go, and how streams go on when engines are lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paceline.core.counters import Counters
from paceline.core.events import Decision, DecisionKind, LogprobEvent, Rule
from paceline.core.plan import RowLogprobs
from paceline.core.request import Change, ChangeOutcome, FinishReason, Request, RequestId
from paceline.core.sampling import SamplingParams
from paceline.core.stretch import PLAIN, ModulePart, PromptParts
from paceline.engine.prefix_keys import PrefixKeyHooks
from paceline.errors import InvalidRequest, QueueFull
from paceline.kv.prefix import KeyMaker
from paceline.process import frames
from paceline.process.client import BranchUpdate, EngineState, EngineStats, EngineUnavailable, Explanation
from paceline.process.fleet.known_prefixes import FleetPrefixes
from paceline.routing.prefix_map import PrefixMap
from tests.fake_fleet import PROMPT, SAMPLING, FakeEngine, ends, fleet_of, read, run, tokens_of


def test_a_stream_goes_on_in_another_engine_behind_what_its_reader_has() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a", timeout_s=60.0)
        one.tell((0, 11), (0, 12))
        first = await stream.take()
        one.tell((0, 13))  # told, but not read when the engine dies
        reader = asyncio.create_task(read(stream))
        one.die()
        await asyncio.sleep(0.01)
        assert other.outputs == [[11, 12, 13]]
        (add,) = other.adds
        assert add.left_s is not None and 50 < add.left_s <= 60 and 0 < add.age_s < 5
        other.tell((0, 14), ends=ends(0, 4))
        rest = await reader
        assert tokens_of(first + rest) == [11, 12, 13, 14]
        ending = rest[-1].ending
        assert ending is not None and ending.request == stream.first != other.adds[0].first
        assert stream.failovers == 1 and fleet.failovers["resumed"] == 1 and fleet.num_open == 0
        stream.close()

    run(test())


def test_branches_that_have_ended_stay_ended_and_stop_strings_stay_found() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SamplingParams(max_tokens=8, n=3, seed=1), tenant="a")
        one.tell((0, 1), (1, 2), (2, 3), ends=ends(1, 1, "stop"))
        await stream.take()
        stream.finish_at(2, 1)
        one.die()
        (made,) = await stream.take()
        assert (made.branch, made.tokens) == (2, []) and made.ending is not None
        assert (made.ending.reason, made.ending.num_output) == (FinishReason.STOP, 1)
        rest = asyncio.create_task(stream.take())
        await asyncio.sleep(0.01)
        assert other.outputs == [[1], None, None]
        other.tell((0, 4), ends=ends(0, 2))
        assert tokens_of(await rest) == [4] and fleet.num_open == 0

    run(test())


def test_what_goes_past_its_reader_is_kept_too() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream, seen = fleet.submit(PROMPT, SAMPLING, tenant="a"), []

        def accept(updates: list[BranchUpdate]) -> bool:
            seen.extend(tokens_of(updates))
            return not any(each.ending for each in updates)

        stream.divert(accept)
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        one.tell((0, 11))
        one.tell((0, 12))
        one.die()
        await asyncio.sleep(0.01)
        assert other.outputs == [[11, 12]]
        other.tell((0, 13))
        other.tell((0, 14), ends=ends(0, 4))
        assert await reader == [] and seen == [11, 12, 13, 14]

    run(test())


def test_only_engines_with_the_same_fingerprint_go_on_and_any_may_begin() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2, engine_wait_s=0.05)
        other.start(fingerprint="another version")
        begun = fleet.submit(PROMPT, SAMPLING, tenant="a")
        other_ones = fleet.submit(PROMPT, SAMPLING, tenant="a")
        new = fleet.submit(PROMPT, SAMPLING, tenant="a")
        assert [len(one.adds), len(other.adds)] == [2, 1]
        one.client.on_update(
            frames.Update(
                1.0, np.array([begun.first], frames.ID).tobytes(), np.array([9], frames.TOKEN).tobytes()
            )
        )
        await begun.take()
        one.die()
        with pytest.raises(EngineUnavailable, match="no engine takes"):
            await begun.take()
        rest = asyncio.create_task(new.take())
        await asyncio.sleep(0.01)
        assert [each.outputs for each in other.adds] == [(), ()]
        other.tell((0, 1), ends=ends(0, 1))
        assert tokens_of(await rest) == [1]
        other_ones.close()

    run(test())


def test_a_request_waits_for_an_engine_and_then_is_told_that_there_is_none() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2, engine_wait_s=0.1)
        one.die()
        other.die()
        assert fleet.state is EngineState.LOST and fleet.waits_for_engine
        waits, gives_up = (fleet.submit(PROMPT, SAMPLING, tenant="a") for _ in range(2))
        with pytest.raises(EngineUnavailable) as raised:
            await gives_up.take()
        assert raised.value.code == "engine_unavailable"
        reader = asyncio.create_task(waits.take())
        await asyncio.sleep(0.02)
        one.start()
        await asyncio.sleep(0.05)
        one.tell((0, 1), ends=ends(0, 1))
        assert tokens_of(await reader) == [1] and fleet.num_open == 0

    run(test())


def test_engines_that_had_not_read_a_request_were_not_lost_to_it() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        reader = asyncio.create_task(read(stream))
        for dying in (one, other):  # both are gone already when it is sent
            await asyncio.sleep(0.01)
            dying.die()
        await asyncio.sleep(0.01)
        one.start()
        await asyncio.sleep(0.05)
        one.tell((0, 1), ends=ends(0, 1))
        assert tokens_of(await reader) == [1] and stream.failovers == 2

    run(test())


def test_a_request_that_was_in_two_engines_when_they_died_ends_and_its_prompt_is_refused() -> None:
    async def test() -> None:
        fleet, engines = fleet_of(3, max_failovers=5)
        poison = fleet.submit([66, 6], SAMPLING, tenant="a")
        others = [fleet.submit(PROMPT, SAMPLING, tenant="a") for _ in range(2)]
        for _ in range(2):  # those that have told something are not suspected as long as one has not
            dying = next(each for each in engines if each.adds and each.adds[-1].first == poison.inner.first)  # type: ignore[attr-defined]
            reader = asyncio.create_task(poison.take())
            dying.forecast()
            dying.die()
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable) as raised:
            await reader
        assert raised.value.code == "engine_lost_twice"
        with pytest.raises(EngineUnavailable) as refused:
            fleet.submit([66, 6], SAMPLING, tenant="b")
        assert refused.value.code == "engine_lost_twice"
        assert [each.client.state for each in engines].count(EngineState.READY) == 1
        readers = [asyncio.create_task(each.take()) for each in others]
        await asyncio.sleep(0.01)
        left = next(each for each in engines if each.client.state is EngineState.READY)
        for add in left.adds:
            left.client.on_update(
                frames.Update(1.0, endings=[ends(0, 1)._replace(request=RequestId(add.first))])
            )
        for reader in readers:
            assert (await reader)[0].ending is not None

    run(test())


def test_no_more_failovers_than_allowed() -> None:
    async def test() -> None:
        fleet, engines = fleet_of(2, max_failovers=1)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        newcomers = []
        for engine in engines:
            engine.tell((0, 1))
            await stream.take()
            newcomers.append(fleet.submit([1], SAMPLING, tenant="a"))
            while newcomers[-1].engine != stream.engine:  # type: ignore[attr-defined]
                newcomers.append(fleet.submit([1], SAMPLING, tenant="a"))
            engine.forecast()
            reader = asyncio.create_task(stream.take())
            await asyncio.sleep(0)
            engine.die()
            await asyncio.sleep(0.01)
        with pytest.raises(EngineUnavailable, match="SIGKILL"):
            await reader

    run(test())


def test_a_full_queue_is_passed_over_and_benches_no_engine() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        one.refuse()
        await asyncio.sleep(0.01)
        assert len(other.adds) == 1
        other.refuse()
        with pytest.raises(QueueFull):
            await reader
        assert fleet.state is EngineState.READY
        fleet.submit(PROMPT, SAMPLING, tenant="a")
        assert len(one.adds) + len(other.adds) == 3 and stream.failovers == 0

    run(test())


def test_what_is_wrong_with_a_request_is_said_once() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        rejected = frames.rejected_with(InvalidRequest("no"), stream.first)
        one.client.on_update(frames.Update(1.0, rejections=[rejected]))
        with pytest.raises(InvalidRequest):
            await stream.take()
        assert not other.adds

    run(test())


def test_a_fleet_that_stops_moves_nothing() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        fleet.stop()
        one.die()
        with pytest.raises(EngineUnavailable):
            await stream.take()
        assert not other.adds
        with pytest.raises(EngineUnavailable, match="shutting down"):
            fleet.submit(PROMPT, SAMPLING, tenant="a")

    run(test())


def test_questions_about_a_request_follow_it() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        one.tell((0, 1))
        await stream.take()
        one.die()
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0.01)
        inner = other.adds[0].first
        asked = asyncio.create_task(fleet.change([stream.first], Change(priority=1)))
        await asyncio.sleep(0)
        question = other.sent[-1]
        assert isinstance(question, frames.ChangeBranches) and question.branches == (inner,)
        other.client.on_answer(frames.Changed(question.question, [ChangeOutcome.CHANGED]))
        assert await asked == [ChangeOutcome.CHANGED]
        explained = asyncio.create_task(fleet.explain(stream.first))
        await asyncio.sleep(0)
        question = other.sent[-1]
        assert isinstance(question, frames.Explain) and question.branch == inner
        admitted = Decision(DecisionKind.ADMIT, RequestId(inner), Rule.FITS, time_s=1e12)
        other.client.on_answer(frames.Explained(question.question, Explanation([admitted], True)))
        decisions = (await explained).decisions
        kinds = [each.kind.value for each in decisions]
        assert kinds == ["route", "failover", "route", "admit"]
        assert {each.request for each in decisions} == {stream.first}
        assert decisions[1].value == 1 and decisions[0].detail == "engine 0: round-robin"
        reader.cancel()

    run(test())


def test_figures_are_sums_and_limits_are_those_of_the_smallest() -> None:
    fleet, (one, other) = fleet_of(2)
    other.start(max_model_len=32)
    one.client.on_update(frames.Update(1.0, stats=EngineStats(running=2, blocks_used=3, next_place_s=4.0)))
    other.client.on_update(frames.Update(1.0, stats=EngineStats(running=1, blocks_used=1)))
    stats, info = fleet.stats, fleet.info
    assert (stats.running, stats.blocks_used, stats.next_place_s) == (3, 4, 4.0)
    assert (info.max_model_len, info.max_num_seqs, info.usable_blocks) == (32, 8, 14)


def test_totals_do_not_fall_when_an_engine_is_started_again() -> None:
    fleet, (one, other) = fleet_of(2)

    def say(engine: FakeEngine, steps: int) -> None:
        counters = Counters(preempted=steps, preempted_by={"blocks:swap": steps}, holding=1)
        engine.client.on_update(
            frames.Update(1.0, stats=EngineStats(steps=steps, running=1, counters=counters))
        )

    say(one, 7)
    say(other, 5)
    assert (fleet.stats.steps, fleet.stats.running) == (12, 2)
    one.die()
    assert (fleet.stats.steps, fleet.stats.running) == (12, 1)
    one.start()
    say(one, 2)
    stats = fleet.stats
    assert (stats.steps, stats.counters.preempted, stats.counters.preempted_by) == (
        14,
        14,
        {"blocks:swap": 14},
    )
    assert (stats.running, stats.counters.holding) == (2, 2)


def test_a_prompt_goes_where_its_beginning_is_cached_and_nowhere_once_that_engine_has_lost_it() -> None:
    async def test() -> None:
        fleet, engines = fleet_of(3, router="prefix-aware")
        prompts = [[100 * number + each for each in range(64)] for number in range(3)]
        keys = [fleet.prefixes.keys(prompt, 16, "a") for prompt in prompts]
        for place, engine in enumerate(engines):
            engine.cache(*keys[place], b"of another prompt")

        def choose(number: int, tenant: str = "a") -> int:
            fleet.view.prefixes.pass_time(1e12)  # what was only expected is forgotten
            stream: Any = fleet.submit([*prompts[number], 9, 9], SAMPLING, tenant=tenant)
            return int(stream.engine)

        assert [choose(number) for number in (2, 0, 1)] == [2, 0, 1]
        assert fleet.routed == {"prefix": 3}
        choose(0, tenant="b")
        engines[0].cache(evicted=keys[0][1:])
        choose(0)  # one block is left
        engines[0].cache(evicted=keys[0][:1])
        choose(0)
        assert fleet.routed == {"prefix": 4, "least-loaded": 2}
        engines[1].die()
        engines[1].start()  # between two looks of the fleet: it begins with an empty cache
        choose(1)
        assert fleet.routed == {"prefix": 4, "least-loaded": 3}
        engines[2].client.mark_stuck()
        choose(0)
        engines[2].client.on_heartbeat()
        assert choose(2) == 2, "it was silent, and has what it had"

    run(test())


def test_a_prompts_keys_are_those_that_engines_make() -> None:
    prefixes = FleetPrefixes(PrefixMap())
    hooks = PrefixKeyHooks(KeyMaker(16))
    hooks.identity_of = lambda adapter: "ab12"
    assert hooks.use_key(prefixes.key) == prefixes.key
    tokens, module = list(range(100)), ModulePart(40, 20)
    for adapter, parts, num_blocks in ((0, PLAIN, 6), (3, PLAIN, 6), (0, PromptParts(modules=(module,)), 2)):
        request = Request(RequestId(1), np.array(tokens, np.int32), SAMPLING, tenant="a")
        request.adapter = adapter
        names = [key.key[:8] for key in hooks.new_keys(request)]
        keys = prefixes.keys(tokens, 16, "a", "ab12" if adapter else "", parts)
        assert list(keys) == names[:num_blocks] and len(names) == 6
    assert prefixes.keys(tokens, 16, "b")[0] != prefixes.keys(tokens, 16, "a")[0]
    kept = KeyMaker(16, b"the key of a store")
    prefixes.told(0, frames.PrefixNews(key=kept.use_key(prefixes.key)))
    made = kept.extend((), np.array(tokens, np.int32), kept.root("a"))
    assert prefixes.keys(tokens, 16, "a") == tuple(key.key[:8] for key in made)


def test_logprobs_of_what_is_known_are_not_asked_for_again() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SamplingParams(max_tokens=8, seed=3, logprobs=0), tenant="a")
        said = RowLogprobs(row=0, position=3, token=11, logprob=-1.0, rank=1, top_tokens=(), top_logprobs=())
        event = LogprobEvent(request=RequestId(stream.first), logprobs=said)
        one.client.on_update(frames.Update(1.0, logprobs=[event]))
        one.tell((0, 11))
        (update,) = await stream.take()
        assert update.logprobs == [said]
        next_said = replace(said, position=4, token=12)
        one.client.on_update(frames.Update(1.0, logprobs=[replace(event, logprobs=next_said)]))
        (update,) = await stream.take()
        assert update.logprobs == [next_said] and not update.tokens, "the token is lost with the engine"
        reader = asyncio.create_task(stream.take())
        one.die()
        await asyncio.sleep(0.01)
        assert other.outputs == [[11]]
        again = replace(event, request=RequestId(other.adds[0].first), logprobs=next_said)
        other.client.on_update(frames.Update(1.0, logprobs=[again]))
        other.tell((0, 12))
        told = [*await reader, *(await stream.take() if not reader.result()[0].tokens else [])]
        assert tokens_of(told) == [12] and not any(each.logprobs for each in told)

    run(test())
