"""The official `openai` client against a live server: sync, async, streams, every error class, retries, leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

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


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(server: ClientServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as one:
        yield one


# ---------------------------------------------------------------- many requests


def test_a_hundred_requests_one_after_another(client: OpenAI) -> None:
    def ask(index: int) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=user(f"question {index}"), max_tokens=TOKENS, extra_body=SPOKEN
        )
        assert (answer.object, answer.model) == ("chat.completion", MODEL)
        assert answer.id.startswith("chatcmpl-")
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
        assert len(choice.message.content or "") == TOKENS
        usage = answer.usage
        assert usage is not None and usage.completion_tokens == TOKENS
        assert usage.total_tokens == usage.prompt_tokens + TOKENS

    def complete(index: int) -> None:
        answer = client.completions.create(
            model=MODEL, prompt=f"prompt {index}", max_tokens=TOKENS, extra_body=SPOKEN
        )
        assert answer.object == "text_completion"
        assert [len(choice.text) for choice in answer.choices] == [TOKENS]

    for index in range(50):
        ask(index)
        complete(index)


def test_two_hundred_requests_at_once(server: ClientServer) -> None:
    """Plain and streamed, chats and completions, forty at a time; greedy answers do not depend on the company."""

    async def ask(client: AsyncOpenAI, index: int) -> str:
        answer = await client.chat.completions.create(
            model=MODEL, messages=user(f"a{index % 50}"), max_tokens=TOKENS, temperature=0, extra_body=SPOKEN
        )
        return answer.choices[0].message.content or ""

    async def stream(client: AsyncOpenAI, index: int) -> str:
        chunks = await client.chat.completions.create(
            model=MODEL,
            messages=user(f"a{index % 50}"),
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body=SPOKEN,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def all_of_them() -> list[str]:
        limits = httpx2.Limits(max_connections=40)
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1",
            api_key=KEY,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(limits=limits),
        ) as client:
            asked = [ask(client, index) if index < 100 else stream(client, index) for index in range(200)]
            return await asyncio.gather(*asked)

    texts = asyncio.run(all_of_them())
    assert all(len(text) == TOKENS for text in texts)
    assert all(text == texts[index % 50] for index, text in enumerate(texts))


# ---------------------------------------------------------------- what a request may ask for


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    found = client.models.retrieve(MODEL)
    assert (found.id, found.object) == (MODEL, "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_stream_of_a_chat_in_order(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=user("hello"),
            max_tokens=8,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=SPOKEN,
        )
    )
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    *said, last = chunks
    assert last.choices == [] and last.usage is not None
    assert (last.usage.completion_tokens, last.usage.total_tokens - last.usage.prompt_tokens) == (16, 16)
    assert all(chunk.usage is None for chunk in said)
    for index in (0, 1):
        own = [choice for chunk in said for choice in chunk.choices if choice.index == index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert [choice.finish_reason for choice in own[-2:]] == [None, "length"]
        assert not own[-1].delta.content
        assert len("".join(choice.delta.content or "" for choice in own)) == 8


def test_the_stream_helper_of_the_client_builds_the_same_answer(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": user("hello"), "max_tokens": 12, "temperature": 0}
    greedy = client.chat.completions.create(**asked, extra_body=SPOKEN).choices[0].message.content or ""
    stop = greedy[8:10]  # the helper takes an answer that was cut at max_tokens for a mistake
    with client.chat.completions.stream(**asked, stop=stop, extra_body=SPOKEN) as events:
        seen = [event.delta for event in events if event.type == "content.delta"]
        final = events.get_final_completion().choices[0]
    assert "".join(seen) == final.message.content == greedy[: greedy.index(stop)]
    assert final.finish_reason == "stop"


def test_several_answers_seeds_and_stops(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": user("more"), "max_tokens": 12, "extra_body": SPOKEN}
    first, second = (client.chat.completions.create(**asked, n=3, seed=7) for _ in range(2))
    texts = [choice.message.content or "" for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in second.choices]
    assert first.usage is not None and first.usage.completion_tokens == 36

    greedy = client.chat.completions.create(**asked, temperature=0).choices[0].message.content or ""
    stop = greedy[4:6]
    stopped = client.chat.completions.create(**asked, temperature=0, stop=["\x7f no", stop]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (greedy[: greedy.index(stop)], "stop")


def test_log_probabilities(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 5, "temperature": 0, "extra_body": SPOKEN}
    chat = client.chat.completions.create(**asked, messages=user("p"), logprobs=True, top_logprobs=3)
    choice = chat.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert "".join(entry.token for entry in entries) == choice.message.content
    for entry in entries:
        assert bytes(entry.bytes or []).decode() == entry.token
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)

    answer = client.completions.create(**asked, prompt="abc", logprobs=2, echo=True)
    text, found = answer.choices[0].text, answer.choices[0].logprobs
    assert text.startswith("abc") and found is not None
    assert found.tokens == list(text) and found.text_offset == list(range(8))
    assert found.token_logprobs is not None and found.top_logprobs is not None
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    for logprob, top in list(zip(found.token_logprobs, found.top_logprobs, strict=True))[3:]:
        assert logprob == max(top.values())


def test_every_shape_of_a_prompt(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0, "extra_body": SPOKEN}
    ids = [len(CONTROLS) + CHARACTERS.index(character) for character in "ab"]
    shapes: list[Any] = ["ab", ["ab"], ids, [ids], ["ab", "ab"], [ids, ids]]
    texts = [[choice.text for choice in client.completions.create(**asked, prompt=p).choices] for p in shapes]
    assert [len(found) for found in texts] == [1, 1, 1, 1, 2, 2]
    assert len({text for found in texts for text in found}) == 1
    streamed = client.completions.create(**asked, prompt=["ab", "ab"], stream=True)
    joined = ["", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            joined[choice.index] += choice.text
    assert joined == texts[4]


def test_parts_nulls_and_unknown_fields(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        max_completion_tokens=3,
        stop=None,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        extra_body={"no_such_field": 1, "ignore_eos": True},
    )
    assert raw.headers["x-paceline-ignored-fields"] == "no_such_field"
    answer = raw.parse()
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert raw.headers["x-request-id"]
    assert answer._request_id == raw.headers["x-request-id"]


def test_responses(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "hello",
        "max_output_tokens": 8,
        "temperature": 0,
        "extra_body": SPOKEN,
    }
    answer = client.responses.create(**asked)
    assert (answer.status, len(answer.output_text)) == ("incomplete", 8)
    assert answer.incomplete_details is not None and answer.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(**asked, stream=True))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


# ---------------------------------------------------------------- errors


class Verdict(BaseModel):
    """What the client makes a schema of, in strict mode."""

    mood: Literal["good", "bad"]
    is_sure: bool
    tags: list[Literal["a", "b"]] = pydantic.Field(min_length=1, max_length=2)


def test_structured_answers(client: OpenAI) -> None:
    for seed in range(4):
        told = client.chat.completions.parse(
            model=MODEL, messages=user("so?"), response_format=Verdict, seed=seed, n=2
        )
        assert [choice.finish_reason for choice in told.choices] == ["stop", "stop"]
        assert all(isinstance(choice.message.parsed, Verdict) for choice in told.choices)
        response = client.responses.parse(model=MODEL, input="so?", text_format=Verdict, temperature=1)
        assert isinstance(response.output_parsed, Verdict) and response.status == "completed"
    with client.chat.completions.stream(model=MODEL, messages=user("so?"), response_format=Verdict) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Verdict)
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}, "strict": True}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=user("so?"), response_format=form)
    assert refused.value.param == "response_format" and "not" in str(refused.value)


def test_mistakes_have_the_clients_own_exceptions(client: OpenAI) -> None:
    def ask(**changes: Any) -> None:
        asked = {"model": MODEL, "messages": user("x"), "max_tokens": 1, **changes}
        client.chat.completions.create(**asked)

    def refused(kind: type[openai.APIStatusError], code: str, param: str | None, **changes: Any) -> str:
        with pytest.raises(kind) as caught:
            ask(**changes)
        assert type(caught.value) is kind
        assert (caught.value.code, caught.value.param) == (code, param)
        assert caught.value.request_id
        return str(caught.value.message)

    refused(openai.BadRequestError, "invalid_value", "temperature", temperature=3)
    refused(openai.BadRequestError, "invalid_value", "messages", messages=[])
    refused(openai.NotFoundError, "model_not_found", "model", model="another")
    tools = [{"type": "function", "function": {"name": "f f", "parameters": {}}}]
    refused(openai.BadRequestError, "invalid_value", "tools", tools=tools)
    long = refused(
        openai.BadRequestError, "context_length_exceeded", "messages", messages=user("x" * (2 * ENDLESS))
    )
    assert "maximum context length is" in long
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


def test_keys(client: OpenAI) -> None:
    for key, kind, code in (
        ("wrong", openai.AuthenticationError, "invalid_api_key"),
        (DISABLED_KEY, openai.PermissionDeniedError, "key_disabled"),
    ):
        with pytest.raises(kind) as caught:
            client.with_options(api_key=key).models.list()
        assert isinstance(caught.value, openai.APIStatusError) and caught.value.code == code


def test_a_request_too_many_is_a_rate_limit_and_a_retry_gets_through(server: ClientServer) -> None:
    statuses: list[int] = []
    asked: dict[str, Any] = {"model": MODEL, "prompt": "x", "extra_body": SPOKEN}
    with (
        OpenAI(base_url=f"{server.url}/v1", api_key=NARROW_KEY, max_retries=0) as narrow,
        narrow.completions.create(**asked, max_tokens=ENDLESS, stream=True) as held,
    ):
        next(iter(held))
        with pytest.raises(openai.RateLimitError) as caught:
            narrow.completions.create(**asked, max_tokens=1)
        assert caught.value.code == "concurrency_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1

        def note(response: httpx2.Response) -> None:
            statuses.append(response.status_code)
            held.close()
            # The forecast is of a request that goes on for long: it was just ended.
            response.headers.update({"retry-after": "1", "retry-after-ms": "1000"})

        hooked = openai.DefaultHttpxClient(event_hooks={"response": [note]})
        with OpenAI(
            base_url=f"{server.url}/v1", api_key=NARROW_KEY, max_retries=5, http_client=hooked
        ) as patient:
            assert patient.completions.create(**asked, max_tokens=1).choices[0].text
    assert statuses[0] == 429 and statuses[-1] == 200


def test_a_client_that_does_not_wait(server: ClientServer, client: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(model=MODEL, prompt="x", max_tokens=ENDLESS, timeout=0.5, extra_body=SPOKEN)
    server.wait_until(server.is_idle)


# ---------------------------------------------------------------- leaving early


def test_leaving_a_stream_frees_its_blocks(server: ClientServer, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=user("x"), max_tokens=ENDLESS, stream=True, extra_body=SPOKEN
    )
    for _, _chunk in zip(range(5), stream, strict=False):
        pass
    server.wait_until(server.is_running)
    stream.close()
    server.wait_until(server.is_idle)


def test_cancelled_tasks_free_their_blocks(server: ClientServer) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": ENDLESS, "extra_body": SPOKEN}

    async def read(chunks: AsyncIterator[Any]) -> None:
        async for _ in chunks:
            pass

    async def leave() -> None:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            plain = asyncio.create_task(client.completions.create(**asked, stream=False))
            streamed = asyncio.create_task(read(await client.completions.create(**asked, stream=True)))
            await asyncio.to_thread(server.wait_until, lambda: server.metric("num_requests_running") == 2)
            for task in (plain, streamed):
                task.cancel()
            await asyncio.gather(plain, streamed, return_exceptions=True)
            await asyncio.to_thread(server.wait_until, server.is_idle)

    asyncio.run(leave())


# ---------------------------------------------------------------- a server that comes and goes


def test_a_client_that_is_early_waits_and_one_that_is_late_is_told(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    statuses: list[tuple[int, str | None]] = []
    hook = {"response": [lambda r: statuses.append((r.status_code, r.headers.get("retry-after")))]}
    with client_server(tmp_path_factory.mktemp("life")) as server:
        server.wait_for(503)
        with OpenAI(
            base_url=f"{server.url}/v1",
            api_key=KEY,
            max_retries=60,
            http_client=openai.DefaultHttpxClient(event_hooks=hook),
        ) as client:
            with pytest.raises(openai.InternalServerError) as early:
                client.with_options(max_retries=0).models.list()
            assert (early.value.status_code, early.value.code) == (503, "starting")
            answer = client.completions.create(model=MODEL, prompt="x", max_tokens=2)
            assert answer.choices[0].finish_reason in ("length", "stop")
            assert statuses[-1] == (200, None)
            assert {(status, int(after or 0) > 0) for status, after in statuses[:-1]} == {(503, True)}

            stream = client.completions.create(
                model=MODEL, prompt="x", max_tokens=ENDLESS, stream=True, extra_body=SPOKEN
            )
            next(iter(stream))
            server.terminate()
            with pytest.raises(openai.APIError) as late:
                list(stream)
            assert late.value.code == "shutting_down"
        assert server.process.wait(30) == 0
