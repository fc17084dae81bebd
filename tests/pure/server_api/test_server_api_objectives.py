"""What requests want of their times, at the API: fields, refusals, endings, and when to come again."""

import asyncio
import time
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from paceline.errors import DeadlineImpossible, DeadlineInfeasible, InvalidRequest, QueueFull
from paceline.process.client import BranchUpdate
from paceline.process.frames import error_of, rejected_with
from paceline.server.access.caller import Caller, Prices
from paceline.server.errors import (
    LONGEST_RETRY_S,
    DeadlineExceeded,
    QueueTimeout,
    TooBusy,
    problem_of,
    whole_seconds,
)
from paceline.server.generate.request_record import RequestRecord, Times
from paceline.server.metrics.request_metrics import ForecastMetrics, is_met
from tests.fake_engine import forecast
from tests.pure.server_api.api_helpers import Api, ending, ids, says

CHAT, COMPLETIONS, ESTIMATE = "/v1/chat/completions", "/v1/completions", "/v1/estimate"
ASKED = {"model": "tiny", "prompt": "abc"}
OBJECTIVES = {"deadline_ms": 9000, "ttft_slo_ms": 700, "itl_slo_ms": 50, "on_infeasible": "try"}
SOON = forecast(0.08, 2.08, ahead=3, num_cached=2, num_output=50.0)


@pytest.mark.parametrize(
    ("route", "body"),
    [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})],
)
def test_objectives_reach_the_engine(route: str, body: dict[str, Any]) -> None:
    api = Api()
    api.ask(route, {"model": "tiny", **body, **OBJECTIVES})
    sampling = api.client.submitted[0]["sampling"]
    assert {name: getattr(sampling, name) for name in OBJECTIVES} == OBJECTIVES
    assert api.listener.records[0].objectives == (9000, 700, 50)


@pytest.mark.parametrize("name", ["deadline_ms", "ttft_slo_ms", "itl_slo_ms"])
@pytest.mark.parametrize("value", [0, -5, 1.5, "100", True, 86_400_001])
@pytest.mark.parametrize("route", [COMPLETIONS, ESTIMATE])
def test_an_objective_that_is_none_is_refused_by_name(name: str, value: Any, route: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Api().ask(route, {**ASKED, name: value})
    assert caught.value.param == name


def test_infeasible_must_be_refused_or_tried() -> None:
    with pytest.raises(InvalidRequest, match="one of refuse, try"):
        Api().ask(COMPLETIONS, {**ASKED, "on_infeasible": "hope"})


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (DeadlineInfeasible("late", param="ttft_slo_ms", retry_after_s=7.2), 503, "deadline_infeasible", 8),
        (DeadlineImpossible("never", param="itl_slo_ms"), 400, "deadline_impossible", None),
        (QueueFull("full", retry_after_s=2.5), 429, "queue_full", 3),
        (QueueFull("full"), 429, "queue_full", 1),
        (QueueTimeout("waited"), 503, "queue_timeout", 5),
        (QueueTimeout("waited", retry_after_s=11.0), 503, "queue_timeout", 11),
        (TooBusy("full", retry_after_s=None), 429, "queue_full", 1),
    ],
)
def test_refusals_cross_the_processes_with_status_reason_and_time(
    error: Any, status: int, code: str, retry: int | None
) -> None:
    crossed = error if isinstance(error, QueueTimeout | TooBusy) else error_of(rejected_with(error, 3))
    problem = problem_of(crossed)
    assert (problem.status, problem.code, problem.retry_after_s) == (status, code, retry)
    assert problem.message == str(error) and problem.param == getattr(error, "param", None)


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.0, 1), (0.3, 1), (1.0, 1), (1.01, 2), (59.5, 60), (1e9, LONGEST_RETRY_S)]
)
def test_when_to_come_again_is_a_whole_number_in_bounds(seconds: float, told: int) -> None:
    assert whole_seconds(seconds) == told


def test_a_full_server_says_when_a_place_comes_free() -> None:
    api = Api(max_queue=1)
    api.client.next_place_s = 4.2
    api.service.facts  # noqa: B018  how many places there are is known once the model is
    places = api.service.admission.capacity.places
    held = [api.service.admission.reserve(Caller(), 1, 0) for _ in range(places)]
    with pytest.raises(TooBusy) as caught:
        api.ask(COMPLETIONS, ASKED)
    assert problem_of(caught.value).retry_after_s == 5
    for permit in held:
        permit.release()
    holder = api.service.admission.reserve(Caller(tenant="a", max_concurrency=1), 1, 0)
    with pytest.raises(TooBusy) as caught:
        api.service.admission.reserve(Caller(tenant="a", max_concurrency=1), 1, 0)
    assert problem_of(caught.value).retry_after_s == 5
    holder.release()


@pytest.mark.parametrize("num_output", [0, 2])
def test_a_request_past_its_own_deadline_ends_with_504(num_output: int) -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        time.sleep(0.005)
        update = BranchUpdate(branch=0, tokens=ids("ab")[:num_output], time_s=1.0)
        update.ending = ending("abort", num_output, detail="deadline")
        return [[update]]

    api = Api(script)
    with pytest.raises(DeadlineExceeded, match=f"deadline_ms of 4 .* {num_output} tokens"):
        api.ask(COMPLETIONS, {**ASKED, "deadline_ms": 4})
    assert problem_of(DeadlineExceeded("x")).status == 504
    with pytest.raises(DeadlineExceeded, match=f"it was given on its way .* {num_output} tokens"):
        api.ask(COMPLETIONS, {**ASKED, "deadline_ms": 60_000})  # changed while it was under way
    assert api.is_at_rest


# -- estimates -----------------------------------------------------------------------------------------------


def test_an_estimate_has_a_price() -> None:
    api = Api()
    api.client.forecast_result = SOON
    prices = Prices(
        prompt=Decimal(2), cached_prompt=Decimal(1), output=Decimal(10), kv_block_second=Decimal(1)
    )
    found = api.ask(ESTIMATE, {**ASKED, "max_tokens": 80}, caller=Caller(prices=prices))
    expected, at_most = found["price"]["expected"], found["price"]["at_most"]
    num_prompt = found["prompt_tokens"]
    assert (found["cached_tokens"], found["expected_tokens"], found["max_tokens"]) == (2, 50, 80)
    assert expected["prompt_nano_units"] == 2000 * (num_prompt - 2)
    assert expected["cached_prompt_nano_units"] == 2000
    assert (expected["output_nano_units"], at_most["output_nano_units"]) == (500_000, 800_000)
    block_seconds = (num_prompt + 25) / api.client.info.block_size * 2.0
    assert expected["kv_nano_units"] == pytest.approx(1e9 * block_seconds, rel=1e-6)
    parts = [expected[f"{name}_nano_units"] for name in ("prompt", "cached_prompt", "output", "kv")]
    assert expected["total_nano_units"] == sum(parts)
    assert at_most["total_nano_units"] == 2000 * num_prompt + 800_000
    assert found["price"]["class_factor"] == 1.0


def test_an_estimate_without_a_forecast_has_the_highest_price_only() -> None:
    api = Api()
    api.client.forecast_result = None
    found = api.ask(ESTIMATE, ASKED, caller=Caller(prices=Prices(output=Decimal(1))))
    assert found["fits"] and found["ttft_ms"] is found["queue_position"] is found["price"]["expected"] is None
    assert found["price"]["at_most"]["total_nano_units"] == 1000 * found["max_tokens"]


def test_an_estimate_says_what_would_be_refused_with_code_and_time() -> None:
    api = Api()

    api.client.forecast_result = DeadlineInfeasible("too late", param="deadline_ms", retry_after_s=12.5)
    found = api.ask(ESTIMATE, {**ASKED, "deadline_ms": 5})
    assert (found["fits"], found["code"], found["param"]) == (False, "deadline_infeasible", "deadline_ms")
    assert (found["reason"], found["retry_after_s"]) == ("too late", 13)


def test_an_estimate_takes_no_place() -> None:
    api = Api()
    api.client.forecast_result = SOON
    for _ in range(50):
        api.ask(ESTIMATE, ASKED)
    assert api.is_at_rest and not api.client.submitted


# -- figures -------------------------------------------------------------------------------------------------


def record(**changes: Any) -> RequestRecord:
    values = {"first_token_s": 11.0, "finished_s": 13.0, "finish_reason": "stop", "num_output": 21}
    return RequestRecord(id="a", route="r", tenant="t", received_s=10.0, **{**values, **changes})


@pytest.mark.parametrize(
    ("objectives", "changes", "kept"),
    [
        ((3000, 1000, 100), {}, True),
        ((2999, None, None), {}, False),
        ((None, 999, None), {}, False),
        ((None, None, 99), {}, False),
        ((None, None, 1), {"num_output": 1}, True),  # there is nothing between one token
        ((None, 1000, None), {"finish_reason": "abort"}, False),
        ((None, 1000, None), {"first_token_s": None}, False),
    ],
)
def test_an_objective_is_kept_when_the_request_ended_well_and_in_time(
    objectives: Any, changes: dict[str, Any], kept: bool
) -> None:
    ended = record(objectives=objectives, **changes)
    assert is_met(ended, ended.objectives) is kept


def test_promises_are_counted_by_class() -> None:
    metrics = ForecastMetrics()
    good = record(
        objectives=(None, 1000, None), service_class="interactive", predicted_ttft_s=1.2, queue_s=0.4
    )
    metrics.first_token(good)
    metrics.finished(good)
    metrics.finished(record(objectives=(1, None, None), service_class="batch"))
    metrics.finished(record())
    counts = metrics.goodput.counts
    assert counts["interactive", "own", "met"] == counts["batch", "own", "missed"] == 1
    assert sum(counts.values()) == 2
    assert (metrics.predicted_s, metrics.real_s) == pytest.approx((1.2, 1.0))
    assert metrics.error.total == pytest.approx(0.2)
    assert sum(metrics.queued["interactive"].counts) == 1


def test_the_server_judges_requests_with_a_reader_by_its_own_times() -> None:
    metrics = ForecastMetrics(Times(ttft_ms=500.0, e2e_ms=5000.0))
    metrics.finished(record())  # its first token took a second
    metrics.finished(record(service_class="batch"))
    metrics.finished(record(service_class="spot"))
    metrics.finished(record(objectives=(None, 1500, None)))  # its own objective comes before the server's
    counts = {key: count for key, count in metrics.goodput.counts.items() if count}
    assert counts == {("standard", "server", "missed"): 1, ("standard", "own", "met"): 1}


def test_answers_note_what_was_predicted() -> None:
    api = Api(says("a", "b"))
    api.client.forecast_result = SOON
    asyncio.run(api.open(COMPLETIONS, ASKED))
    assert api.listener.records[0].predicted_ttft_s == pytest.approx(0.08)


def test_the_server_s_own_limit_is_not_told_as_a_deadline_that_was_given() -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        time.sleep(0.005)
        update = BranchUpdate(branch=0, tokens=ids("ab"), time_s=1.0)
        update.ending = ending("abort", 2, detail="deadline")
        return [[update]]

    api = Api(script)
    api.service.settings = replace(api.service.settings, request_timeout_s=0.004)
    for objective in ({}, {"deadline_ms": 60_000}):
        with pytest.raises(DeadlineExceeded, match="took longer than it may"):
            api.ask(COMPLETIONS, {**ASKED, **objective})
