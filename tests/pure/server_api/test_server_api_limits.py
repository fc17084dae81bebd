"""What requests count against the limits of their key, from admission to whatever end they come to."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest

from paceline.process.client import EngineUnavailable
from paceline.server.access.caller import Caller
from paceline.server.access.rate_limits import RateLimits
from paceline.server.call import Answer, Download, Events
from paceline.server.errors import problem_of
from tests.pure.server_api.api_helpers import Api, Script, ids, says

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "abcdefghij" * 4


class Limited:
    """A service, and one key with a limit on tokens."""

    def __init__(self, script: Script, per_minute: int) -> None:
        self.api = Api(script)
        self.now_s = 0.0
        self.rates = RateLimits(lambda: self.now_s)
        self.caller = Caller(
            tenant="t", tokens_per_minute=per_minute, service_class="spot", lowest_priority_number=-2
        )

    @property
    def remaining(self) -> int:
        allowance = self.rates.open(self.caller)
        assert allowance is not None
        return int(allowance.headers()["x-ratelimit-remaining-tokens"])

    async def open(self, route: str = TEXT, **body: Any) -> Answer | Events:
        prompt = {"prompt": PROMPT} if route == TEXT else {"messages": [{"role": "user", "content": "hi"}]}
        found, call = self.api.call(route, {"model": "tiny", **prompt, **body}, caller=self.caller)
        answer = await found.handler(replace(call, allowance=self.rates.open(self.caller)))
        assert not isinstance(answer, Download)
        return answer

    async def refused(self, **body: Any) -> tuple[int, str, int | None]:
        with pytest.raises(Exception) as failed:
            await self.open(**body)
        problem = problem_of(failed.value)
        assert "tokens_per_minute" in problem.message
        return problem.status, problem.code, problem.retry_after_s


NUM_PROMPT = len(ids(PROMPT))


def test_a_request_is_charged_its_longest_answer_and_then_what_it_got() -> None:
    async def run() -> None:
        limited = Limited(says("abc", "de"), 6000)
        events = await limited.open(stream=True, max_tokens=50, n=2)
        assert isinstance(events, Events)
        assert limited.remaining == 6000 - NUM_PROMPT - 100
        async for _ in events.frames:
            pass
        assert limited.remaining == 6000 - NUM_PROMPT - 2 * len(ids("abc") + ids("de"))
        assert limited.api.listener.records[0].service_class == "spot"
        await limited.open(max_tokens=50)
        assert limited.remaining == 6000 - 2 * NUM_PROMPT - 3 * len(ids("abcde")), "a whole answer too"

    asyncio.run(run())


def test_what_has_no_tokens_left_is_refused_before_the_engine_hears_of_it() -> None:
    async def run() -> None:
        limited = Limited(says("a"), 240)  # four a second
        events = await limited.open(stream=True, max_tokens=240 - NUM_PROMPT)
        assert isinstance(events, Events)
        assert limited.remaining == 0
        guess = len(PROMPT) // 4 + 20
        assert await limited.refused(max_tokens=20) == (429, "rate_limit_exceeded", -(-guess // 4))
        limited.now_s += (NUM_PROMPT + 19) / 4
        assert await limited.refused(max_tokens=20) == (429, "rate_limit_exceeded", 1), "exactly, by now"
        assert len(limited.api.client.submitted) == 1 and limited.api.service.admission.places_taken == 1
        limited.now_s += 0.25
        await limited.open(max_tokens=20)
        await events.frames.aclose()
        assert limited.api.is_at_rest

    asyncio.run(run())


def test_a_prompt_larger_than_the_limit_is_a_mistake_of_the_request() -> None:
    async def run() -> None:
        limited = Limited(says("a"), NUM_PROMPT - 1)
        assert await limited.refused() == (400, "invalid_value", None)
        assert limited.remaining == NUM_PROMPT - 1 and limited.api.is_at_rest

    asyncio.run(run())


def test_a_chat_without_a_length_is_accepted_by_a_small_limit() -> None:
    async def run() -> None:
        limited = Limited(says("abc"), 100)
        await limited.open(CHAT)
        assert 0 < limited.remaining < 100
        wait_s = math.ceil((100 - limited.remaining) * 60 / 100)  # until nothing is spent
        assert await limited.refused(route=CHAT) == (429, "rate_limit_exceeded", wait_s)

    asyncio.run(run())


def test_a_client_that_leaves_pays_for_its_prompt() -> None:
    async def run() -> None:
        limited = Limited(says("a", "b"), 600)
        events = await limited.open(stream=True, max_tokens=100)
        assert isinstance(events, Events)
        await events.frames.__anext__()
        await events.frames.aclose()
        assert limited.remaining == 600 - NUM_PROMPT - 1

    asyncio.run(run())


def test_what_fails_here_before_a_token_came_is_not_charged() -> None:
    async def run() -> None:
        limited = Limited(lambda prompt, sampling: [EngineUnavailable("gone")], 600)
        with pytest.raises(EngineUnavailable):
            await limited.open(max_tokens=100)
        assert limited.remaining == 600 and limited.api.is_at_rest
        with pytest.raises(Exception, match="context"):
            await limited.open(prompt=[5] * 10_000)
        assert limited.remaining == 600

    asyncio.run(run())
