"""What a request can get wrong: which error it is, which field it names, and that nothing was taken for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.core.parameters import Pin
from paceline.errors import InvalidRequest
from paceline.server.access.caller import Caller
from paceline.server.api.route import Route
from paceline.server.call import Answer, Events
from paceline.server.errors import openai_body, problem_of
from paceline.text.tokenizer import Tokenizer
from tests.e2e.catalogue.catalogue import ENTRIES
from tests.e2e.catalogue.entry import CHAT, COMPLETIONS, GOOD, OK, Entry
from tests.e2e.catalogue.served import VOCAB_SIZE, write_byte_model
from tests.e2e.http_server import Reply
from tests.model_folder import CONTEXT
from tests.pure.server_api.api_helpers import Api, ids

VALUE, CONTEXT_LENGTH = "invalid_value", "context_length_exceeded"


def refusal(api: Api, route: str, body: dict[str, Any], **more: Any) -> tuple[int, str, str | None]:
    with pytest.raises(Exception) as caught:
        asyncio.run(api.open(route, body, **more))
    assert api.is_at_rest and not api.client.submitted
    problem = problem_of(caught.value)
    assert len(problem.message) <= 512
    return problem.status, problem.code, problem.param


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """Over the model that the catalogue speaks of."""
    folder = write_byte_model(tmp_path_factory.mktemp("model"), CONTEXT)
    made = Api(text=Tokenizer.from_folder(folder, model_vocab_size=VOCAB_SIZE))
    yield made
    made.service.close()


CALLERS = {"alpha": Caller(), "low": Caller(lowest_priority_number=0)}
# What a text is counted or decoded for, whichever field it came in.
INPUTS = {"prompt", "messages", "input"}


@pytest.mark.parametrize("number", sorted({entry.number for entry in ENTRIES if entry.body is not None}))
def test_the_catalogue(api: Api, number: int) -> None:
    """Every body of the catalogue is answered as over a socket; a refusal names a field and takes nothing."""
    for entry in (entry for entry in ENTRIES if entry.number == number and entry.body is not None):
        num_submitted = len(api.client.submitted)
        try:
            asyncio.run(opened(api, entry))
            answer = OK
        except InvalidRequest as error:
            problem = problem_of(error)
            answer = (problem.status, problem.code)
            assert len(api.client.submitted) == num_submitted, entry
            assert str(problem.param).partition("[")[0] in INPUTS.union(entry.fields), entry
            assert entry.check is None or entry.check(Reply(problem.status, {}, openai_body(problem))), entry
        assert answer in entry.answers and api.is_at_rest, entry


async def opened(api: Api, entry: Entry) -> None:
    answer = await api.open(entry.route, entry.body, caller=CALLERS[entry.key])
    if isinstance(answer, Events):
        await answer.frames.aclose()


def test_the_length_of_the_context() -> None:
    for prompt in ("x" * 256, "x" * 300, "x" * 2049, ids("x") * 256, " " * (1 << 21)):
        assert refusal(Api(), COMPLETIONS, {"model": "tiny", "prompt": prompt}) == (
            400,
            CONTEXT_LENGTH,
            "prompt",
        )
    turns = [{"role": "user", "content": "🙂" * 2049}]
    assert refusal(Api(), CHAT, {"model": "tiny", "messages": turns}) == (400, CONTEXT_LENGTH, "messages")
    with pytest.raises(InvalidRequest, match="This model's maximum context length is 256 tokens"):
        Api().ask(COMPLETIONS, {"model": "tiny", "prompt": "x" * 300})
    api = Api()
    api.ask(COMPLETIONS, {"model": "tiny", "prompt": "x" * 255, "max_tokens": 1})
    assert api.client.submitted[0]["sampling"].max_tokens == 1


def test_a_model_that_is_not_here() -> None:
    assert refusal(Api(), "/v1/models/{id:path}", {}, method="GET", path={"id": "x"})[0] == 404


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
    nulls = {name: None for name in schema["properties"] if name == "model" or name not in GOOD[route]}
    asyncio.run(api.open(route, {**GOOD[route], **nulls}))


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
    assert {"/embed_sparse", "/v1/audio/{rest:path}", "/v1/batches"} <= {route.path for route in missing}
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
    from paceline.server.api.route import SERVER_LIMITS

    api = Api(limits=SERVER_LIMITS.lowered(branches=2, stops=1))
    assert refusal(api, CHAT, {**GOOD[CHAT], "n": 3}) == (400, VALUE, "n")
    assert refusal(api, CHAT, {**GOOD[CHAT], "stop": ["a", "b"]}) == (400, VALUE, "stop")
    for name, value in (("branches", 9), ("branches", 0), ("nothing", 1)):
        with pytest.raises(ConfigError):
            SERVER_LIMITS.lowered(**{name: value})


@pytest.mark.parametrize(
    "value",
    [
        {"first": -1, "recent": 8},
        {"first": 4, "recent": 0},
        {"first": 4},
        {"first": 4, "recent": 8, "more": 1},
        {"first": "4", "recent": 8},
        [4, 8],
        "all",
    ],
)
def test_kv_that_is_to_be_kept_is_named(value: object) -> None:
    body = {"model": "tiny", "prompt": "hello", "kv_keep": value}
    status, _, param = refusal(Api(), COMPLETIONS, body)
    assert (status, param) == (400, "kv_keep")


@pytest.mark.parametrize("value", ["25h", "", 24, True, ["24h"]])
def test_a_retention_out_of_range_is_named(value: object) -> None:
    body = {"model": "tiny", "prompt": "hello", "prompt_cache_retention": value}
    status, _, param = refusal(Api(), COMPLETIONS, body)
    assert (status, param) == (400, "prompt_cache_retention")


@pytest.mark.parametrize(
    "control",
    [{"type": "ephemeral", "ttl": "2h"}, {"type": "ephemeral", "ttl": 5}, {"type": "for ever"}, "5m"],
)
def test_a_cache_control_out_of_range_is_named(control: object) -> None:
    turn = {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": control}]}
    body = {"model": "tiny", "max_tokens": 4, "messages": [turn]}
    status, _, param = refusal(Api(), "/v1/messages", body)
    assert (status, param) == (400, "cache_control")


@pytest.mark.parametrize("value, seconds", [("24h", 86_400), ("in_memory", None), (None, None)])
def test_a_retention_reaches_the_engine(value: str | None, seconds: int | None) -> None:
    api = Api()
    asyncio.run(api.open(COMPLETIONS, {"model": "tiny", "prompt": "hello", "prompt_cache_retention": value}))
    assert api.client.submitted[0]["sampling"].pin == (None if seconds is None else Pin(ttl_s=seconds))


def test_the_longest_ttl_of_a_conversation_counts() -> None:
    api = Api()
    marked = [
        {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": ttl}}
        for ttl in ("5m", "1h")
    ]
    body = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": marked}]}
    asyncio.run(api.open("/v1/messages", body))
    assert api.client.submitted[0]["sampling"].pin == Pin(ttl_s=3600)


def test_what_is_kept_reaches_the_engine() -> None:
    api = Api()
    body = {"model": "tiny", "prompt": "hello", "kv_keep": {"first": 4, "recent": 8}}
    asyncio.run(api.open(COMPLETIONS, body))
    kept = api.client.submitted[0]["sampling"].kv_keep
    assert (kept.first, kept.recent) == (4, 8)
