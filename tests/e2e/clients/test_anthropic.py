"""The official `anthropic` client against a live server: sync, async, streams, errors, retries, leaving."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import MessageParam, TextBlock

from tests.e2e.client_server import (
    DISABLED_KEY,
    ENDLESS,
    KEY,
    MODEL,
    NARROW_KEY,
    ClientServer,
    client_server,
)
from tests.model_folder import CHARACTERS, CONTROLS

TOKENS = 4
# Control tokens have no text; what is asked for here is counted in characters.
SPOKEN: dict[str, Any] = {
    "ignore_eos": True,
    "allowed_token_ids": list(range(len(CONTROLS), len(CONTROLS) + len(CHARACTERS))),
}
GREEDY: dict[str, Any] = {**SPOKEN, "temperature": 0}


def user(text: str) -> list[MessageParam]:
    return [{"role": "user", "content": text}]


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert isinstance(block, TextBlock)
    return str(block.text)


@pytest.fixture
def client(server: ClientServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as one:
        yield one


# ---------------------------------------------------------------- many requests


def test_sixty_messages_one_after_another(client: Anthropic) -> None:
    for index in range(60):
        message = client.messages.create(
            model=MODEL, max_tokens=TOKENS, messages=user(f"question {index}"), extra_body=SPOKEN
        )
        assert message.id.startswith("msg_")
        assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
        assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
        assert len(text_of(message)) == TOKENS
        assert message.usage.output_tokens == TOKENS


def test_two_hundred_messages_at_once(server: ClientServer) -> None:
    """Plain and streamed, forty at a time; greedy answers do not depend on the company."""

    async def ask(client: AsyncAnthropic, index: int) -> str:
        message = await client.messages.create(
            model=MODEL, max_tokens=TOKENS, messages=user(f"a{index % 50}"), extra_body=GREEDY
        )
        return text_of(message)

    async def stream(client: AsyncAnthropic, index: int) -> str:
        async with client.messages.stream(
            model=MODEL, max_tokens=TOKENS, messages=user(f"a{index % 50}"), extra_body=GREEDY
        ) as events:
            return "".join([piece async for piece in events.text_stream])

    async def all_of_them() -> list[str]:
        limits = httpx2.Limits(max_connections=40)
        async with AsyncAnthropic(
            base_url=server.url,
            api_key=KEY,
            max_retries=0,
            http_client=anthropic.DefaultAsyncHttpxClient(limits=limits),
        ) as client:
            asked = [ask(client, index) if index < 100 else stream(client, index) for index in range(200)]
            return await asyncio.gather(*asked)

    texts = asyncio.run(all_of_them())
    assert all(len(text) == TOKENS for text in texts)
    assert all(text == texts[index % 50] for index, text in enumerate(texts))


# ---------------------------------------------------------------- what a request may ask for


def test_events_come_in_order(client: Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "messages": user("hi"), "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    events = list(client.messages.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) - {"ping"} == {"content_block_delta"}
    pieces = [
        event.delta.text
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "text_delta"
    ]
    assert "".join(pieces) == text_of(whole)
    begun, ended = events[0], events[-2]
    assert begun.type == "message_start" and ended.type == "message_delta"
    assert begun.message.content == [] and begun.message.stop_reason is None
    assert (ended.delta.stop_reason, ended.usage.output_tokens) == ("max_tokens", 8)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert (text_of(final), final.stop_reason) == (text_of(whole), whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens == 8


def test_systems_blocks_stops_and_prefilled_answers(client: Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 12,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "metadata": {"user_id": "somebody"},
    }
    greedy = text_of(client.messages.create(**asked, extra_body=GREEDY))
    as_text = {**asked, "messages": user("hi"), "system": [{"type": "text", "text": "Be brief."}]}
    assert text_of(client.messages.create(**as_text, extra_body=GREEDY)) == greedy
    stop = greedy[4:6]
    stopped = client.messages.create(**asked, stop_sequences=["\x7f no", stop], extra_body=GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == greedy[: greedy.index(stop)]

    begun: list[MessageParam] = [*asked["messages"], {"role": "assistant", "content": greedy[:3]}]
    gone_on = client.messages.create(**{**asked, "messages": begun, "max_tokens": 9}, extra_body=GREEDY)
    assert greedy[:3] + text_of(gone_on) == greedy


def test_structured_answers(client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    for asked in ({"output_config": {"format": form}}, {"output_format": form}):
        message = client.messages.create(model=MODEL, max_tokens=100, messages=user("so?"), extra_body=asked)
        assert json.loads(text_of(message))["mood"] in ("good", "bad")
        assert message.stop_reason == "end_turn"
    bad = {"type": "json_schema", "schema": {"type": "strin"}}
    with pytest.raises(anthropic.BadRequestError, match="output_format: Invalid type"):
        client.messages.create(
            model=MODEL, max_tokens=9, messages=user("so?"), extra_body={"output_format": bad}
        )


def test_tokens_are_counted_and_cached_ones_told(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=user("c" * 64), system="s")
    asked: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 1,
        "system": "s",
        "messages": user("c" * 64),
        "extra_body": SPOKEN,
    }
    first, again = (client.messages.create(**asked).usage for _ in range(2))
    assert first.input_tokens + (first.cache_read_input_tokens or 0) == counted.input_tokens
    assert (again.cache_read_input_tokens or 0) >= 64
    assert again.input_tokens + (again.cache_read_input_tokens or 0) == counted.input_tokens


def test_models(client: Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    found = client.models.retrieve(MODEL)
    assert (found.id, found.type, found.display_name) == (MODEL, "model", MODEL)
    assert found.created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("another")
    assert isinstance(caught.value.body, dict) and caught.value.body["error"]["type"] == "not_found_error"


# ---------------------------------------------------------------- errors


def test_mistakes_have_the_clients_own_exceptions(client: Anthropic) -> None:
    def refused(kind: type[anthropic.APIStatusError], name: str, **changes: Any) -> str:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": user("x"), **changes}
        with pytest.raises(kind) as caught:
            client.messages.create(**asked)
        assert type(caught.value) is kind
        assert caught.value.request_id
        body = caught.value.body
        assert isinstance(body, dict) and (body["type"], body["error"]["type"]) == ("error", name)
        return str(body["error"]["message"])

    bad = "invalid_request_error"
    assert "temperature" in refused(anthropic.BadRequestError, bad, extra_body={"temperature": 3})
    assert "messages" in refused(anthropic.BadRequestError, bad, messages=[])
    assert "max_tokens" in refused(anthropic.BadRequestError, bad, max_tokens=0)
    tool = {"name": "f f", "input_schema": {"type": "object"}}
    assert "tools" in refused(anthropic.BadRequestError, bad, tools=[tool])
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/"}}
    refused(anthropic.BadRequestError, bad, messages=[{"role": "user", "content": [image]}])
    assert "maximum context length" in refused(
        anthropic.BadRequestError, bad, messages=user("x" * (2 * ENDLESS))
    )
    refused(anthropic.NotFoundError, "not_found_error", model="another")


def test_keys(client: Anthropic) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "messages": user("x")}
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**asked)
    with pytest.raises(anthropic.PermissionDeniedError):
        client.with_options(api_key=DISABLED_KEY).messages.create(**asked)
    with Anthropic(base_url=str(client.base_url), auth_token=KEY, max_retries=0) as bearer:
        assert bearer.messages.create(**asked).usage.output_tokens == 1


def test_a_request_too_many_is_a_rate_limit_and_a_retry_gets_through(server: ClientServer) -> None:
    statuses: list[int] = []
    asked: dict[str, Any] = {"model": MODEL, "messages": user("x"), "extra_body": SPOKEN}
    with (
        Anthropic(base_url=server.url, api_key=NARROW_KEY, max_retries=0) as narrow,
        narrow.messages.create(**asked, max_tokens=ENDLESS, stream=True) as held,
    ):
        next(iter(held))
        with pytest.raises(anthropic.RateLimitError) as caught:
            narrow.messages.create(**asked, max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1

        def note(response: httpx2.Response) -> None:
            statuses.append(response.status_code)
            held.close()
            # The place is free at once, not when the answer would have ended. The client believes milliseconds first.
            response.headers.update({"retry-after": "1", "retry-after-ms": "1000"})

        hooked = anthropic.DefaultHttpxClient(event_hooks={"response": [note]})
        with Anthropic(base_url=server.url, api_key=NARROW_KEY, max_retries=5, http_client=hooked) as patient:
            assert patient.messages.create(**asked, max_tokens=1).usage.output_tokens == 1
    assert statuses[0] == 429 and statuses[-1] == 200


# ---------------------------------------------------------------- leaving early


def test_leaving_a_stream_frees_its_blocks(server: ClientServer, client: Anthropic) -> None:
    with client.messages.stream(
        model=MODEL, max_tokens=ENDLESS, messages=user("x"), extra_body=SPOKEN
    ) as stream:
        next(iter(stream.text_stream))
        server.wait_until(server.is_running)
    server.wait_until(server.is_idle)


def test_cancelled_tasks_free_their_blocks(server: ClientServer) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": user("x"),
        "max_tokens": ENDLESS,
        "extra_body": SPOKEN,
    }

    async def read(client: AsyncAnthropic) -> None:
        async for _ in await client.messages.create(**asked, stream=True):
            pass

    async def leave() -> None:
        async with AsyncAnthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
            tasks = [asyncio.create_task(read(client)) for _ in range(3)]
            await asyncio.to_thread(
                server.wait_until, lambda: server.metric("num_requests_running") == len(tasks)
            )
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(server.wait_until, server.is_idle)

    asyncio.run(leave())


# ---------------------------------------------------------------- a server that comes and goes


def test_a_client_that_is_early_waits_and_one_that_is_late_is_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    statuses: list[tuple[int, str | None]] = []
    hook = {"response": [lambda r: statuses.append((r.status_code, r.headers.get("retry-after")))]}
    asked: dict[str, Any] = {"model": MODEL, "messages": user("x"), "extra_body": SPOKEN}
    with client_server(tmp_path_factory.mktemp("life")) as server:
        server.wait_for(503)
        with Anthropic(
            base_url=server.url,
            api_key=KEY,
            max_retries=60,
            http_client=anthropic.DefaultHttpxClient(event_hooks=hook),
        ) as client:
            with pytest.raises(anthropic.APIStatusError) as early:
                client.with_options(max_retries=0).messages.create(**asked, max_tokens=2)
            assert early.value.request_id
            assert isinstance(early.value.body, dict)
            assert early.value.body["error"]["type"] == "overloaded_error"
            assert client.messages.create(**asked, max_tokens=2).usage.output_tokens == 2
            assert statuses[-1] == (200, None)
            assert {(status, int(after or 0) > 0) for status, after in statuses[:-1]} == {(503, True)}

            stream = client.messages.create(**asked, max_tokens=ENDLESS, stream=True)
            next(iter(stream))
            server.terminate()
            with pytest.raises(anthropic.APIStatusError) as late:
                list(stream)
            body = late.value.body
            assert isinstance(body, dict) and body["error"]["type"] == "overloaded_error"
            assert "shutting down" in body["error"]["message"]
        assert server.process.wait(30) == 0
