"""What a request can get wrong: which error it is, which field it names, and that nothing was taken for it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.errors import InvalidRequest
from paceline.server.access.caller import Caller
from paceline.server.api.route import Route
from paceline.server.call import Answer
from paceline.server.errors import problem_of
from tests.pure.server_api.api_helpers import Api, ids

CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/messages", "/v1/responses"),
)
TURNS = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": TURNS},
    COMPLETIONS: {"model": "tiny", "prompt": "hi"},
    MESSAGES: {"model": "tiny", "messages": TURNS, "max_tokens": 5},
    RESPONSES: {"model": "tiny", "input": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": TURNS},
}
VALUE, UNSUPPORTED, CONTEXT, MODALITY = (
    *("invalid_value", "unsupported_parameter"),
    *("context_length_exceeded", "unsupported_modality"),
)


def refusal(api: Api, route: str, body: dict[str, Any], **more: Any) -> tuple[int, str, str | None]:
    with pytest.raises(Exception) as caught:
        asyncio.run(api.open(route, body, **more))
    assert api.is_at_rest and not api.client.submitted
    problem = problem_of(caught.value)
    assert len(problem.message) <= 512
    return problem.status, problem.code, problem.param


SAMPLING: list[tuple[str, list[Any]]] = [
    ("temperature", [-0.1, 2.1, "1", True, [], 10**400]),
    ("top_p", [0, -1, 1.1, "0.5"]),
    ("top_k", [-2, 2**40, 1.5, True]),
    ("min_p", [-1, 2]),
    ("presence_penalty", [-2.1, 2.1]),
    ("frequency_penalty", [-2.1, 2.1]),
    ("repetition_penalty", [0, -1, 1e30]),
    ("max_tokens", [-1, 2**31, 10**9, 1.0, 1e9, True, "5"]),
    ("min_tokens", [-1, 10**12, 1.0]),
    ("n", [0, -1, 9, 10**9, 2**63, 1.0, True]),
    ("seed", [2**63, 2**64, "x", -(2**63) - 1]),
    ("stop", [["a"] * 5, [""], "", "x" * 257, ["ü" * 129], [1], ["a"] * 65_536, [None], "a\0b", 5, {}]),
    ("stop_token_ids", [[-1], ["5"], [True], 5, [100], [2**31], list(range(65))]),
    ("bad_words", [[1], "x", [""], ["x" * 257]]),
    ("allowed_token_ids", [[], [-1], [100], [1.0]]),
    (
        "logit_bias",
        [{"a": 1}, {"100": 1}, {"5": 101}, {"5": "x"}, {str(i): 1 for i in range(301)}, [1], {"-1": 1}],
    ),
    ("ignore_eos", ["yes", 1]),
    ("stream", ["yes", 1]),
    ("stream_options", [{"include_usage": True}, 5]),
    ("priority", [2**70, "high", 1.5]),
    ("cache_salt", ["", "x" * 129, "a/b", "a\nb", 5]),
    ("user", ["x" * 100_000, {"a": 1}]),
    ("metadata", [{"a": {"b": 1}}, {"a": "x" * 1000}, {str(i): "x" for i in range(17)}]),
    ("return_token_ids", [1]),
    ("prompt_logprobs", [-1, 21, True]),
    ("model", ["", 5, ["tiny"]]),
]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("name", "values"), SAMPLING, ids=lambda value: value if isinstance(value, str) else ""
)
def test_values_out_of_range_or_of_another_kind(route: str, name: str, values: list[Any]) -> None:
    for value in values:
        assert refusal(Api(), route, {**GOOD[route], name: value}) == (400, VALUE, name), value


NO_MESSAGES: list[Any] = [None, [], "x", {}, [123], [{}], [{"role": 1}]]
NO_CONTENTS: list[Any] = [5, True, {}, None, [], [5], [{"type": "text"}], [{"text": "x"}]]
NO_PROMPTS: list[Any] = [None, "", [], [""], ["a", 1], [[1], ["a"]], [[]], [[[1]]], {}, 5]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": True}}, "chat_template_kwargs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        *(({"messages": value}, "messages") for value in NO_MESSAGES),
        *(({"messages": [{"role": "user", "content": value}]}, "messages") for value in NO_CONTENTS),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages"),
        ({"messages": TURNS * 1025}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "name": "y" * 10**6}]}, "messages"),
    ],
)
def test_chats_that_are_wrong(body: dict[str, Any], param: str) -> None:
    assert refusal(Api(), CHAT, {**GOOD[CHAT], **body}) == (400, VALUE, param)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        *((value, "prompt") for value in NO_PROMPTS),
        (["a", ""], "prompt[1]"),
        (["a"] * 65, "prompt"),
        (["a"] * 65_536, "prompt"),
        *(([value], "prompt") for value in (-1, 100, 2**31, 2**63, 1.5, True, None)),
    ],
)
def test_prompts_that_are_wrong(prompt: Any, param: str) -> None:
    assert refusal(Api(), COMPLETIONS, {"model": "tiny", "prompt": prompt}) == (400, VALUE, param)


UNSUPPORTED_FIELDS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": [{"type": "function"}]}),
    (CHAT, {"tool_choice": "required"}),
    (CHAT, {"functions": [{}]}),
    *((CHAT, {"response_format": value}) for value in ({"type": "json_object"}, {}, {"type": "json_schema"})),
    (CHAT, {"modalities": ["text", "audio"]}),
    (CHAT, {"audio": {"voice": "x"}}),
    (CHAT, {"chat_template": "{{ 7 }}"}),
    (CHAT, {"documents": []}),
    (CHAT, {"reasoning_effort": "high"}),
    (CHAT, {"structured_outputs": {"json": {}}}),
    (COMPLETIONS, {"suffix": "x"}),
    (COMPLETIONS, {"best_of": 2}),
    (COMPLETIONS, {"prompt_embeds": "x"}),
    (COMPLETIONS, {"use_beam_search": True}),
    (COMPLETIONS, {"truncate_prompt_tokens": 5}),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}),
    (MESSAGES, {"tools": [{"name": "x"}]}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (RESPONSES, {"tools": [{"type": "web_search"}]}),
    (RESPONSES, {"previous_response_id": "resp_1"}),
    (RESPONSES, {"background": True}),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}),
]


@pytest.mark.parametrize(("route", "body"), UNSUPPORTED_FIELDS)
def test_known_fields_that_would_change_the_answer(route: str, body: dict[str, Any]) -> None:
    name = next(iter(body))
    assert refusal(Api(), route, {**GOOD[route], **body}) == (400, UNSUPPORTED, name)


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file", "video_url"])
def test_only_text_is_read(part: str) -> None:
    content = [{"type": "text", "text": "see"}, {"type": part, part: {"url": "http://localhost:1/x"}}]
    turns = [{"role": "user", "content": content}]
    assert refusal(Api(), CHAT, {"model": "tiny", "messages": turns}) == (400, MODALITY, "messages")
    body = {**GOOD[MESSAGES], "messages": turns}
    assert refusal(Api(), MESSAGES, body) == (400, MODALITY, "messages")
    assert refusal(Api(), RESPONSES, {"model": "tiny", "input": turns}) == (400, MODALITY, "input")


def test_the_length_of_the_context() -> None:
    for prompt in ("x" * 256, "x" * 300, "x" * 2049, ids("x") * 256, " " * (1 << 21)):
        assert refusal(Api(), COMPLETIONS, {"model": "tiny", "prompt": prompt}) == (400, CONTEXT, "prompt")
    turns = [{"role": "user", "content": "🙂" * 2049}]
    assert refusal(Api(), CHAT, {"model": "tiny", "messages": turns}) == (400, CONTEXT, "messages")
    with pytest.raises(InvalidRequest, match="This model's maximum context length is 256 tokens"):
        Api().ask(COMPLETIONS, {"model": "tiny", "prompt": "x" * 300})
    api = Api()
    api.ask(COMPLETIONS, {"model": "tiny", "prompt": "x" * 255, "max_tokens": 1})
    assert api.client.submitted[0]["sampling"].max_tokens == 1


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, "/tokenize", "/detokenize"])
def test_models_that_are_not_here(route: str) -> None:
    for name in ("gpt-4", "../../etc/passwd", "a\0b", "x" * 10**6, "tiny/adapter"):
        status, code, param = refusal(Api(), route, {**GOOD[route], "model": name})
        assert (status, code, param) == (404, "model_not_found", "model")
    assert refusal(Api(), "/v1/models/{id:path}", {}, method="GET", path={"id": "x"})[0] == 404


def test_other_routes_have_the_same_limits() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"max_tokens": 0}, "max_tokens"),
        (MESSAGES, {"stop_sequences": ["a"] * 5}, "stop_sequences"),
        (MESSAGES, {"messages": TURNS * 1025}, "messages"),
        (MESSAGES, {"messages": [{"role": "system", "content": "x"}]}, "messages"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        (MESSAGES, {"system": 5}, "system"),
        (MESSAGES, {"system": []}, "system"),
        (MESSAGES, {"temperature": 3}, "temperature"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [5]}, "input"),
        (RESPONSES, {"input": TURNS * 1025}, "input"),
        (RESPONSES, {"input": [{"role": "boss", "content": "x"}]}, "input"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
        (RESPONSES, {"instructions": 5}, "instructions"),
        (RESPONSES, {"stop": ["a"] * 5}, "stop"),
        (RESPONSES, {"cache_salt": "a/b"}, "cache_salt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"messages": TURNS}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": None, "messages": []}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [100]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 1_000_000}, "tokens"),
        ("/detokenize", {"tokens": None}, "tokens"),
    ]
    for route, body, param in cases:
        assert refusal(Api(), route, {**GOOD[route], **body}) == (400, VALUE, param), (route, body)


def test_a_key_may_not_ask_for_more_than_it_is_allowed() -> None:
    caller = Caller(tenant="t", lowest_priority_number=0)
    body = {**GOOD[CHAT], "priority": -1}
    assert refusal(Api(), CHAT, body, caller=caller) == (403, "not_permitted", "priority")
    api = Api()
    api.ask(CHAT, {**GOOD[CHAT], "priority": 3, "cache_salt": "s"}, caller=caller)
    assert api.client.submitted[0]["priority"] == 3 and api.client.submitted[0]["tenant"] == "t\x1fs"


@pytest.mark.parametrize("route", list(GOOD))
def test_unknown_fields_are_named_or_refused(route: str) -> None:
    body = {**GOOD[route], "temprature": 1, "x y": 2, "nothing": None, "x-y": 3}
    answer = asyncio.run(Api().open(route, body))
    assert isinstance(answer, Answer) and answer.headers == {"x-paceline-ignored-fields": "temprature, x-y"}
    assert refusal(Api(strict_fields=True), route, body) == (400, "unknown_parameter", "temprature")
    asyncio.run(Api(strict_fields=True).open(route, GOOD[route]))


@pytest.mark.parametrize("route", list(GOOD))
def test_every_optional_field_may_be_null(route: str) -> None:
    api = Api()
    schema = api.routes["POST", route].openapi["requestBody"]["content"]["application/json"]["schema"]
    nulls = {name: None for name in schema["properties"] if name not in GOOD[route]}
    assert nulls
    asyncio.run(api.open(route, {**nulls, **GOOD[route]}))


def test_what_clients_send_along_changes_nothing() -> None:
    more = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "best_of": 1,
        "stop": None,
        "logit_bias": {},
        "modalities": ["text"],
    }
    answer = asyncio.run(Api().open(CHAT, {**GOOD[CHAT], **more}))
    assert isinstance(answer, Answer) and not answer.headers


def test_routes_that_are_not_here_say_so() -> None:
    api = Api()
    missing: list[Route] = [route for route in api.routes.values() if not route.openapi]
    assert {"/v1/embeddings", "/v1/audio/{rest:path}", "/v1/batches"} <= {route.path for route in missing}
    for route in missing:
        status, code, _ = refusal(api, route.path, {}, method=route.methods[0])
        assert (status, code) == (404, "unsupported_route")


def test_every_route_is_described() -> None:
    for (_, path), route in Api().routes.items():
        if route.openapi:
            assert route.openapi["summary"], path
            assert route.takes_body == ("requestBody" in route.openapi), path


def test_lowered_limits_hold() -> None:
    from paceline.errors import ConfigError
    from paceline.server.api.limits import SERVER_LIMITS

    api = Api(limits=SERVER_LIMITS.lowered(branches=2, stops=1))
    assert refusal(api, CHAT, {**GOOD[CHAT], "n": 3}) == (400, VALUE, "n")
    assert refusal(api, CHAT, {**GOOD[CHAT], "stop": ["a", "b"]}) == (400, VALUE, "stop")
    for name, value in (("branches", 9), ("branches", 0), ("nothing", 1)):
        with pytest.raises(ConfigError):
            SERVER_LIMITS.lowered(**{name: value})
