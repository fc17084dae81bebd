"""`AsyncLLM.change` and `service_tier`: a pause that does not show in the tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from paceline import LLM, AsyncLLM, SamplingParams
from paceline.core.request import RequestState
from paceline.errors import InvalidRequest, UnknownRequest
from tests.torch.llm_helpers import OPTIONS

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def llm(folder: Path) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(str(folder), **OPTIONS)
    yield llm
    llm.shutdown()


def test_a_pause_changes_no_token(llm: AsyncLLM, folder: Path) -> None:
    async def paused() -> list[int]:
        pauses = 0
        states = llm.loaded.engine.scheduler.state.requests
        async with aclosing(llm.generate("hello there", LONG, "a", service_tier="spot")) as outputs:
            async for output in outputs:
                if output.finished:
                    return list(output.outputs[0].token_ids)
                try:
                    await llm.change("a", paused=True, priority=3)
                except UnknownRequest:  # its last token is on its way
                    assert pauses
                    continue
                pauses += 1
                [request] = states.values()
                assert request.state is RequestState.PAUSED and request.is_spot and request.priority == 4
                await llm.change("a", paused=False)
        raise AssertionError("it never ended")

    got = asyncio.run(asyncio.wait_for(paused(), 60))
    [alone] = LLM(str(folder), **OPTIONS).generate("hello there", LONG, use_tqdm=False, service_tier="batch")
    assert got == list(alone.outputs[0].token_ids)


def test_what_is_not_under_way_cannot_be_changed(llm: AsyncLLM) -> None:
    async def unknown() -> None:
        with pytest.raises(UnknownRequest, match="no request under way has the id b"):
            await llm.change("b", paused=True)
        with pytest.raises(InvalidRequest, match="service_tier must be one of"):
            llm.generate("hello", LONG, service_tier="gold")

    asyncio.run(asyncio.wait_for(unknown(), 60))
