"""Questions to the engine: answered, answered too late, never answered, too many."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from paceline.core.events import Decision, DecisionKind, Rule
from paceline.core.request import RequestId
from paceline.errors import QueueFull
from paceline.process import async_engine, frames
from paceline.process.client import EngineUnavailable, Explanation
from tests.pure.serving.test_serving_client import connected

DECISION = Decision(DecisionKind.FINISH, RequestId(7), Rule.STOP, 3, 9, 1.5, detail="why")


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def answer(question: int, *decisions: Decision) -> frames.Explained:
    told = frames.Explained(question, Explanation(list(decisions), True))
    read = frames.decode_from_engine(frames.encode(told))
    assert isinstance(read, frames.Explained)
    return read


def test_an_answer_finds_its_question() -> None:
    async def test() -> None:
        client, sender = connected()
        asked = [asyncio.ensure_future(client.explain(number)) for number in (7, 8)]
        await asyncio.sleep(0)
        assert sender.sent == [frames.Explain(1, 7), frames.Explain(2, 8)]
        client.on_answer(answer(2))
        client.on_answer(answer(1, DECISION))
        client.on_answer(answer(1, DECISION))  # told twice
        client.on_answer(answer(99, DECISION))  # nobody asked
        assert await asked[0] == ([DECISION], True) and await asked[1] == ([], True)

    run(test())


def test_an_engine_that_is_lost_answers_everybody() -> None:
    async def test() -> None:
        client, _ = connected()
        asked = asyncio.ensure_future(client.explain(7))
        await asyncio.sleep(0)
        client.detach("the engine is gone")
        with pytest.raises(EngineUnavailable, match="the engine is gone"):
            await asked
        with pytest.raises(EngineUnavailable):
            await client.explain(7)

    run(test())


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "PATIENCE_S", 0.01)

    async def test() -> None:
        client, _ = connected()
        with pytest.raises(EngineUnavailable, match="does not answer"):
            await client.explain(7)

    run(test())


def test_only_so_many_ask_at_a_time() -> None:
    async def test() -> None:
        client, _ = connected()
        asked = [asyncio.ensure_future(client.explain(7)) for _ in range(async_engine.MOST_QUESTIONS)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="too many questions"):
            await client.explain(7)
        asked[0].cancel()  # who goes away makes room
        await asyncio.gather(asked[0], return_exceptions=True)
        again = asyncio.ensure_future(client.explain(8))
        await asyncio.sleep(0)
        client.on_answer(answer(async_engine.MOST_QUESTIONS + 1, DECISION))
        assert await again == ([DECISION], True)
        for one in asked[1:]:
            one.cancel()

    run(test())
