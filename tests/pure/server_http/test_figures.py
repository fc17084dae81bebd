"""Metrics, log lines and the start card: the right numbers, closed sets, one line each."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paceline.cli.serve.view import LoadingLine, card_lines, engines_line, show_card
from paceline.core.counters import Counters
from paceline.process.child import DEVICES, Place
from paceline.process.client import EngineState, EngineStats
from paceline.process.frames import StillLoading
from paceline.server.generate.request_record import RequestRecord
from paceline.server.http.exchange import NO_ROUTE, Exchange
from paceline.server.logs import FACTS, LogOutput, escaped
from paceline.server.metrics.batching import BatchingMetrics
from paceline.server.metrics.families import Histogram
from paceline.server.metrics.prometheus_page import MetricsPage
from paceline.server.metrics.request_metrics import FINISH_REASONS, HttpMetrics, RequestFamilies
from paceline.server.request_log import RequestLog
from tests.fake_engine import engine_info
from tests.serve_fake import FakeClient


def record(**fields: object) -> RequestRecord:
    made = RequestRecord(id="1", route="/v1/x", tenant="t", received_s=10.0)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def page_of(client: FakeClient, requests: RequestFamilies, http: HttpMetrics) -> MetricsPage:
    batching = BatchingMetrics(client, requests)
    page = MetricsPage(
        client, requests, http, batching, prefix="paceline:", more_gauges=list, more_counters=list
    )
    page.model_name = 'a "model"'
    return page


def samples(page: MetricsPage) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(page.render().decode())
    return {
        (
            sample.name,
            sample.labels.get("le")
            or sample.labels.get("finished_reason")
            or sample.labels.get("outcome")
            or "",
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_histogram_counts_by_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.observe(value)
    histogram.observe(1.2, 3)
    assert histogram.counts == [2, 4, 1]
    assert abs(histogram.total - 9.1) < 1e-9


def test_the_page_shows_what_happened() -> None:
    client, requests, http = FakeClient(), RequestFamilies(), HttpMetrics()
    client.state = EngineState.READY
    one = record(num_prompt=7, num_cached=4, num_output=3, max_tokens=9, queue_s=0.5, finish_reason="length")
    requests.started(one)
    one.first_token_s = 11.0
    requests.first_token(one)
    requests.tokens(one, 1, 100.0)
    requests.tokens(one, 2, 100.5)
    one.finished_s = 12.0
    requests.finished(one)
    http.count("/v1/x", "POST", 200)
    found = samples(page_of(client, requests, http))
    assert found["paceline:num_requests_running", ""] == 2
    assert found["paceline:kv_cache_usage_perc", ""] == 3 / 8
    assert found["paceline:prompt_tokens_total", ""] == 7
    assert found["paceline:generation_tokens_total", ""] == 3
    assert found["paceline:request_success_total", "length"] == 1
    assert found["paceline:request_success_total", "stop"] == 0
    assert found["paceline:time_to_first_token_seconds_sum", ""] == 1.0
    assert found["paceline:inter_token_latency_seconds_count", ""] == 2
    assert found["paceline:inter_token_latency_seconds_bucket", "0.2"] == 0
    assert found["paceline:inter_token_latency_seconds_bucket", "0.3"] == 2
    assert found["paceline:e2e_request_latency_seconds_sum", ""] == 2.0
    assert found["paceline:request_inference_time_seconds_sum", ""] == 1.5
    assert found["paceline:request_prefill_kv_computed_tokens_sum", ""] == 3
    assert requests.under_way == 0


def test_the_page_shows_structures_and_tool_calls() -> None:
    client, requests = FakeClient(), RequestFamilies()
    counters = Counters(masks=5, mask_s=0.25, mask_wait_s=0.125, forced_tokens=3, compiled=2, compile_s=0.5)
    counters.structures = {"complete": 4, "grammar_error": 1}
    client.stats = EngineStats(counters=counters)
    for _ in range(2):
        made = record(finish_reason="stop", tool_calls={"complete": 2, "text": 1})
        requests.started(made)
        requests.finished(made)
    found = samples(page_of(client, requests, HttpMetrics()))
    expected = {"masks": 5, "mask_seconds": 0.25, "forced_tokens": 3, "compiles": 2, "compile_seconds": 0.5}
    expected["mask_wait_seconds"] = 0.125
    assert {name: found[f"paceline:structured_{name}_total", ""] for name in expected} == expected
    outcomes = ("complete", "unfinished", "grammar_error", "grammar_too_complex")
    assert [found["paceline:structured_requests_total", name] for name in outcomes] == [4, 0, 1, 0]
    calls = ("complete", "incomplete", "text")
    assert [found["paceline:tool_calls_total", name] for name in calls] == [4, 0, 2]


def test_gauges_are_read_when_asked() -> None:
    client = FakeClient()
    page = page_of(client, RequestFamilies(), HttpMetrics())
    assert samples(page)["paceline:num_requests_running", ""] == 2
    client.stats = EngineStats(running=0)
    assert samples(page)["paceline:num_requests_running", ""] == 0
    assert samples(page)["paceline:engine_up", ""] == 0


def test_labels_are_closed_sets() -> None:
    requests, http = RequestFamilies(), HttpMetrics()
    for index in range(50):
        made = record(finish_reason=f"odd-{index}")
        requests.started(made)
        requests.finished(made)
        http.count("none", f"ODD{index}", 405)
    assert set(requests.finished_by_reason) == set(FINISH_REASONS)
    assert requests.finished_by_reason["error"] == 50
    assert http.counts == {("none", "other", "405"): 50}


# ---------------------------------------------------------------- logs


def line_of(message: str, *, as_json: bool, **facts: object) -> str:
    stream = io.StringIO()
    output = LogOutput(stream, as_json=as_json)
    made = logging.makeLogRecord({"msg": message, "levelno": logging.INFO, "levelname": "INFO", FACTS: facts})
    output.handle(made)
    output.finish(5.0)
    return stream.getvalue()


def test_a_line_is_always_one_line() -> None:
    evil = "a\nb\x1b[31m\u2028c\x9b"
    text = line_of(evil, as_json=False, name=evil)
    assert text.count("\n") == 1
    assert "\x1b" not in text and "\u2028" not in text and "\x9b" not in text
    found = line_of(evil, as_json=True, name=evil)
    assert found.count("\n") == 1
    assert json.loads(found)["name"] == evil
    assert "\x9b" not in found
    assert escaped("tab\t") == "tab\\x09"


def test_lines_of_text_have_short_ids_and_json_has_whole_ones() -> None:
    name = "0123456789abcdef0123456789abcdef"
    assert line_of("x", as_json=False, id=name, status=200).endswith(" x id=01234567 status=200\n")
    assert json.loads(line_of("x", as_json=True, id=name))["id"] == name


@pytest.mark.parametrize(
    ("route", "status", "shown"),
    [
        (NO_ROUTE, 404, "GET /v1/model%0as"),
        (NO_ROUTE, 503, "GET /v1/model%0as"),
        ("/v1/models/{id:path}", 404, "GET /v1/model%0as"),
        ("/v1/models/{id:path}", 200, "GET /v1/models/{id:path}"),
    ],
)
def test_what_was_not_found_is_named_by_its_path(
    caplog: pytest.LogCaptureFixture, route: str, status: int, shown: str
) -> None:
    async def end() -> None:
        scope = {"method": "GET", "raw_path": b"/v1/model%0as", "query_string": b"key=secret", "headers": []}
        exchange = Exchange(scope, None, None, now_s=0.0)  # type: ignore[arg-type]
        exchange.route, exchange.status = route, status
        RequestLog(RequestFamilies(), HttpMetrics(), writes_lines=True).ended(exchange)

    with caplog.at_level(logging.INFO, logger="paceline"):
        asyncio.run(end())
    assert [line.getMessage() for line in caplog.records] == [shown]


def test_where_an_error_of_the_engine_came_from_is_told_below_its_line() -> None:
    stream = io.StringIO()
    output = LogOutput(stream, as_json=False)
    told = {
        "msg": "row 0 failed",
        "levelno": logging.ERROR,
        "levelname": "ERROR",
        "traceback": "Traceback\n  a\x1b",
    }
    output.handle(logging.makeLogRecord(told))
    output.finish(5.0)
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(" ERROR row 0 failed") and rest == ["    Traceback", "      a\\x1b"]


class Blocked(io.StringIO):
    def write(self, text: str) -> int:
        time.sleep(60)
        return 0


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("gone")


def test_an_output_that_is_gone_or_blocked_costs_lines_only() -> None:
    made = logging.makeLogRecord({"msg": "x", "levelno": logging.INFO})
    gone = LogOutput(Closed(), as_json=False)
    for _ in range(10):
        gone.handle(made)
    gone.finish(5.0)
    assert gone.dropped == 10
    blocked = LogOutput(Blocked(), as_json=False)
    for _ in range(10_100):
        blocked.handle(made)
    assert blocked.dropped >= 99
    blocked.finish(0.01)


# ---------------------------------------------------------------- card


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_is_one_line_on_a_terminal_and_a_line_for_each_stage_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    records = [
        StillLoading(),
        StillLoading("starting torch"),
        StillLoading("starting torch"),
        StillLoading("loading weights", 1, 4),
        StillLoading("loading weights", 4, 4),
        None,
        None,
    ]
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        line = LoadingLine(stream)
        for each in records:
            line.show(each)
    clear = "\r\x1b[2K"
    drawn = terminal.getvalue().split(clear)
    assert drawn == [
        "",
        "starting torch ...",
        f"loading weights {'━' * 7}{'╌' * 23} 1 of 4 layers",
        f"loading weights {'━' * 30} 4 of 4 layers",
        "",
    ]
    assert plain.getvalue() == "starting torch ...\nloading weights ...\n"


@pytest.mark.parametrize(
    ("vectors", "path"), [("384 numbers, mean", "/v1/embeddings"), ("scores of 3 labels", "/classify")]
)
def test_the_card_of_an_encoder_speaks_of_texts(vectors: str, path: str) -> None:
    info = replace(engine_info(), makes_text=False, vectors=vectors)
    lines = dict(
        card_lines(info, version="1", names=("m",), base_url="http://h", metrics_url="", needs_key=False)
    )
    assert lines["texts"] == "of up to 64 tokens, at most 4 at once" and lines["vectors"] == vectors
    assert f"http://h{path} " in lines["try"] and '{"model": "m", "input": ["Hello!"]}' in lines["try"]
    assert not {"KV cache", "concurrency", "chat"} & set(lines)


@pytest.mark.parametrize(
    "cores, devices, told",
    [
        ((1, 1), (), "2 processes, 1 core each; sizes below are of all of them"),
        ((2, 3), (), "2 processes, 2 to 3 cores each; sizes below are of all of them"),
        ((8, 8), ("0", "1"), "2 processes, 8 cores each, GPUs 0, 1; sizes below are of all of them"),
    ],
)
def test_the_card_of_several_engines_says_what_each_has(
    cores: Sequence[int], devices: Sequence[str], told: str
) -> None:
    named: list[dict[str, str]] = [{DEVICES: each} for each in devices] or [{} for _ in cores]
    places = [Place(frozenset(range(count)), each) for count, each in zip(cores, named, strict=True)]
    info = replace(engine_info(), runner={"name": "torch", "threads": 1, "ranks": 2})
    lines = card_lines(
        info,
        version="1",
        names=("m",),
        base_url="http://h",
        metrics_url="",
        needs_key=False,
        further=[engines_line(places)],
    )
    assert [label for label, _ in lines].index("engines") == 2, "before what is summed over them"
    assert dict(lines)["engines"] == told
    assert dict(lines)["ranks"] == "2 processes with a part of each layer, 1 thread each"


def test_the_card_says_what_runs_and_where() -> None:
    lines = card_lines(
        engine_info(),
        version="1",
        names=("m'", "n"),
        base_url="http://h:1",
        metrics_url="http://h:1/metrics",
        needs_key=True,
    )
    plain, boxed = io.StringIO(), Terminal()
    show_card(lines, plain)
    show_card(lines, boxed)
    assert "KV cache: 0 MiB: 7 blocks x 16 = 112 tokens\n" in plain.getvalue()
    assert "concurrency: 1.75x for 64 tokens per request; at most 4 at once\n" in plain.getvalue()
    addresses = [value for _, value in lines if value.startswith("http")]
    assert addresses[0] == "http://h:1/", "the chat is named first"
    assert "live page: http://h:1/ui\n" in plain.getvalue()
    curl = dict(lines)["try"]
    assert "Authorization: Bearer $PACELINE_API_KEY" in curl
    assert "m'\\''" in curl
    assert curl in boxed.getvalue().splitlines()[-2]
    assert boxed.getvalue().startswith(("╭", "paceline"))
