"""A fleet without processes: what of a request and of an engine is known after a loss."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from paceline.core.request import (
    BranchState,
    Change,
    ChangeOutcome,
    RequestId,
    RequestState,
)
from paceline.core.stretch import MediaInput, MediaPart, PromptParts
from paceline.process import frames
from paceline.process.client import EngineStats, EngineUnavailable, Explanation
from paceline.process.fleet.known_prefixes import FleetPrefixes
from paceline.routing.view import Gauges
from tests.fake_fleet import PROMPT, SAMPLING, fleet_of, run


def test_a_request_that_is_begun_anew_is_as_old_as_it_is() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0.05)
        one.die()
        await asyncio.sleep(0.01)
        (add,) = other.adds
        assert not add.outputs and 0.05 <= add.age_s < 5
        reader.cancel()

    run(test())


def test_a_report_is_taken_in_once_whatever_else_is_wrong_with_frames() -> None:
    fleet, engines = fleet_of(2)
    for engine in engines:
        engine.client.rejects.undecodable += 1  # a token for a reader that is gone does that
        engine.client.on_update(frames.Update(1.0, stats=EngineStats(load=Gauges())))
    for _ in range(4):
        fleet.submit(PROMPT, SAMPLING, tenant="a")
    assert fleet.view.rows.tolist() == [2, 2]
    assert fleet.stats is fleet.stats and fleet.stats.rejected_frames == 2


def test_requests_that_wait_for_an_engine_do_not_name_their_blocks_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = []

    def keys(self: FleetPrefixes, tokens: Any, *more: Any) -> tuple[bytes, ...]:
        named.append(len(tokens))
        return ()

    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        one.die()
        other.die()
        readers = [asyncio.create_task(fleet.submit(PROMPT, SAMPLING, tenant="a").take()) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not named
        one.start()
        await asyncio.sleep(0.1)
        assert len(named) == len(one.adds) == 3
        for reader in readers:
            reader.cancel()

    monkeypatch.setattr(FleetPrefixes, "keys", keys)
    run(test())


def test_a_tree_has_the_numbers_that_its_owner_knows() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a")
        one.tell((0, 1))
        await stream.take()
        one.die()
        reader = asyncio.create_task(stream.take())
        await asyncio.sleep(0.01)
        inner = other.adds[0].first
        forked = fleet.fork(stream.first, 1, at=1)
        assert inner != stream.first
        for asked in (stream.first, forked.first):
            task = asyncio.create_task(fleet.tree(asked))
            await asyncio.sleep(0)
            question = other.sent[-1]
            assert isinstance(question, frames.ShowTree)
            more = {
                "state": RequestState.RUNNING,
                "score": 0.0,
                "num_prompt": 3,
                "num_output": 1,
                "shares": 4,
            }
            pairs = ((inner, None), (forked.first, RequestId(inner)))
            both = [BranchState(request=RequestId(each), parent=of, **more) for each, of in pairs]  # type: ignore[arg-type]
            other.client.on_answer(frames.TreeShown(question.question, both))
            found = await task
            assert [each.request for each in found] == [stream.first, forked.first]
            assert [each.parent for each in found] == [None, stream.first]
        reader.cancel()

    run(test())


def test_what_its_owner_has_changed_stays_changed_in_another_engine() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        stream = fleet.submit(PROMPT, SAMPLING, tenant="a", timeout_s=60.0)
        reader = asyncio.create_task(stream.take())
        change = Change(priority=3, until_s=asyncio.get_running_loop().time() + 20, paused=True)
        asked = asyncio.create_task(fleet.change([stream.first], change))
        await asyncio.sleep(0)
        question = one.sent[-1]
        assert isinstance(question, frames.ChangeBranches)
        one.client.on_answer(frames.Changed(question.question, [ChangeOutcome.CHANGED]))
        assert await asked == [ChangeOutcome.CHANGED]
        one.die()
        await asyncio.sleep(0.05)
        assert not other.adds, "it is paused"
        assert await fleet.prune([stream.first]) == [ChangeOutcome.BUSY]
        assert await fleet.change([stream.first], Change(paused=False)) == [ChangeOutcome.CHANGED]
        await asyncio.sleep(0.05)
        (add,) = other.adds
        assert add.priority == 3 and add.left_s is not None and 10 < add.left_s <= 20
        reader.cancel()

    run(test())


def test_an_engine_that_is_lost_while_it_is_drained_has_an_empty_cache() -> None:
    async def test() -> None:
        fleet, (one, _) = fleet_of(2, router="prefix-aware")
        prompt = list(range(64))
        one.cache(*fleet.prefixes.keys(prompt, 16, "a"))
        assert len(fleet.view.prefixes.held(0)) == 4
        await fleet.drain(0, 0.0)
        one.die()
        fleet.submit(prompt, SAMPLING, tenant="b")
        one.start()
        fleet.resume(0)
        fleet.submit(prompt, SAMPLING, tenant="a")
        assert "prefix" not in fleet.routed

    run(test())


def test_a_prompt_is_refused_with_its_own_pictures_alone() -> None:
    async def test() -> None:
        fleet, engines = fleet_of(3)

        def with_picture(content: bytes) -> Any:
            given = MediaInput(
                content=content, units=1, outputs=1, pixels=np.zeros(3, np.uint8), grid=(1, 1, 1)
            )
            return fleet.submit(PROMPT, SAMPLING, tenant="a", parts=PromptParts(media=(MediaPart(0, given),)))

        poison = with_picture(b"poison")
        reader = asyncio.create_task(poison.take())
        for engine in engines[:2]:
            engine.forecast()
            engine.die()
            await asyncio.sleep(0.02)
        with pytest.raises(EngineUnavailable):
            await reader
        with_picture(b"another")
        fleet.submit(PROMPT, SAMPLING, tenant="a")
        with pytest.raises(EngineUnavailable):
            with_picture(b"poison")

    run(test())


def test_a_branch_is_asked_about_where_it_was_made_and_not_while_no_engine_has_it() -> None:
    async def test() -> None:
        fleet, (one, other) = fleet_of(2)
        first = fleet.submit(PROMPT, SAMPLING, tenant="a")
        second = fleet.submit(PROMPT, SAMPLING, tenant="a")
        assert (first.engine, second.engine) == (0, 1)  # type: ignore[attr-defined]
        forked = fleet.fork(first.first, 1, at=1)
        forked.close()
        asked = asyncio.create_task(fleet.explain(forked.first))
        await asyncio.sleep(0)
        question = one.sent[-1]
        assert isinstance(question, frames.Explain) and question.branch == forked.first
        one.client.on_answer(frames.Explained(question.question, Explanation([], False)))
        assert not (await asked).decisions, "those of the request before it are not its own"
        reader = asyncio.create_task(second.take())
        await asyncio.sleep(0)
        one.die()
        other.die()
        await asyncio.sleep(0.01)
        for ask in (fleet.extend(second.first, [1]), fleet.tree(second.first)):
            with pytest.raises(EngineUnavailable, match="waits for an engine"):
                await ask
        with pytest.raises(EngineUnavailable, match="waits for an engine"):
            fleet.fork(second.first, 1, at=1)
        reader.cancel()

    run(test())
