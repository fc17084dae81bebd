"""/v1/admin/dial and /v1/admin/policy: what is asked of the engine, what is refused, what is told."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.dial import DialKind, DialSetting, DialStatus, DialWord
from paceline.errors import InvalidRequest
from paceline.process.client import EngineUnavailable, PolicyChange, Steering
from paceline.server.api.admin_routes import DIAL_ROUTE, POLICY_ROUTE
from paceline.server.errors import UnknownParameter
from paceline.server.metrics.request_metrics import dial_gauges
from tests.pure.server_api.api_helpers import Api, FakeClient

STATUS = DialStatus(
    setting=DialSetting(kind=DialKind.ITL, value=30.0),
    word=DialWord.UNREACHABLE,
    reason="the p99 seen is 50 ms",
    position=0.125,
    itl_p99_ms=50.0,
    step_target_ms=7.5,
    max_step_tokens=2048,
    max_prompt_tokens=4096,
    prompt_share=0.25,
    max_rows=90,
    moves=1,
)


class SteeredClient(FakeClient):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(lambda tokens, sampling: [])
        self.steered: list[tuple[DialSetting | None, PolicyChange | None]] = []

    async def steer(self, *, dial: DialSetting | None = None, policy: PolicyChange | None = None) -> Steering:
        self.steered.append((dial, policy))
        return Steering(dial=STATUS, policy="fair", policy_options={"ageing_s": 30.0})


def api() -> tuple[Api, SteeredClient]:
    made, client = Api(), SteeredClient()
    made.client = made.service.client = client
    return made, client


def test_looking_changes_nothing() -> None:
    made, client = api()
    found = made.ask(DIAL_ROUTE, method="GET")
    assert client.steered == [(None, None)]
    assert found["setting"] == {"itl_p99_ms": 30.0} and found["state"] == "unreachable"
    assert found["reason"] == "the p99 seen is 50 ms" and found["position"] == 0.125
    assert found["limits"] == {
        "step_target_ms": 7.5,
        "max_step_tokens": 2048,
        "max_prompt_tokens": 4096,
        "prompt_share": 0.25,
        "max_rows": 90,
    }
    assert found["seen"] == {"itl_p99_ms": 50.0, "ttft_p99_ms": None}
    assert "it cannot be held: the p99 seen is 50 ms" in found["sentences"][0]
    assert made.ask(POLICY_ROUTE, method="GET") == {
        "object": "policy",
        "policy": "fair",
        "options": {"ageing_s": 30.0},
    }


@pytest.mark.parametrize(
    "body, kind, value",
    [
        ({"position": 0.3}, DialKind.POSITION, 0.3),
        ({"position": 1}, DialKind.POSITION, 1),
        ({"itl_p99_ms": 30, "position": None}, DialKind.ITL, 30),
        ({"ttft_p99_ms": 500.0}, DialKind.TTFT, 500.0),
        ({"off": True}, DialKind.OFF, 0.0),
    ],
)
def test_turning_the_dial(body: dict[str, Any], kind: DialKind, value: float) -> None:
    made, client = api()
    made.ask(DIAL_ROUTE, body, method="PUT")
    assert client.steered == [(DialSetting(kind=kind, value=value), None)]


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "position"),
        ({"position": 1.5}, "position"),
        ({"position": "0.5"}, "position"),
        ({"position": True}, "position"),
        ({"itl_p99_ms": 0}, "itl_p99_ms"),
        ({"ttft_p99_ms": -3}, "ttft_p99_ms"),
        ({"position": 0.5, "ttft_p99_ms": 100}, "ttft_p99_ms"),
        ({"off": False}, "off"),
        ({"off": True, "position": 0.5}, "off"),
        ({"dial": 0.5}, "dial"),
    ],
)
def test_a_mistake_names_its_field_and_changes_nothing(body: dict[str, Any], param: str) -> None:
    made, client = api()
    with pytest.raises(InvalidRequest) as caught:
        made.ask(DIAL_ROUTE, body, method="PUT")
    assert caught.value.param == param and not client.steered


def test_changing_the_policy() -> None:
    made, client = api()
    body = {"policy": "fair", "options": {"tenant_weights": "a=2", "ageing_s": 3}}
    made.ask(POLICY_ROUTE, body, method="PUT")
    assert client.steered == [(None, PolicyChange(name="fair", options=body["options"]))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "policy"),
        ({"policy": "os:system"}, "policy"),
        ({"policy": "fair", "options": [1]}, "options"),
        ({"policy": "fair", "options": {"ageing_s": None}}, "options"),
        ({"policy": "fair", "options": {"ageing_s": {"a": 1}}}, "options"),
    ],
)
def test_a_policy_that_cannot_be(body: dict[str, Any], param: str) -> None:
    made, client = api()
    with pytest.raises(InvalidRequest) as caught:
        made.ask(POLICY_ROUTE, body, method="PUT")
    assert caught.value.param == param and not client.steered


def test_unknown_fields_are_refused_where_they_would_change_a_server() -> None:
    made, _ = api()
    with pytest.raises(UnknownParameter, match="did you mean position"):
        made.ask(DIAL_ROUTE, {"positon": 0.5}, method="PUT")


def test_the_routes_are_for_admins() -> None:
    made, _ = api()
    steering = [route for (_, path), route in made.routes.items() if path in (DIAL_ROUTE, POLICY_ROUTE)]
    assert len(steering) == 4 and all(route.needs_admin for route in steering)


def test_an_engine_that_cannot_be_steered_says_so() -> None:
    with pytest.raises(EngineUnavailable):
        Api().ask(DIAL_ROUTE, method="GET")


def test_gauges_say_where_it_stands() -> None:
    values = {name: value for name, _, value in dial_gauges(STATUS)}
    assert values["dial_position"] == 0.125 and values["dial_target_seconds"] == 0.03
    assert values["dial_unreachable"] == values["dial_on"] == 1.0
    off = {name: value for name, _, value in dial_gauges(DialStatus())}
    assert off["dial_on"] == 0.0 and off["dial_itl_p99_seconds"] == 0.0
