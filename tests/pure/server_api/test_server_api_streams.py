"""Streams of chat and completions, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.server_api.api_helpers import Api, chunks, ending, ids, says

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "tiny", "prompt": "hi"}
USAGE = {"stream_options": {"include_usage": True}}


def chat_chunk(choice: str, tail: str = "") -> str:
    head = '{"id":"chatcmpl-id1","object":"chat.completion.chunk","created":0,"model":"tiny","choices":['
    return f"data: {head}{choice}]{tail}}}\n\n"


def text_chunk(choice: str, tail: str = "") -> str:
    head = '{"id":"cmpl-id1","object":"text_completion","created":0,"model":"tiny","choices":['
    return f"data: {head}{choice}]{tail}}}\n\n"


def role(index: int) -> str:
    return f'{{"index":{index},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}'


def content(index: int, text: str) -> str:
    return f'{{"index":{index},"delta":{{"content":{text}}},"logprobs":null,"finish_reason":null}}'


def last(index: int, reason: str, stop: str = "null") -> str:
    return f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{reason}","stop_reason":{stop}}}'


def test_a_chat_in_the_order_of_openai() -> None:
    api = Api(says('say "', "\n", "end", reason="length"))
    expected = [
        chat_chunk(role(0)),
        chat_chunk(content(0, '"say \\""')),
        chat_chunk(content(0, '"\\n"')),
        chat_chunk(content(0, '"end"')),
        chat_chunk(last(0, "length")),
        "data: [DONE]\n\n",
    ]
    assert api.stream(CHAT, HELLO).decode() == "".join(expected)
    assert api.is_at_rest and api.listener.events == ["started", "first_token", "finished"]


def test_branches_are_told_apart_by_their_index() -> None:
    api = Api(says("a#", "b#"))
    expected = [
        *(chat_chunk(role(0)), chat_chunk(role(1))),
        *(chat_chunk(content(0, '"a0"')), chat_chunk(content(1, '"a1"'))),
        *(chat_chunk(content(0, '"b0"')), chat_chunk(last(0, "length"))),
        *(chat_chunk(content(1, '"b1"')), chat_chunk(last(1, "length"))),
        "data: [DONE]\n\n",
    ]
    assert api.stream(CHAT, {**HELLO, "n": 2}).decode() == "".join(expected)


def test_usage_comes_last_and_is_null_before() -> None:
    api = Api(says("ab", "c", num_cached=16))
    null = ',"usage":null'
    usage = (
        ',"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,'
        '"prompt_tokens_details":{"cached_tokens":16}}'
    )
    expected = [
        text_chunk('{"index":0,"text":"ab","logprobs":null,"finish_reason":null}', null),
        text_chunk('{"index":0,"text":"c","logprobs":null,"finish_reason":null}', null),
        text_chunk('{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}', null),
        text_chunk("", usage),
        "data: [DONE]\n\n",
    ]
    assert api.stream(COMPLETIONS, TEXT | USAGE).decode() == "".join(expected)


def test_running_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(Api(says("ab", "c")).stream(COMPLETIONS, {**TEXT, "stream_options": options}))
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == [2, 3, 3, 3]
    assert found[-1]["choices"] == []


def test_a_stop_string_is_never_shown_and_ends_the_branch_where_it_was_completed() -> None:
    api = Api(says("one EN", "D two", " three"))
    found = chunks(api.stream(CHAT, {**HELLO, "stop": ["END"], **USAGE}))
    texts = [choice["delta"].get("content", "") for chunk in found for choice in chunk["choices"]]
    assert "".join(texts) == "one "
    assert (
        found[-2]["choices"][0]["finish_reason"] == "stop" and found[-2]["choices"][0]["stop_reason"] == "END"
    )
    assert api.client.streams[0].finished_at == [(0, 7)]
    assert found[-1]["usage"]["completion_tokens"] == 7


def test_the_end_of_text_is_counted_and_not_shown() -> None:
    api = Api(says("ab", reason="stop", with_eos=True))
    found = chunks(api.stream(COMPLETIONS, {**TEXT, **USAGE, "skip_special_tokens": False}))
    assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == "ab"
    assert found[-1]["usage"]["completion_tokens"] == 3
    assert (
        found[-2]["choices"][0]["finish_reason"] == "stop" and found[-2]["choices"][0]["stop_reason"] is None
    )


def test_prompts_side_by_side_keep_their_index() -> None:
    api = Api(says("a", "b"))
    found = chunks(api.stream(COMPLETIONS, {"model": "tiny", "prompt": ["x", "y", "z"]}))
    texts = dict.fromkeys(range(3), "")
    for chunk in found:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "ab", 1: "ab", 2: "ab"}
    assert [entry["tokens"] for entry in api.client.submitted] == [ids("x"), ids("y"), ids("z")]
    assert api.is_at_rest


def test_token_ids_beside_the_text() -> None:
    found = chunks(Api(says("ab")).stream(CHAT, {**HELLO, "return_token_ids": True}))
    assert found[0]["prompt_token_ids"] and found[1]["choices"][0]["token_ids"] == ids("ab")


def test_logprobs_of_a_chat() -> None:
    found = chunks(Api(says("ab")).stream(CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}))
    entries = found[1]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["a", "b"]
    assert entries[0]["bytes"] == [97] and entries[0]["logprob"] == -0.5
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["a", "b"]


def test_an_echo_with_logprobs_goes_on_where_the_prompt_ended() -> None:
    found = chunks(Api(says("ab", "c")).stream(COMPLETIONS, {**TEXT, "echo": True, "logprobs": 1}))
    first, second, third = (chunk["choices"][0] for chunk in found[:3])
    assert [first["text"], second["text"], third["text"]] == ["hi", "ab", "c"]
    assert first["logprobs"]["token_logprobs"] == [None, -0.5] and first["logprobs"]["text_offset"] == [0, 1]
    assert second["logprobs"]["text_offset"] == [2, 3] and third["logprobs"]["text_offset"] == [4]


def test_each_of_several_prompts_is_echoed_before_its_own_text() -> None:
    asked = {"model": "tiny", "prompt": ["xx", "yyy"], "echo": True, "logprobs": 1, "n": 2}
    found = chunks(Api(says("a", "b")).stream(COMPLETIONS, asked))
    texts: dict[int, list[str]] = {}
    for chunk in found:
        (choice,) = chunk["choices"]
        texts.setdefault(choice["index"], []).append(choice["text"])
        if choice["text"] in ("xx", "yyy"):
            assert choice["logprobs"]["token_logprobs"] == [None, *[-0.5] * (len(choice["text"]) - 1)]
    assert texts == {index: ["xx" if index < 2 else "yyy", "a", "b", ""] for index in range(4)}


def test_an_echo_of_the_prompt_alone() -> None:
    asked = {**TEXT, "echo": True, "max_tokens": 0, **USAGE}
    found = chunks(Api(says("a")).stream(COMPLETIONS, asked))
    assert [chunk["choices"][0]["text"] for chunk in found[:-1]] == ["hi", ""]
    assert found[1]["choices"][0]["finish_reason"] == "length"
    assert found[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("reason", "detail", "code"),
    [
        ("error", "numerical_error", "numerical_error"),
        ("error", "whatever", "internal_error"),
        ("abort", "deadline", "deadline_exceeded"),
        ("abort", "", "engine_unavailable"),
    ],
)
def test_an_error_behind_the_first_token_is_one_frame_without_done(
    reason: str, detail: str, code: str
) -> None:
    def script(prompt: Any, sampling: Any) -> Any:
        steps: Any = says("ab", "c")(prompt, sampling)
        steps[1][0].ending = ending(reason, 3, detail)
        return steps

    api = Api(script)
    data = api.stream(CHAT, HELLO)
    assert b"[DONE]" not in data and chunks(data)[-1]["error"]["code"] == code
    (record,) = api.listener.records
    assert (record.finish_reason, record.error_code) == (reason, code) and api.is_at_rest
