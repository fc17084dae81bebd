"""Every way a request can end: the engine is told, the permit comes back, the observer hears of it once."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.errors import PacelineError, QueueFull
from paceline.process.client import BranchUpdate, EngineState, EngineUnavailable
from paceline.server.access.caller import Caller
from paceline.server.call import Events
from paceline.server.errors import problem_of
from tests.pure.server_api.api_helpers import Api, Script, chunks, ending, ids, says

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}


def steps(*given: Any) -> Script:
    def script(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
        return list(given)

    return script


def updated(text: str = "", **more: Any) -> list[BranchUpdate]:
    return [BranchUpdate(branch=0, tokens=ids(text), **more)]


def problem(api: Api, route: str = CHAT, body: dict[str, Any] | None = None, **more: Any) -> tuple[int, str]:
    with pytest.raises(PacelineError) as caught:
        api.ask(route, body or HELLO, **more)
    found = problem_of(caught.value)
    return found.status, found.code


def ended(api: Api) -> tuple[str, str]:
    """How the one request of this service was recorded."""
    assert api.is_at_rest and api.listener.events[0] == "started"
    assert api.listener.events.count("finished") == 1 == len(api.listener.records)
    (record,) = api.listener.records
    assert record.finished_s is not None
    return record.finish_reason, record.error_code


# ---------------------------------------------------------------- the engine's answers


@pytest.mark.parametrize(
    ("script", "status", "code", "reason"),
    [
        (steps(updated("a", ending=ending("error", 1, "numerical_error"))), 500, "numerical_error", "error"),
        (steps(updated("a", ending=ending("error", 1, "hook"))), 500, "internal_error", "error"),
        (
            steps(updated("a"), updated(ending=ending("abort", 1, "deadline"))),
            504,
            "deadline_exceeded",
            "abort",
        ),
        (steps(updated(ending=ending("abort", 0, "deadline"))), 503, "queue_timeout", "abort"),
        (steps(updated("a", ending=ending("abort", 1))), 503, "engine_unavailable", "abort"),
        (steps(EngineUnavailable("it died")), 503, "engine_unavailable", "abort"),
        (steps(updated("a"), EngineUnavailable("it died")), 503, "engine_unavailable", "abort"),
        (steps(QueueFull("no place")), 429, "queue_full", "error"),
        (steps([BranchUpdate(branch=0, tokens=[10**9])]), 500, "internal_error", "error"),
        (steps([BranchUpdate(branch=0, tokens=[-1])]), 500, "internal_error", "error"),
        (steps([BranchUpdate(branch=7, tokens=[5])]), 500, "internal_error", "error"),
        (steps(ValueError("inside")), 500, "internal_error", "error"),
    ],
)
def test_endings_that_are_errors(script: Script, status: int, code: str, reason: str) -> None:
    api = Api(script)
    assert problem(api) == (status, code)
    assert ended(api)[0] == reason


def test_one_bad_branch_ends_the_whole_request_and_no_other() -> None:
    bad = Api(steps([*updated("a"), BranchUpdate(branch=1, tokens=[10**9])]))
    assert problem(bad, body={**HELLO, "n": 2}) == (500, "internal_error")
    assert ended(bad) == ("error", "internal_error")
    assert Api(says("fine")).ask(CHAT, HELLO)["choices"][0]["message"]["content"] == "fine"


def test_the_engine_is_lost_for_all_prompts_at_once(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(steps(EngineUnavailable("it died")))
    assert problem(api, COMPLETIONS, {**TEXT, "prompt": ["a"] * 8}) == (503, "engine_unavailable")
    assert ended(api) == ("abort", "engine_unavailable")
    gc.collect()
    assert not caplog.records, "no warning of tasks that were never awaited"


def test_an_engine_that_is_not_there_is_told_before_anything_is_read() -> None:
    api = Api()
    api.client.state = EngineState.STARTING
    assert problem(api) == (503, "starting")
    for state in (EngineState.LOST, EngineState.STUCK, EngineState.STOPPED):
        api.client.state = state
        assert problem(api) == (503, "engine_unavailable")
    assert api.listener.events == [] and api.is_at_rest


def test_no_token_in_time() -> None:
    api = Api(steps(), queue_timeout_s=0.02)
    assert problem(api) == (503, "queue_timeout")
    assert ended(api) == ("abort", "queue_timeout")


def test_the_deadline_is_handed_to_the_engine() -> None:
    api = Api(says("a"), request_timeout_s=60.0)
    api.ask(CHAT, HELLO)
    assert 59.0 < api.client.submitted[0]["timeout_s"] <= 60.0


def test_a_submission_that_fails_half_way_takes_back_what_was_submitted() -> None:
    api = Api(says("a"))
    submit = api.client.submit

    def fails(tokens: Sequence[int], sampling: SamplingParams, **more: Any) -> Any:
        if len(api.client.streams) == 2:
            raise EngineUnavailable("it died")
        return submit(tokens, sampling, **more)

    api.client.submit = fails  # type: ignore[method-assign]
    assert problem(api, COMPLETIONS, {**TEXT, "prompt": ["a", "b", "c"]}) == (503, "engine_unavailable")
    assert len(api.client.streams) == 2 and api.is_at_rest


# ---------------------------------------------------------------- clients that leave


async def leave(api: Api, num_frames: int) -> None:
    events = await api.open(CHAT, {**HELLO, "stream": True})
    assert isinstance(events, Events) and not api.is_at_rest
    for _ in range(num_frames):
        await events.frames.__anext__()
    await events.frames.aclose()
    await events.frames.aclose()


@pytest.mark.parametrize("num_frames", [0, 1, 2])
def test_a_stream_is_left(num_frames: int) -> None:
    api = Api(says("a", "b", "c"))
    asyncio.run(leave(api, num_frames))
    assert ended(api) == ("abort", "")
    assert api.listener.num_tokens == num_frames


@pytest.mark.parametrize("body", [HELLO, {**HELLO, "n": 3}])
def test_an_answer_whose_caller_has_left(body: dict[str, Any]) -> None:
    api = Api(steps(updated("a")))

    async def run() -> None:
        task = asyncio.ensure_future(api.open(CHAT, body))
        while not api.listener.num_tokens:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert ended(api) == ("abort", "")


def test_a_request_is_left_while_its_prompt_is_read() -> None:
    api = Api()

    async def run() -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 1500}]}
        task = asyncio.ensure_future(api.open(CHAT, body))
        await asyncio.sleep(0)
        assert api.service.admission.places_taken == 1, "a place is taken before the work begins"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert api.is_at_rest and not api.client.submitted


# ---------------------------------------------------------------- a full house


async def open_streams(api: Api, count: int, **more: Any) -> list[Events]:
    opened = [await api.open(CHAT, {**HELLO, "stream": True}, **more) for _ in range(count)]
    return [events for events in opened if isinstance(events, Events)]


async def refused(api: Api, body: dict[str, Any], **more: Any) -> tuple[int, str, int | None]:
    with pytest.raises(PacelineError) as caught:
        await api.open(CHAT, body, **more)
    found = problem_of(caught.value)
    return found.status, found.code, found.retry_after_s


def test_a_full_queue_says_so_before_a_body_is_read() -> None:
    async def run() -> None:
        api = Api(says("a"), max_queue=2)
        streams = await open_streams(api, 10)  # 8 that run, 2 that wait
        assert api.service.admission.is_full
        assert await refused(api, {"model": 5, "nonsense": []}) == (429, "queue_full", 1)
        await streams[0].frames.aclose()
        await api.open(CHAT, HELLO)
        for events in streams:
            await events.frames.aclose()
        assert api.is_at_rest

    asyncio.run(run())


def test_all_branches_or_none() -> None:
    async def run() -> None:
        api = Api(says("a"), max_queue=4)
        streams = await open_streams(api, 8)
        assert await refused(api, {**HELLO, "n": 8}) == (429, "queue_full", 1)
        assert api.service.admission.places_taken == 8
        await api.open(CHAT, {**HELLO, "n": 4})
        for events in streams:
            await events.frames.aclose()
        assert await refused(api, {**HELLO, "model": "x", "n": 8}) == (404, "model_not_found", None)
        assert api.is_at_rest

    asyncio.run(run())


def test_more_than_there_could_ever_be() -> None:
    api = Api(max_queue=1)
    assert problem(api, COMPLETIONS, {**TEXT, "prompt": ["a"] * 2, "n": 8}) == (400, "invalid_value")


def test_a_key_has_its_own_bound() -> None:
    async def run() -> None:
        api = Api(says("a"))
        caller, other = Caller(tenant="t", max_concurrency=2), Caller(tenant="u", max_concurrency=1)
        streams = await open_streams(api, 2, caller=caller)
        assert await refused(api, HELLO, caller=caller) == (429, "concurrency_exceeded", 1)
        await api.open(CHAT, HELLO, caller=other)
        await streams[0].frames.aclose()
        await api.open(CHAT, HELLO, caller=caller)
        await streams[1].frames.aclose()
        assert api.is_at_rest and api.service.admission.under_way("t") == 0

    asyncio.run(run())


def test_tokens_that_wait_are_bounded_by_a_guess_and_then_exactly() -> None:
    async def run() -> None:
        api = Api(says("a", "b"), max_queued_tokens=100)
        (first,) = await open_streams(api, 1)
        assert api.service.admission.tokens_waiting == 21
        long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 90}]}
        assert await refused(api, long) == (429, "queue_full", 1), "90 / 4 fit, 109 tokens do not"
        longer = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 400}]}
        assert await refused(api, longer) == (429, "queue_full", 1)
        assert api.service.admission.tokens_waiting == 21
        await first.frames.__anext__()
        assert api.service.admission.tokens_waiting == 0, "it runs: its prompt waits no longer"
        await api.open(CHAT, long)
        await first.frames.aclose()
        assert api.is_at_rest

    asyncio.run(run())


# ---------------------------------------------------------------- text


def test_a_coalesced_end_with_a_stop_string_inside_needs_no_command() -> None:
    api = Api(steps(updated("abENDcd", ending=ending("length", 7))))
    found = chunks(api.stream(COMPLETIONS, {**TEXT, "stop": "END", "logprobs": 0}))
    assert [chunk["choices"][0]["text"] for chunk in found] == ["ab", ""]
    assert api.client.streams[0].finished_at == [] and ended(api) == ("stop", "")
    assert api.listener.num_tokens == 5


def test_what_comes_behind_a_stop_string_is_dropped() -> None:
    script = steps(updated("abEND"), updated("more"), updated("x", ending=ending("stop", 5)))
    api = Api(script)
    (choice,) = api.ask(COMPLETIONS, {**TEXT, "stop": "END", "return_token_ids": True})["choices"]
    assert (choice["text"], choice["stop_reason"], choice["token_ids"]) == ("ab", "END", ids("abEND"))
    assert api.listener.num_tokens == 5


def test_what_was_held_back_for_a_stop_string_comes_with_the_end() -> None:
    api = Api(steps(updated("abEN"), updated(ending=ending("length", 4))))
    found = chunks(api.stream(COMPLETIONS, {**TEXT, "stop": "END"}))
    assert [chunk["choices"][0]["text"] for chunk in found] == ["ab", "EN", ""]


def test_a_stop_id_is_told() -> None:
    api = Api(steps(updated("ab", ending=ending("stop", 2))))
    (choice,) = api.ask(COMPLETIONS, {**TEXT, "stop_token_ids": ids("b")})["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", ids("b")[0])
