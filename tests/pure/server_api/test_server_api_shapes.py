"""Answers of every route: what is in them, and that the official clients' own types read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.request import Cost
from paceline.core.sampling import SamplingParams
from paceline.models.files.sampling_defaults import GenerationDefaults
from paceline.process.client import BranchUpdate
from tests.pure.server_api.api_helpers import Api, chunks, ending, ids, says, tokenizer

# The client libraries check the answers, and take seconds to import.
pytestmark = pytest.mark.slow

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/messages", "/v1/responses"),
)
TURNS = [{"role": "user", "content": "hi"}]
PROMPT = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def openai_types() -> Any:
    return pytest.importorskip("openai.types")


def anthropic_types() -> Any:
    return pytest.importorskip("anthropic.types")


# ---------------------------------------------------------------- OpenAI


def test_a_chat() -> None:
    api = Api(says("ab", "c", reason="stop", with_eos=True, num_cached=16))
    asked = {"model": "alias", "messages": TURNS, "return_token_ids": True, "temperature": 0.5, "seed": 4}
    found = api.ask(CHAT, asked)
    assert (found["id"], found["object"], found["model"]) == ("chatcmpl-id1", "chat.completion", "alias")
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert found["usage"] == {
        "prompt_tokens": len(found["prompt_token_ids"]),
        "completion_tokens": 4,
        "total_tokens": len(found["prompt_token_ids"]) + 4,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    (given,) = api.client.submitted
    assert given["tokens"] == found["prompt_token_ids"]
    assert tokenizer().decode(given["tokens"], skip_special_tokens=False) == PROMPT
    assert (given["sampling"].temperature, given["sampling"].seed) == (0.5, 4)
    assert given["sampling"].max_tokens == 256 - len(given["tokens"]), "the rest of the context"
    openai_types().chat.ChatCompletion.model_validate(found, strict=True)
    assert api.is_at_rest
    (record,) = api.listener.records
    assert (record.num_output, record.finish_reason, record.num_cached) == (4, "stop", 16)
    assert record.queue_s == 0.25 and api.listener.num_tokens == 4


def predicted(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
    """Two branches of an answer, each with drafts from its prediction."""
    cost = Cost(accepted_predictions=5, rejected_predictions=2)
    end = ending("length", 1)._replace(cost=cost)
    return [[BranchUpdate(branch=branch, tokens=ids("a"), ending=end) for branch in range(sampling.n)]]


def test_a_prediction_and_what_became_of_it() -> None:
    text = {"type": "content", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]}
    asked = {"messages": TURNS, "prediction": text, "n": 2}
    api = Api(predicted)
    found = api.ask(CHAT, asked)
    details = {"accepted_prediction_tokens": 10, "rejected_prediction_tokens": 4}
    assert found["usage"]["completion_tokens"] == 2  # of the wrong ones none is counted
    assert found["usage"]["completion_tokens_details"] == details
    assert api.client.submitted[0]["sampling"].prediction == tuple(ids("abc"))
    openai_types().chat.ChatCompletion.model_validate(found, strict=True)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    frames = api.stream(CHAT, {**asked, **options}).decode()
    assert f'"completion_tokens_details":{json.dumps(details, separators=(",", ":"))}' in frames
    assert "completion_tokens_details" not in Api(predicted).ask(CHAT, {"messages": TURNS})["usage"]


def test_completions_of_several_prompts_with_several_branches() -> None:
    api = Api(says("a#"))
    found = api.ask(COMPLETIONS, {"model": "tiny", "prompt": [ids("x"), ids("yy")], "n": 2})
    assert [choice["text"] for choice in found["choices"]] == ["a0", "a1", "a0", "a1"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 3 and found["usage"]["completion_tokens"] == 8
    assert api.client.submitted[0]["sampling"].max_tokens == 16
    openai_types().Completion.model_validate(found, strict=True)


def test_what_an_evaluation_harness_reads() -> None:
    asked = {
        "model": "tiny",
        "prompt": [ids("abcd"), ids("xy")],
        "echo": True,
        "logprobs": 1,
        "max_tokens": 1,
    }
    found = Api(says("z")).ask(COMPLETIONS, asked)
    first, second = (choice["logprobs"] for choice in found["choices"])
    assert len(first["token_logprobs"]) == 5 and len(second["token_logprobs"]) == 3
    assert first["token_logprobs"][0] is None and first["top_logprobs"][0] is None
    for value, top in zip(first["token_logprobs"][1:], first["top_logprobs"][1:], strict=True):
        assert value == max(top.values())
    assert first["tokens"] == ["a", "b", "c", "d", "z"]


def test_logprobs_of_the_prompt_and_ids() -> None:
    asked = {"model": "tiny", "prompt": "ab", "prompt_logprobs": 1, "return_token_ids": True}
    (choice,) = Api(says("z")).ask(COMPLETIONS, asked)["choices"]
    token = str(ids("b")[0])
    assert choice["prompt_logprobs"] == [None, {token: {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == (ids("z"), ids("ab"))


def test_tokens_that_came_as_drafts_are_named_where_that_is_asked_for() -> None:
    asked = {"model": "tiny", "messages": TURNS, "logprobs": True}
    plain = Api(says("ab")).ask(CHAT, asked)["choices"][0]["logprobs"]["content"]
    assert all("drafted" not in token for token in plain)
    asked["return_drafted"] = True

    def script(prompt: Sequence[int], sampling: SamplingParams) -> list[list[BranchUpdate] | Exception]:
        ((update,),) = steps = says("ab")(prompt, sampling)  # type: ignore[misc]
        update.logprobs[0] = replace(update.logprobs[0], is_drafted=True)
        return steps

    content = Api(script).ask(CHAT, asked)["choices"][0]["logprobs"]["content"]
    assert [token["drafted"] for token in content] == [True, False]


def test_chunks_are_what_the_client_reads() -> None:
    types = openai_types()
    asked = {"model": "tiny", "messages": TURNS, "n": 2, "logprobs": True, "top_logprobs": 1}
    data = Api(says("a", "b")).stream(CHAT, {**asked, "stream_options": {"include_usage": True}})
    for chunk in chunks(data):
        types.chat.ChatCompletionChunk.model_validate(chunk, strict=True)


@pytest.mark.parametrize(
    ("url", "choice"), [(CHAT, "none"), (RESPONSES, "none"), (MESSAGES, {"type": "none"})]
)
def test_tools_that_may_not_be_called_are_left_out(url: str, choice: Any) -> None:
    api = Api()
    tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
    api.ask(url, WITHOUT_MODEL[url] | {"tools": tools, "tool_choice": choice})
    assert tokenizer().decode(api.client.submitted[0]["tokens"], skip_special_tokens=False) == PROMPT


# ---------------------------------------------------------------- models and tokens


def test_models() -> None:
    api = Api()
    listed = api.ask("/v1/models", method="GET")
    assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    card = api.ask("/v1/models/{id:path}", method="GET", path={"id": "tiny"})
    assert card == listed["data"][0] and card["max_model_len"] == 256
    openai_types().Model.model_validate(card, strict=True)


WITHOUT_MODEL: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURNS},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": TURNS, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
}


@pytest.mark.parametrize("url", WITHOUT_MODEL)
def test_a_body_without_a_model_is_for_the_one_that_is_served(url: str) -> None:
    for body in (WITHOUT_MODEL[url], WITHOUT_MODEL[url] | {"model": None}):
        found = Api().ask(url, body)
        assert found.get("model", "tiny") == "tiny"


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_every_route_takes_the_sampling_that_the_model_card_tells(url: str) -> None:
    api = Api(generation=GenerationDefaults(sampling={"temperature": 0.2, "top_p": 0.9}))
    card = api.ask("/v1/models/{id:path}", method="GET", path={"id": "tiny"})
    told = card["paceline"]["default_sampling"]
    assert (told["temperature"], told["top_p"], told["top_k"]) == (0.2, 0.9, 0)
    api.ask(url, WITHOUT_MODEL[url])
    sampling = api.client.submitted[0]["sampling"]
    assert {name: getattr(sampling, name) for name in told} == told


def test_tokens_of_a_text_and_back() -> None:
    api = Api()
    found = api.ask("/tokenize", {"prompt": "ab", "return_token_strs": True, "add_special_tokens": False})
    assert found == {"count": 2, "max_model_len": 256, "tokens": ids("ab"), "token_strs": ["a", "b"]}
    assert api.ask("/detokenize", {"tokens": ids("ab")}) == {"prompt": "ab"}
    assert api.ask("/tokenize", {"prompt": ""})["count"] == 0
    spelled = api.ask("/tokenize", {"prompt": "</s>"})["tokens"]
    assert len(spelled) == 4, "a text never becomes a control token"


def test_tokens_of_a_conversation() -> None:
    found = Api().ask("/tokenize", {"messages": TURNS})
    assert tokenizer().decode(found["tokens"], skip_special_tokens=False) == PROMPT


def test_tokenizer_info_names_the_end_of_text() -> None:
    assert Api().ask("/tokenizer_info", method="GET")["eos_token"] == "</s>"


# ---------------------------------------------------------------- Anthropic

ASKED = {"model": "tiny", "max_tokens": 9, "messages": TURNS}


def test_a_message() -> None:
    api = Api(says("a STOP", "b", num_cached=4))
    blocks = [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}]
    found = api.ask(MESSAGES, {**ASKED, "system": blocks, "stop_sequences": ["STOP"]})
    assert found["content"] == [{"type": "text", "text": "a "}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "STOP")
    prompt = api.client.submitted[0]["tokens"]
    assert found["usage"] == {
        "input_tokens": len(prompt) - 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 6,
    }
    assert tokenizer().decode(prompt, skip_special_tokens=False) == "<|start|>system\nbe<|end|>\n" + PROMPT
    anthropic_types().Message.model_validate(found, strict=True)


def test_a_message_goes_on_with_what_the_client_began() -> None:
    api = Api()
    api.ask(MESSAGES, {**ASKED, "messages": [*TURNS, {"role": "assistant", "content": "well,"}]})
    prompt = tokenizer().decode(api.client.submitted[0]["tokens"], skip_special_tokens=False)
    assert prompt == PROMPT + "well,"


MESSAGE_STREAM = (
    'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_id1","type":"message",'
    '"role":"assistant","model":"tiny","content":[],"stop_reason":null,"stop_sequence":null,'
    '"usage":{"input_tokens":21,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":1}}}\n\n'
    'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    '"content_block":{"type":"text","text":""}}\n\n'
    'event: ping\ndata: {"type":"ping"}\n\n'
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    '"delta":{"type":"text_delta","text":"a"}}\n\n'
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    '"delta":{"type":"text_delta","text":"b"}}\n\n'
    'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"max_tokens","stop_sequence":null},'
    '"usage":{"input_tokens":21,"cache_creation_input_tokens":0,"cache_read_input_tokens":0,"output_tokens":2}}\n\n'
    'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def test_events_of_a_message() -> None:
    assert Api(says("a", "b")).stream(MESSAGES, ASKED).decode() == MESSAGE_STREAM


def test_tokens_of_a_message_are_counted() -> None:
    body = {"model": "tiny", "messages": TURNS}
    assert Api().ask("/v1/messages/count_tokens", body) == {"input_tokens": 21}


# ---------------------------------------------------------------- Responses


def test_a_response() -> None:
    api = Api(says("abc", reason="stop", with_eos=True))
    found = api.ask(RESPONSES, {"model": "tiny", "input": "hi", "max_output_tokens": 9})
    assert (found["status"], found["output"][0]["content"][0]["text"]) == ("completed", "abc")
    assert tokenizer().decode(api.client.submitted[0]["tokens"], skip_special_tokens=False) == PROMPT
    response = openai_types().responses.Response.model_validate(found, strict=True)
    assert response.output_text == "abc" and response.usage.output_tokens == 4


def test_a_response_that_is_cut_off() -> None:
    messages = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    api = Api(says("abc"))
    found = api.ask(RESPONSES, {"model": "tiny", "input": messages, "instructions": "be"})
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    prompt = tokenizer().decode(api.client.submitted[0]["tokens"], skip_special_tokens=False)
    assert prompt == "<|start|>system\nbe<|end|>\n" + PROMPT


def test_events_of_a_response() -> None:
    data = Api(says("a", "b", reason="stop", with_eos=True)).stream(
        RESPONSES, {"model": "tiny", "input": "hi"}
    )
    found = chunks(data)
    assert [event["type"].removeprefix("response.") for event in found] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in found] == list(range(10))
    assert [line for line in data.decode().splitlines() if line.startswith("event: ")] == [
        f"event: {event['type']}" for event in found
    ]
    assert found[4] == {
        "type": "response.output_text.delta",
        "item_id": "msg_id1",
        "output_index": 0,
        "content_index": 0,
        "logprobs": [],
        "delta": "a",
        "sequence_number": 4,
    }
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == "ab"
    types = openai_types().responses
    types.ResponseCompletedEvent.model_validate(found[-1])
    types.ResponseTextDeltaEvent.model_validate(found[4])
