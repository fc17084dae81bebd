"""Qwen2.5-VL and Qwen3-VL over sockets: every API answers what the same model answers without a server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from paceline import LLM, SamplingParams
from tests.e2e.media.picture_server import (
    CHAT,
    MESSAGES,
    MODEL,
    NUM_TOKENS,
    RESPONSES,
    TEXT,
    Hosts,
    PictureServer,
    chat,
    inline,
    served,
    text_of,
)
from tests.pictures import encoded, picture
from tests.vision_folder import write_deep_model, write_patch_model

SMALL, LARGE = encoded(picture(64, 32)), encoded(picture(300, 200, seed=1))
SPELLED = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"}
# Text and pictures of a message.
CONTENTS: dict[str, list[Any]] = {
    "one": [SMALL, TEXT],
    "another": [LARGE, TEXT],
    "two": [SMALL, TEXT, LARGE],
    "twice": [LARGE, SMALL, LARGE, TEXT],
    "spelled": [SPELLED, SMALL, SPELLED],
    "none": [TEXT],
}


class Family(NamedTuple):
    write: Callable[[Path], Path]
    small: int  # vectors
    large: int


# 64 x 32 pixels grow to the least that there may be, 300 x 200 shrink to the most; a vector is 28 or 32 pixels a side.
FAMILIES = {
    "qwen2.5-vl": Family(write_patch_model, 3 * 2, 9 * 6),
    "qwen3-vl": Family(write_deep_model, 3 * 2, 8 * 5),
}


class Answer(NamedTuple):
    text: str
    logprobs: list[float]
    prompt_tokens: int
    image_tokens: int


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def server(family: Family, tmp_path_factory: pytest.TempPathFactory, hosts: Hosts) -> Iterator[PictureServer]:
    with served(tmp_path_factory.mktemp("patches"), hosts, family.write) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: PictureServer) -> dict[str, Answer]:
    """What the model answers without a server, one conversation at a time."""
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=1)
    found = {}
    with LLM(str(server.folder / MODEL), load_format="dummy", num_blocks=600) as llm:
        for name, content in CONTENTS.items():
            parts = [
                {"type": "image", "image": part} if isinstance(part, bytes) else part for part in content
            ]
            (output,) = llm.chat([{"role": "user", "content": parts}], sampling, use_tqdm=False)
            (told,) = output.outputs
            assert told.logprobs is not None
            logprobs = [told.logprobs[at][token].logprob for at, token in enumerate(told.token_ids)]
            found[name] = Answer(told.text, logprobs, len(output.prompt_token_ids), output.num_image_tokens)
    return found


def asked(name: str, **fields: Any) -> dict[str, Any]:
    parts = [inline(part) if isinstance(part, bytes) else part for part in CONTENTS[name]]
    return chat(*parts, **fields)


def answer_of(body: Any) -> Answer:
    """Of a reply, or of chunks that are put together."""
    (choice,), usage = body["choices"], body["usage"]
    logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
    details = usage["prompt_tokens_details"]
    text = choice["message"]["content"]
    return Answer(text, logprobs, usage["prompt_tokens"], details.get("image_tokens", 0))


def test_answers_depend_on_every_picture(family: Family, expected: dict[str, Answer]) -> None:
    """Otherwise those below would be the same whatever was encoded."""
    for name, answer in expected.items():
        content = CONTENTS[name]
        wanted = content.count(SMALL) * family.small + content.count(LARGE) * family.large
        assert answer.image_tokens == wanted
    firsts = sorted(answer.logprobs[0] for answer in expected.values())
    assert min(high - low for low, high in pairwise(firsts)) > 1e-4


@pytest.mark.parametrize("name", list(CONTENTS))
def test_chat_answers_what_the_library_answers(
    server: PictureServer, expected: dict[str, Answer], name: str
) -> None:
    reply = server.ask("POST", CHAT, asked(name, logprobs=True))
    assert reply.status == 200, reply.body
    assert answer_of(reply.json) == expected[name]
    price = server.ask("POST", "/v1/estimate", asked(name)).json["prompt_tokens"]
    assert price == expected[name].prompt_tokens


@pytest.mark.parametrize("name", ["one", "two"])
def test_streams_are_the_same_in_parts(server: PictureServer, expected: dict[str, Answer], name: str) -> None:
    body = asked(name, logprobs=True, stream=True, stream_options={"include_usage": True})
    reply = server.ask("POST", CHAT, body)
    assert reply.status == 200, reply.body
    lines = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: {")]
    *chunks, last = map(json.loads, lines)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert len([each for each in choices if each["delta"].get("content")]) > 1
    told = [entry for each in choices if each.get("logprobs") for entry in each["logprobs"]["content"]]
    text = "".join(each["delta"].get("content") or "" for each in choices)
    whole = {"message": {"content": text}, "logprobs": {"content": told}}
    assert answer_of({"choices": [whole], "usage": last["usage"]}) == expected[name]


def test_conversations_at_once_are_answered_as_alone(
    server: PictureServer, expected: dict[str, Answer]
) -> None:
    names = [*CONTENTS, *CONTENTS]
    with ThreadPoolExecutor(len(names)) as pool:
        replies = list(pool.map(lambda name: server.ask("POST", CHAT, asked(name, logprobs=True)), names))
    for name, reply in zip(names, replies, strict=True):
        assert reply.status == 200, reply.body
        assert answer_of(reply.json) == expected[name]


def test_other_apis_answer_the_same(server: PictureServer, expected: dict[str, Answer]) -> None:
    wanted = expected["two"]
    blocks = [_block(part) if isinstance(part, bytes) else part for part in CONTENTS["two"]]
    shown = server.ask("POST", MESSAGES, chat(*blocks))
    assert shown.status == 200, shown.body
    assert shown.json["content"][0]["text"] == wanted.text
    usage = shown.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == wanted.prompt_tokens
    parts = [_input(part) for part in CONTENTS["two"]]
    body = {"model": MODEL, "input": [{"role": "user", "content": parts}], "temperature": 0}
    told = server.ask("POST", RESPONSES, {**body, "max_output_tokens": NUM_TOKENS})
    assert told.status == 200, told.body
    assert told.json["output"][0]["content"][0]["text"] == wanted.text
    usage = told.json["usage"]
    assert usage["input_tokens"] == wanted.prompt_tokens
    assert usage["input_tokens_details"]["image_tokens"] == wanted.image_tokens


def _block(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


def _input(part: Any) -> dict[str, Any]:
    if isinstance(part, bytes):
        return {"type": "input_image", "image_url": inline(part)["image_url"]["url"]}
    return {"type": "input_text", "text": part["text"]}


def test_text_that_spells_the_mark_is_text(server: PictureServer, expected: dict[str, Answer]) -> None:
    plain = server.ask("POST", CHAT, asked("none", max_tokens=1)).json["usage"]["prompt_tokens"]
    # Every token of this vocabulary is a character or a mark.
    body = chat(TEXT, SPELLED, max_tokens=1)
    usage = server.ask("POST", CHAT, body).json["usage"]
    assert usage["prompt_tokens"] == plain + len(SPELLED["text"])
    assert "image_tokens" not in usage["prompt_tokens_details"]
    assert text_of(server.ask("POST", CHAT, asked("spelled"))) == expected["spelled"].text
