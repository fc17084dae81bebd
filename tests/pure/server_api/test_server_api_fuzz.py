"""Bodies drawn from each route's own schema, with a few values swapped for others: an answer or a refusal, no more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.process.client import EngineUnavailable
from paceline.server.call import Answer, Events
from paceline.server.errors import problem_of
from tests.e2e.catalogue.entry import GOOD
from tests.pure.server_api.api_helpers import Api, says

ROUTES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses", "/tokenize", "/detokenize"),
)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
NUMBERS = st.one_of(
    st.integers(-3, 130),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 0.5, -0.5, 1e308, 2.0, 1.0]),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda parts: st.one_of(st.lists(parts, max_size=3), st.dictionaries(TEXTS, parts, max_size=3)),
    max_leaves=6,
)
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", "x"])
CONTENTS = st.one_of(
    TEXTS, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=2), ANYTHING
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": ROLES, "content": CONTENTS}), min_size=1, max_size=3)


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values a schema allows, more or less."""
    if "anyOf" in schema:
        return st.one_of([values(part) for part in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "array":
        return st.lists(values(schema["items"]), max_size=min(3, schema.get("maxItems", 3)))
    if "properties" in schema:
        parts = {name: values(part) for name, part in schema["properties"].items()}
        needed = {name: parts.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(needed, optional=parts)
    if kind == "object":
        return st.dictionaries(st.sampled_from(["5", "a", "include_usage"]), ANYTHING, max_size=2)
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 0), schema.get("maximum", 100)
        ends = st.sampled_from([low, high, low + 1])
        return st.one_of(ends, st.integers(max(-5, int(low)), min(200, int(high))))
    simple = {"boolean": st.booleans(), "string": TEXTS, "null": st.none()}
    return simple.get(str(kind), ANYTHING)


@st.composite
def bodies(draw: st.DrawFn, schema: dict[str, Any]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=5, unique=True))
    body = {name: draw(values(schema["properties"][name])) for name in names}
    body.setdefault("model", "tiny")
    for name in schema["required"]:
        body.setdefault(name, draw(values(schema["properties"][name])))
    if "messages" in body and draw(st.integers(0, 9)):
        body["messages"] = draw(MESSAGES)
    if draw(st.integers(0, 3)) == 0:
        body[draw(st.one_of(TEXTS, st.sampled_from(sorted(schema["properties"]))))] = draw(ANYTHING)
    return body


async def answer(api: Api, route: str, body: dict[str, Any]) -> int:
    """The status of an answer that was read to its end."""
    try:
        found = await api.open(route, body)
        if isinstance(found, Answer):
            json.loads(found.body)
            return found.status
        assert isinstance(found, Events)
        async for _ in found.frames:
            pass
        await found.frames.aclose()
        return 200
    except InvalidRequest as error:
        return problem_of(error).status
    except EngineUnavailable:  # a search: this engine has no trees
        assert body.get("use_beam_search") or body.get("best_of") or body.get("search")
        return 503


@pytest.mark.slow
@pytest.mark.hypothesis
@pytest.mark.parametrize("route", ROUTES)
def test_a_body_is_answered_or_refused(route: str) -> None:
    api = Api(says("ab", "c#"))
    schema = api.routes["POST", route].openapi["requestBody"]["content"]["application/json"]["schema"]
    seen: set[int] = set()

    @example(GOOD[route] | {"model": "tiny"})  # of a few drawn ones, all may be refused
    @given(bodies(schema))
    def check(body: dict[str, Any]) -> None:
        json.dumps(body)
        seen.add(asyncio.run(answer(api, route, body)))
        assert api.is_at_rest

    check()
    api.service.close()
    assert seen <= {200, 400, 403, 404, 503} and {200, 400} <= seen
