"""Deadlines on a real server: what is forecast, what is rejected at once, and what ends at its deadline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.catalogue.served import TinyServer, tiny_server
from tests.e2e.http_server import Reply

COMPLETIONS, ESTIMATE = "/v1/completions", "/v1/estimate"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    with tiny_server(tmp_path_factory.mktemp("server"), "--scheduling-policy", "deadline") as running:
        for number in range(6):  # until it knows how long steps take
            assert ask(running, prompt=f"warm {number} " * 6, max_tokens=8).status == 200
        yield running


def ask(server: TinyServer, route: str = COMPLETIONS, **body: Any) -> Reply:
    asked = {"model": "tiny", "ignore_eos": True, **body}
    return server.post(route, asked)


def test_an_answer_says_when_it_was_expected(server: TinyServer) -> None:
    found = ask(server, prompt="hello", max_tokens=4)
    assert found.status == 200
    assert int(found.headers["x-paceline-queue-position"]) == 0
    first_ms, end_ms = (int(found.headers[f"x-paceline-predicted-{name}-ms"]) for name in ("ttft", "finish"))
    assert 0 <= first_ms <= end_ms


def test_what_cannot_be_is_refused_and_may_be_tried(server: TinyServer) -> None:
    refused = ask(server, prompt="hello " * 20, max_tokens=100, deadline_ms=1)
    assert (refused.status, refused.code) == (400, "deadline_impossible")
    assert refused.json["error"]["param"] == "deadline_ms"
    tried = ask(server, prompt="hello " * 20, max_tokens=100, deadline_ms=1, on_infeasible="try")
    assert (tried.status, tried.code) == (504, "deadline_exceeded")
    kept = ask(server, prompt="hello", max_tokens=4, deadline_ms=600_000, ttft_slo_ms=600_000)
    assert kept.status == 200


def test_an_estimate_says_the_same_and_runs_nothing(server: TinyServer) -> None:
    before = server.metric("prompt_tokens_total")
    good = ask(server, ESTIMATE, prompt="hello", max_tokens=4)
    assert good.status == 200 and good.json["fits"] and good.json["ttft_ms"] >= 0
    bad = ask(server, ESTIMATE, prompt="hello " * 20, max_tokens=100, deadline_ms=1)
    assert (bad.status, bad.json["fits"], bad.json["code"]) == (200, False, "deadline_impossible")
    assert server.metric("prompt_tokens_total") == before


def test_promises_are_in_the_metrics(server: TinyServer) -> None:
    assert server.metric("predicted_ttft_error_ratio_count") > 0
    assert server.metric("real_ttft_seconds_total") > 0
    assert server.metric("slot_occupancy") >= 0
