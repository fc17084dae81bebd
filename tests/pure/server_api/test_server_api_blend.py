"""Contexts that are placed: their tokens stand alone in the prompt, and what cannot be placed is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.core.blend_quality import Blending
from paceline.core.stretch import ModulePart
from paceline.errors import PacelineError
from paceline.server.errors import BlendUnavailable
from paceline.server.generate.context_store import Context
from tests.fake_engine import forecast
from tests.pure.server_api.api_helpers import DEFAULT_CALLER, Api, ids

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
EARNED = Blending(kept=0.92, agreement=0.9, num_prompts=4)
TEXTS = {"ctx_one": "the lamp is lit", "ctx_two": "a river [runs:1] north"}


def api(blending: Blending = EARNED) -> Api:
    made = Api()
    made.client._info = replace(made.client._info, blending=blending)
    for name, text in TEXTS.items():
        made.service.contexts.add(
            Context(
                id=name,
                tenant=DEFAULT_CALLER.tenant,
                name="",
                text=text,
                model="tiny",
                role="user",
                num_tokens=1,
                created_s=0.0,
                ttl_s=60,
                until_s=made.service.contexts.now_s() + 60,
            )
        )
    return made


def parts(*names: str, kind: str = "text") -> list[dict[str, Any]]:
    named = [{"type": "context", "context": name} for name in names]
    return [*named, {"type": kind, "text": "which lamp?"}]


def asked(route: str, content: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": content}]
    body = {"input": turns} if route == RESPONSES else {"messages": turns}
    return {**body, **({"max_tokens": 5} if route == MESSAGES else {}), **fields}


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_each_context_has_the_tokens_it_has_alone(route: str) -> None:
    made, kind = api(), "input_text" if route == RESPONSES else "text"
    names = ("ctx_two", "ctx_one", "ctx_two")
    made.ask(route, asked(route, parts(*names, kind=kind), context_reuse="blend"))
    (sent,) = made.client.submitted
    assert [count for _, count, *_ in sent["modules"]] == [len(ids(TEXTS[name])) for name in names]
    for name, (start, count, *_) in zip(names, sent["modules"], strict=True):
        assert sent["tokens"][start : start + count] == ids(TEXTS[name])
    made.ask(route, asked(route, parts(*names, kind=kind)))
    exact = made.client.submitted[1]
    text = made.service.tokenizer.decode
    assert "modules" not in exact and text(exact["tokens"]) == text(sent["tokens"]), (
        "nothing else is different"
    )


def test_prices_and_counts_are_of_the_tokens_that_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    made = api()
    encode, more = made.service.tokenizer.encode, ids("!")
    # As if each context ended inside of what is one token of the text around it.
    monkeypatch.setattr(made.service.tokenizer, "encode", lambda text, **how: [*encode(text, **how), *more])
    content = parts("ctx_two", "ctx_one", "ctx_two")
    body = asked(MESSAGES, content, context_reuse="blend", model="tiny")
    made.ask(MESSAGES, body)
    made.ask(MESSAGES, {**body, "context_reuse": "exact"})
    blended, exact = (len(sent["tokens"]) for sent in made.client.submitted)
    assert blended == exact + 3
    for reuse, count in (("blend", blended), ("exact", exact)):
        told = {**body, "context_reuse": reuse}
        made.client.forecast_result = forecast(0.1, 0.2)
        assert made.ask("/v1/estimate", told)["prompt_tokens"] == count
        del told["max_tokens"]
        assert made.ask(f"{MESSAGES}/count_tokens", told)["input_tokens"] == count
    assert made.client.asked[0]["modules"] == list(made.client.submitted[0]["modules"])
    assert "modules" not in made.client.asked[1]


def test_what_is_refused_is_refused_where_it_is_counted_too() -> None:
    made = api(Blending())
    body = asked(MESSAGES, parts("ctx_one"), context_reuse="blend", model="tiny")
    for path in ("/v1/estimate", f"{MESSAGES}/count_tokens"):
        with pytest.raises(BlendUnavailable, match="was not measured"):
            made.ask(path, {name: value for name, value in body.items() if name != "max_tokens"})


def test_marks_cannot_be_spelled_and_are_not_shown() -> None:
    made = api()
    body = asked(CHAT, parts("ctx_one"), context_reuse="blend")
    made.ask(CHAT, body)
    (sent,) = made.client.submitted
    shown = made.service.tokenizer.decode(sent["tokens"])
    assert "[" not in shown and TEXTS["ctx_one"] in shown
    assert isinstance(sent["modules"][0], ModulePart)


def test_blending_without_contexts_is_a_plain_prompt() -> None:
    made = api()
    plain = [{"role": "user", "content": "hi"}]
    for fields in ({"context_reuse": "blend"}, {}):
        made.ask(CHAT, {"messages": plain, **fields})
    assert made.client.submitted[0]["tokens"] == made.client.submitted[1]["tokens"]
    assert "modules" not in made.client.submitted[0]


@pytest.mark.parametrize(
    "blending, reason",
    [
        (Blending(), "was not measured"),
        (Blending(kept=0.8491, num_prompts=4), "keeps 84.9%"),
        (Blending(objection="layers with a sliding window"), "sliding window"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_a_model_that_has_not_earned_it_blends_nothing(route: str, blending: Blending, reason: str) -> None:
    made = api(blending)
    with pytest.raises(BlendUnavailable, match=reason) as refused:
        made.ask(route, asked(route, parts("ctx_one"), context_reuse="blend"))
    assert refused.value.param == "context_reuse"
    with pytest.raises(BlendUnavailable):
        made.ask("/v1/contexts", {"text": "x", "context_reuse": "blend"})
    assert not made.client.submitted


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"kv_keep": {"first": 4, "recent": 64}}, "kv_keep"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"search": {"type": "beam", "width": 2}}, "search"),
    ],
)
def test_what_needs_all_of_a_prompt_computed_is_refused(fields: dict[str, Any], reason: str) -> None:
    made = api()
    with pytest.raises(BlendUnavailable, match=reason):
        made.ask(CHAT, asked(CHAT, parts("ctx_one"), context_reuse="blend", **fields))


def test_a_model_says_what_blending_keeps() -> None:
    def shown(blending: Blending) -> Any:
        return api(blending).ask("/v1/models/{id:path}", method="GET", path={"id": "tiny"})["paceline"][
            "blending"
        ]

    assert shown(EARNED) == {"offered": True, "kept": 0.92, "agreement": 0.9}
    low = shown(Blending(kept=0.5))
    assert not low["offered"] and low["kept"] == 0.5 and "50.0%" in low["reason"]


def test_the_texts_count_for_the_size_of_a_prompt() -> None:
    made = api()
    made.service.contexts.add(
        replace(made.service.contexts._by_id["ctx_one"], id="ctx_long", text="word " * 200_000)
    )
    with pytest.raises(PacelineError, match="maximum context length"):
        made.ask(CHAT, asked(CHAT, parts("ctx_long"), context_reuse="blend"))
