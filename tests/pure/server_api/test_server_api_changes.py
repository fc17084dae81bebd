"""PATCH /v1/requests/{id} and service_tier: the service level of a request, on arrival and later."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.request import Change, ChangeOutcome
from paceline.core.service_class import CLASS_PRIORITIES, CLASSES
from paceline.errors import InvalidRequest
from paceline.process.client import EngineUnavailable
from paceline.server.access.caller import Caller
from paceline.server.errors import (
    NotPermitted,
    PriorityNotPermitted,
    RequestBusy,
    RequestEnded,
    UnknownParameter,
    UnknownRequestId,
)
from tests.pure.server_api.api_helpers import Api, FakeClient, FakeStream, says

ROUTE = "/v1/requests/{id}"
CHAT = "/v1/chat/completions"
ME, OTHER = Caller(tenant="me"), Caller(tenant="other")


class ChangingFake(FakeClient):
    """Numbers its requests, and remembers what was to be changed."""

    def __init__(self, script: Any) -> None:
        super().__init__(script)
        self.changes: list[tuple[tuple[int, ...], Change]] = []
        self.outcome = ChangeOutcome.CHANGED

    def submit(self, *given: Any, **more: Any) -> FakeStream:
        stream = super().submit(*given, **more)
        stream.first = 10 * len(self.streams)
        return stream

    async def change(self, numbers: Sequence[int], change: Change) -> list[ChangeOutcome]:
        self.changes.append((tuple(numbers), change))
        return [self.outcome] * len(numbers)


def api(**settings: Any) -> tuple[Api, ChangingFake]:
    made = Api(says("hello"), **settings)
    client = ChangingFake(made.client.script)
    made.client = made.service.client = client
    return made, client


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more}


def patch(made: Api, given: dict[str, Any], *, request_id: str = "id1", caller: Caller = ME) -> Any:
    return made.ask(ROUTE, given, method="PATCH", path={"id": request_id}, caller=caller)


# -- service_tier ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tier, own, expected",
    [
        (None, "standard", "standard"),
        ("auto", "batch", "batch"),
        ("default", "spot", "spot"),
        ("standard_only", "interactive", "interactive"),
        ("interactive", "interactive", "interactive"),
        ("priority", "interactive", "interactive"),
        ("flex", "standard", "spot"),
        ("batch", "interactive", "batch"),
    ],
)
def test_a_request_runs_in_the_class_it_names_or_its_key_has(
    tier: str | None, own: str, expected: str
) -> None:
    made, client = api()
    more = {} if tier is None else {"service_tier": tier}
    made.ask(CHAT, body(priority=3, **more), caller=Caller(tenant="me", service_class=own))
    told = client.submitted[0]
    assert (told["service_class"], told["priority"]) == (expected, 3)
    assert made.listener.records[0].service_class == expected


def test_classes_go_from_the_most_to_the_least_urgent() -> None:
    assert sorted(CLASSES, key=CLASS_PRIORITIES.__getitem__) == list(CLASSES)
    assert CLASS_PRIORITIES["standard"] == 0  # a request without a class is where it always was


@pytest.mark.parametrize("own, tier", [("standard", "interactive"), ("batch", "spot"), ("spot", "standard")])
def test_no_class_is_better_than_the_keys(own: str, tier: str) -> None:
    made, _ = api()
    with pytest.raises(NotPermitted, match=f"has the class {own} and may not ask for {tier}") as caught:
        made.ask(CHAT, body(service_tier=tier), caller=Caller(tenant="me", service_class=own))
    assert caught.value.param == "service_tier"
    admin = Caller(tenant="me", service_class=own, is_admin=True)
    made.ask(CHAT, body(service_tier=tier), caller=admin)


TALK = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": TALK, "max_tokens": 3},
    "/v1/responses": {"input": "a"},
}


@pytest.mark.parametrize("route", BODIES)
def test_a_class_that_there_is_not_is_refused_on_every_route(route: str) -> None:
    made, _ = api()
    with pytest.raises(InvalidRequest, match="must be one of auto, default, interactive") as caught:
        made.ask(route, {"model": "tiny", **BODIES[route], "service_tier": "gold"})
    assert caught.value.param == "service_tier"


# -- changes -----------------------------------------------------------------------------------------------


def test_a_change_reaches_every_branch_in_the_words_of_the_engine() -> None:
    made, client = api()
    made.ask(CHAT, body(n=2, service_tier="batch"), caller=ME)
    before_s = time.monotonic()
    told = patch(made, {"priority": -1, "deadline_ms": 2500, "paused": True})
    [(numbers, change)] = client.changes
    assert numbers == (10, 11)
    assert change.priority == -1 and change.paused is True
    assert change.until_s is not None and 2.5 <= change.until_s - before_s < 3.5
    assert told == {
        "id": "id1",
        "object": "request.change",
        "service_tier": "batch",
        "priority": -1,
        "deadline_ms": 2500,
        "paused": True,
        "live": 2,
    }


def test_what_is_not_named_stays() -> None:
    made, client = api()
    made.ask(CHAT, body(), caller=ME)
    patch(made, {"paused": False}, request_id="chatcmpl-id1")
    assert client.changes[0][1] == Change(paused=False)


def test_no_deadline_is_later_than_the_servers_own() -> None:
    for limit_s, asked_ms, most_s in ((None, 0, math.inf), (5.0, 0, 5.0), (5.0, 60_000, 5.0)):
        made, client = api(request_timeout_s=limit_s)
        made.ask(CHAT, body(), caller=ME)
        patch(made, {"deadline_ms": asked_ms})
        until_s = client.changes[0][1].until_s
        assert until_s is not None and until_s - time.monotonic() <= most_s


@pytest.mark.parametrize("caller, request_id", [(OTHER, "id1"), (ME, "id2"), (ME, "")])
def test_a_request_of_another_caller_is_unknown(caller: Caller, request_id: str) -> None:
    made, client = api()
    made.ask(CHAT, body(), caller=ME)
    with pytest.raises(UnknownRequestId):
        patch(made, {"paused": True}, caller=caller, request_id=request_id)
    assert not client.changes


def test_an_admin_may_change_everybodys() -> None:
    made, client = api()
    made.ask(CHAT, body(), caller=ME)
    patch(made, {"paused": True}, caller=Caller(tenant="root", is_admin=True))
    assert client.changes[0][0] == (10,)


@pytest.mark.parametrize(
    "outcome, error", [(ChangeOutcome.ENDED, RequestEnded), (ChangeOutcome.BUSY, RequestBusy)]
)
def test_what_cannot_be_changed_is_a_conflict(outcome: ChangeOutcome, error: type[Exception]) -> None:
    made, client = api()
    made.ask(CHAT, body(), caller=ME)
    client.outcome = outcome
    with pytest.raises(error):
        patch(made, {"paused": True})


def test_a_request_without_a_number_gets_the_most_urgent_one_its_key_allows_from_0_on() -> None:
    for lowest, given in ((5, 5), (-3, 0), (None, 0)):
        made, client = api()
        caller = Caller(tenant="me", lowest_priority_number=lowest)
        made.ask(CHAT, body(), caller=caller)
        assert client.submitted[-1]["priority"] == given
    with pytest.raises(PriorityNotPermitted):
        made.ask(CHAT, body() | {"priority": 0}, caller=Caller(tenant="me", lowest_priority_number=5))


def test_a_priority_stays_within_what_the_key_allows() -> None:
    made, client = api()
    caller = Caller(tenant="me", lowest_priority_number=0)
    made.ask(CHAT, body(), caller=caller)
    with pytest.raises(PriorityNotPermitted):
        patch(made, {"priority": -1}, caller=caller)
    assert not client.changes


@pytest.mark.parametrize(
    "given, error, param",
    [
        ({}, InvalidRequest, None),
        ({"paused": 1}, InvalidRequest, "paused"),
        ({"paused": "yes"}, InvalidRequest, "paused"),
        ({"priority": 1.5}, InvalidRequest, "priority"),
        ({"priority": 2**31}, InvalidRequest, "priority"),
        ({"deadline_ms": -1}, InvalidRequest, "deadline_ms"),
        ({"deadline_ms": 10**10}, InvalidRequest, "deadline_ms"),
        ({"state": "paused"}, UnknownParameter, "state"),
    ],
)
def test_a_body_that_makes_no_sense_is_refused(
    given: dict[str, Any], error: type[InvalidRequest], param: str | None
) -> None:
    made, client = api()
    made.ask(CHAT, body(), caller=ME)
    with pytest.raises(error) as caught:
        patch(made, given)
    assert caught.value.param == param and not client.changes


def test_an_engine_that_cannot_change_says_so() -> None:
    made = Api(says("hello"))
    made.service.recent.note("id1", ME, [1])
    with pytest.raises(EngineUnavailable):
        asyncio.run(made.open(ROUTE, {"paused": True}, method="PATCH", path={"id": "id1"}, caller=ME))
