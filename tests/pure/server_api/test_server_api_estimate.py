"""When an answer will come: headers of answers, and /v1/estimate."""

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.server.access.caller import Caller, Prices
from paceline.server.call import Answer, Events
from tests.fake_engine import forecast
from tests.pure.server_api.api_helpers import DEFAULT_CALLER, Api, says

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SOON = forecast(0.0834, 2.5, ahead=3)


def estimate(api: Api, caller: Caller = DEFAULT_CALLER, **body: Any) -> dict[str, Any]:
    found: dict[str, Any] = api.ask("/v1/estimate", {"model": "tiny", **body}, caller=caller)
    return found


@pytest.mark.parametrize("streams", [False, True])
def test_answers_say_when_they_were_expected(streams: bool) -> None:
    api = Api(says("a", "b"))
    api.client.forecast_result = SOON

    async def headers() -> dict[str, str]:
        answer = await api.open(CHAT, {"model": "tiny", "messages": MESSAGES, "stream": streams})
        if isinstance(answer, Events):
            async for _ in answer.frames:
                pass
        return dict(answer.headers() if isinstance(answer, Events) else answer.headers)

    found = asyncio.run(headers())
    assert found["x-paceline-queue-position"] == "3"
    assert found["x-paceline-predicted-ttft-ms"] == "83"
    assert found["x-paceline-predicted-finish-ms"] == "2500"


def test_what_is_not_known_is_not_said() -> None:
    api = Api()
    api.client.forecast_result = None
    answer = asyncio.run(api.open(CHAT, {"model": "tiny", "messages": MESSAGES}))
    assert isinstance(answer, Answer)
    assert not [name for name in answer.headers if name.startswith("x-paceline-predicted")]


@pytest.mark.parametrize("what", [{"prompt": "abc"}, {"messages": MESSAGES}])
def test_an_estimate_runs_nothing(what: dict[str, Any]) -> None:
    api = Api()
    api.client.forecast_result = SOON
    found = estimate(api, **what, max_tokens=7)
    assert (found["fits"], found["reason"], found["max_tokens"]) == (True, None, 7)
    assert (found["queue_position"], found["ttft_ms"], found["finish_ms"]) == (3, 83, 2500)
    assert found["prompt_tokens"] == len(api.client.asked[0]["tokens"]) > 0
    assert not api.client.submitted and api.is_at_rest


def test_the_price_of_pins_is_part_of_it() -> None:
    api, caller = Api(), Caller(prices=Prices(kv_block_second=Decimal("0.001")))
    body = {"messages": MESSAGES, "prompt_cache_retention": "24h", "max_tokens": 7}
    api.client.forecast_result = replace(SOON, finish_s=SOON.first_token_s)
    without = estimate(api, caller, **body)["price"]
    api.client.forecast_result = replace(
        api.client.forecast_result, pinned_block_us=4_000_000, most_pinned_block_us=10_000_000
    )
    found = estimate(api, caller, **body)
    assert api.client.asked[-1]["sampling"].pin is not None
    assert found["pinned_kv_block_seconds"] == 4.0
    more = {
        name: found["price"][name]["kv_nano_units"] - without[name]["kv_nano_units"]
        for name in ("expected", "at_most")
    }
    assert more == {"expected": 4_000_000, "at_most": 10_000_000}


def test_a_request_that_would_be_refused_is_told_so() -> None:
    api = Api()  # its engine refuses
    found = estimate(api, prompt="abc")
    assert (found["fits"], found["reason"], found["ttft_ms"]) == (False, "it is too long", None)


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": MESSAGES}, {"prompt": ["a", "b"]}])
def test_an_estimate_is_of_one_prompt(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        estimate(Api(), **body)
