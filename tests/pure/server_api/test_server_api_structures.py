"""Forms of the answer in the requests of every API: what reaches the engine, and what is said of the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.core.structure import Structure
from paceline.errors import InvalidRequest
from paceline.server.call import Answer
from paceline.server.errors import problem_of
from tests.e2e.catalogue.entry import CHAT, COMPLETIONS, GOOD, MESSAGES, RESPONSES
from tests.e2e.catalogue.structures import PICTURE, schema_format
from tests.fake_engine import finished
from tests.pure.server_api.api_helpers import Api, says

SCHEMA = Structure.named("json", PICTURE)
STRICT = Structure.named("json", PICTURE, strict=True)
FLAT = {"type": "json_schema", "name": "picture", "schema": PICTURE}


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.service.close()


def answered(api: Api, route: str, changes: dict[str, Any]) -> Answer:
    found = asyncio.run(api.open(route, {**GOOD[route], "model": "tiny", **changes}))
    assert isinstance(found, Answer)
    return found


@pytest.mark.parametrize(
    ("route", "changes", "expected"),
    [
        (CHAT, {"response_format": {"type": "text"}}, None),
        (CHAT, {"response_format": {"type": "json_object"}}, Structure()),
        (CHAT, {"response_format": schema_format(PICTURE)}, SCHEMA),
        (CHAT, {"response_format": schema_format(PICTURE, strict=True)}, STRICT),
        (COMPLETIONS, {"response_format": schema_format(PICTURE, strict=False)}, SCHEMA),
        (COMPLETIONS, {"response_format": FLAT}, SCHEMA),
        (CHAT, {"structured_outputs": {"json": PICTURE}}, SCHEMA),
        (CHAT, {"structured_outputs": {"regex": "a+"}}, Structure(kind="regex", source="a+")),
        (COMPLETIONS, {"guided_json": json.dumps(PICTURE)}, SCHEMA),
        (COMPLETIONS, {"guided_regex": "a+"}, Structure(kind="regex", source="a+")),
        (CHAT, {"guided_choice": ["a", "b"]}, Structure(kind="choice", source='["a", "b"]')),
        (CHAT, {"guided_grammar": 'root ::= "a"'}, Structure(kind="gbnf", source='root ::= "a"')),
        (CHAT, {"json_schema": json.dumps(PICTURE)}, SCHEMA),
        (COMPLETIONS, {"json_schema": PICTURE}, SCHEMA),
        (CHAT, {"regex": "a+"}, Structure(kind="regex", source="a+")),
        (CHAT, {"ebnf": 'root ::= "a"'}, Structure(kind="gbnf", source='root ::= "a"')),
        (COMPLETIONS, {"grammar": 'root ::= "a"'}, Structure(kind="gbnf", source='root ::= "a"')),
        (RESPONSES, {"text": {"format": FLAT}}, SCHEMA),
        (RESPONSES, {"text": {"format": {**FLAT, "strict": True}, "verbosity": "low"}}, STRICT),
        (RESPONSES, {"text": {"format": {"type": "json_object"}}}, Structure()),
        (RESPONSES, {"text": {"format": {"type": "text"}}}, None),
        (MESSAGES, {"output_config": {"format": FLAT, "effort": "low"}}, SCHEMA),
        (MESSAGES, {"output_config": {}}, None),
        (MESSAGES, {"output_format": FLAT}, SCHEMA),
    ],
)
def test_each_form_reaches_the_engine(api: Api, route: str, changes: Any, expected: Structure | None) -> None:
    answered(api, route, changes)
    assert api.client.submitted[0]["sampling"].structured_outputs == expected


def test_what_is_ignored_is_in_a_header(api: Api) -> None:
    schema = {"not": {}, "properties": {"a": {"type": "string", "format": "byte"}}}
    found = answered(api, CHAT, {"response_format": schema_format(schema), "temprature": 1})
    named = found.headers["x-paceline-ignored-fields"].split(", ")
    assert named == ["temprature", "response_format.not", "response_format.format.byte"]
    assert not answered(api, CHAT, {"response_format": schema_format(PICTURE)}).headers


def test_a_response_tells_its_format(api: Api) -> None:
    found = answered(api, RESPONSES, {"text": {"format": FLAT}})
    assert json.loads(found.body)["text"] == {"format": FLAT}
    found = answered(api, RESPONSES, {})
    assert json.loads(found.body)["text"] == {"format": {"type": "text"}}


def test_the_field_that_was_used_is_named(api: Api) -> None:
    for route, field, value in (
        (CHAT, "response_format", schema_format({"type": "strin"})),
        (CHAT, "guided_regex", "["),
        (RESPONSES, "text", {"format": {**FLAT, "schema": {"type": "strin"}}}),
        (MESSAGES, "output_format", {**FLAT, "schema": {"type": "strin"}}),
    ):
        with pytest.raises(InvalidRequest) as refused:
            answered(api, route, {field: value})
        problem = problem_of(refused.value)
        assert problem.param == field and problem.message.startswith(f"{field}: ")
        assert "structured_outputs" not in problem.message and api.is_at_rest


def test_two_forms_name_the_second(api: Api) -> None:
    with pytest.raises(InvalidRequest, match="response_format and guided_regex") as refused:
        answered(api, CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"})
    assert refused.value.param == "guided_regex"


@pytest.mark.parametrize("num_each", [40])
def test_good_and_bad_in_turns(api: Api, num_each: int) -> None:
    """All of one kind are answered, all of the other refused, and nothing is left behind."""

    async def ask(number: int) -> int:
        schema = {**PICTURE, "title": str(number)} if number % 2 else {"type": f"strin{number}"}
        try:
            await api.open(CHAT, {**GOOD[CHAT], "model": "tiny", "response_format": schema_format(schema)})
        except InvalidRequest as error:
            return problem_of(error).status
        return 200

    async def ask_all() -> list[int]:
        return await asyncio.gather(*(ask(number) for number in range(2 * num_each)))

    assert asyncio.run(ask_all()) == [400, 200] * num_each
    assert api.is_at_rest and len(api.client.submitted) == num_each


@pytest.mark.parametrize(("detail", "status"), [("grammar_error", 500), ("grammar_too_complex", 400)])
def test_an_answer_that_cannot_go_on(detail: str, status: int) -> None:
    def fails(prompt: Any, sampling: Any) -> Any:
        (*before, last) = says("a")(prompt, sampling)
        assert isinstance(last, list)
        last[0].ending = finished(1, "error", 1, detail=detail)
        return [*before, last]

    api = Api(fails)
    with pytest.raises(Exception) as caught:
        answered(api, CHAT, {"response_format": {"type": "json_object"}})
    api.service.close()
    problem = problem_of(caught.value)
    assert (problem.status, problem.code) == (status, detail)
