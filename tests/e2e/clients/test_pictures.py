"""Two hundred conversations with pictures from each of the official clients (fifty in `make test`), many at once:
`openai` with chats, responses and streams, `anthropic` with messages and `cache_control`. Each answer is the one it had
alone."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from paceline import LLM, SamplingParams
from tests.e2e.client_server import KEY
from tests.e2e.media.picture_server import MODEL, NUM_TOKENS, TEXT, Hosts, PictureServer, chat, inline
from tests.pictures import encoded, picture

KINDS = 10
COUNTS = pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.campaign)])
SETTINGS: dict[str, Any] = {"temperature": 0}


@cache
def data_of(kind: int) -> bytes:
    return encoded(picture(20 + 6 * kind, 50 - 3 * kind, seed=kind))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PictureServer]:
    hosts = Hosts(tmp_path_factory.mktemp("hosts"))
    running = PictureServer(tmp_path_factory.mktemp("pictures"), hosts)
    try:
        running.wait_for(200)
        yield running
        assert running.process.poll() is None, running.log()
        # Blocks are pinned for minutes where that was asked for.
        running.wait_until(lambda: running.metric("num_requests_running") == 0)
        assert "Traceback" not in running.log()
    finally:
        running.close()
        hosts.close()


@pytest.fixture(scope="module")
def wanted(server: PictureServer) -> list[str]:
    """The answers of the same model without a server."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    chats: list[Any] = [
        [{"role": "user", "content": [{"type": "image", "image": data_of(kind)}, TEXT]}]
        for kind in range(KINDS)
    ]
    with LLM(str(server.folder / MODEL), load_format="dummy", num_blocks=600) as llm:
        return [output.outputs[0].text for output in llm.chat(chats, sampling, use_tqdm=False)]


@pytest.fixture(scope="module")
def openai(server: PictureServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def all_at_once(ask: Callable[[int], str], wanted: list[str], count: int) -> None:
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(count))) == [wanted[number % KINDS] for number in range(count)]


@COUNTS
def test_openai_chats(openai: OpenAI, wanted: list[str], count: int) -> None:
    def ask(number: int) -> str:
        body = chat(inline(data_of(number % KINDS)), TEXT)
        if number % 2:
            chunks = openai.chat.completions.create(**body, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        answer = openai.chat.completions.create(**body)
        assert answer.usage.prompt_tokens_details.image_tokens >= 4
        return str(answer.choices[0].message.content)

    all_at_once(ask, wanted, count)


@COUNTS
def test_openai_responses(openai: OpenAI, wanted: list[str], count: int) -> None:
    files = [openai.files.create(file=("a.png", data_of(kind)), purpose="vision").id for kind in range(KINDS)]

    def ask(number: int) -> str:
        url = inline(data_of(number % KINDS))["image_url"]["url"]
        source = {"file_id": files[number % KINDS]} if number % 3 == 0 else {"image_url": url}
        content: Any = [
            {"type": "input_image", "detail": "auto", **source},
            {"type": "input_text", "text": TEXT["text"]},
        ]
        asked: dict[str, Any] = {"model": MODEL, "input": [{"role": "user", "content": content}]}
        asked |= {"max_output_tokens": NUM_TOKENS, **SETTINGS}
        if number % 2:
            events = openai.responses.create(**asked, stream=True)
            return "".join(event.delta for event in events if event.type == "response.output_text.delta")
        return str(openai.responses.create(**asked).output_text)

    all_at_once(ask, wanted, count)
    for file_id in files:
        openai.files.delete(file_id)


def block_of(kind: int) -> dict[str, Any]:
    data = base64.b64encode(data_of(kind)).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


@COUNTS
def test_anthropic_messages(server: PictureServer, wanted: list[str], count: int) -> None:
    """Some with a picture that is to be kept in the cache."""
    with Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:

        def ask(number: int) -> str:
            block = block_of(number % KINDS)
            if number % 2:
                block |= {"cache_control": {"type": "ephemeral"}}
            messages: Any = [{"role": "user", "content": [block, TEXT]}]
            asked: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_TOKENS, "messages": messages}
            if number % 3 == 0:
                with client.messages.stream(**asked, extra_body=SETTINGS) as stream:
                    return "".join(stream.text_stream)
            message = client.messages.create(**asked, extra_body=SETTINGS)
            counted = client.messages.count_tokens(model=MODEL, messages=messages) if number < 10 else None
            usage = message.usage
            if counted is not None:
                told = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
                assert usage.input_tokens + told == counted.input_tokens
            return str(message.content[0].text)

        all_at_once(ask, wanted, count)


def test_pictures_in_the_results_of_tools(server: PictureServer) -> None:
    with Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
        said = []
        for kind in (0, 1, 0):
            result = {"type": "tool_result", "tool_use_id": "c", "content": [block_of(kind)]}
            turns: Any = [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result, TEXT]},
            ]
            message = client.messages.create(model=MODEL, max_tokens=24, messages=turns, extra_body=SETTINGS)
            said.append([block.text for block in message.content])
        assert said[0] == said[2]
