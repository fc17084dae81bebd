"""Spans of requests: what is in them, where they go, and what becomes of them when no collector takes them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from paceline.core.sampling import SamplingParams
from paceline.errors import ConfigError
from paceline.server.generate.request_record import RequestRecord
from paceline.server.metrics import tracing as module
from paceline.server.metrics.tracing import Tracing, attributes, open_tracing
from tests.pure.server_tracing.collector import Collector
from tests.waiting import wait_until

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the otel extra is not installed")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BOUND_S = 30.0


def record(**fields: Any) -> RequestRecord:
    now_s = time.monotonic()
    made = RequestRecord(
        id="chatcmpl-1",
        route="/v1/chat/completions",
        tenant="alice",
        received_s=now_s - 3.0,
        num_prompt=7,
        num_cached=4,
        num_output=5,
        max_tokens=9,
        queue_s=0.5,
        first_token_s=now_s - 2.0,
        finished_s=now_s,
        finish_reason="stop",
        sampling=SamplingParams(temperature=0.5, top_k=3, seed=11),
    )
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def values(span: Any) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        found[each.key] = getattr(each.value, kind)
    return found


def test_a_request_becomes_a_span_of_its_clients_trace(collector: Collector) -> None:
    tracing = open_tracing(collector.url)
    assert tracing is not None
    tracing.model_name = lambda: "a-model"
    tracing.finished(record(trace_parent=f"00-{TRACE}-{PARENT}-01", trace_state="vendor=1"))
    tracing.close(BOUND_S)
    assert collector.paths == ["/v1/traces"]
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "chat a-model" and span.kind == 2
    found = values(span)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.usage.input_tokens"] == 7 and found["gen_ai.usage.output_tokens"] == 5
    assert found["gen_ai.request.temperature"] == 0.5 and found["gen_ai.request.seed"] == 11
    assert found["gen_ai.latency.time_in_queue"] == 0.5
    assert found["gen_ai.latency.e2e"] == pytest.approx(3.0)
    names = [event.name for event in span.events]
    assert names == ["queued", "prefill", "decode"]
    times = [
        span.start_time_unix_nano,
        *(event.time_unix_nano for event in span.events),
        span.end_time_unix_nano,
    ]
    assert times == sorted(times)
    assert abs(span.end_time_unix_nano / 1e9 - time.time()) < BOUND_S + 5
    assert tracing.num_exported == 1 and tracing.num_dropped == 0


def test_a_trace_its_client_does_not_sample_gets_no_span(collector: Collector) -> None:
    tracing = open_tracing(collector.url + "/custom/path")
    assert tracing is not None
    tracing.finished(record(trace_parent=f"00-{TRACE}-{PARENT}-00"))
    tracing.finished(
        record(trace_parent="not a trace", route="/v1/completions", error_code="numerical_error")
    )
    tracing.close(BOUND_S)
    assert collector.paths == ["/custom/path"]
    (span,) = collector.spans
    assert span.name.startswith("text_completion") and span.status.code == 2
    assert span.parent_span_id == b"" and values(span)["error.type"] == "numerical_error"


def test_no_text_and_no_tenant_is_in_a_span() -> None:
    assert not any("alice" in str(value) for value in attributes(record(), "m").values())


def test_spans_that_are_not_taken_are_counted_and_never_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MOST_QUEUED", 8)
    entered, go_on = threading.Event(), threading.Event()

    def stuck(spans: Sequence[Any]) -> bool:
        entered.set()
        assert go_on.wait(BOUND_S)
        return False

    caplog.set_level("WARNING", logger="paceline.server")
    tracing = Tracing(stuck)
    tracing.finished(record())
    assert entered.wait(BOUND_S)
    for _ in range(20):  # the collector hangs: none of these calls may
        tracing.finished(record())
    assert tracing.num_dropped == 12
    go_on.set()
    wait_until(lambda: tracing.num_dropped == 21)
    tracing.close(BOUND_S)
    assert {name: value for name, _, value in tracing.figures()} == {
        "otlp_spans_exported": 0,
        "otlp_spans_dropped": 21,
    }
    assert caplog.text.count("takes no spans") == 1


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x/", "http://"])
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint"):
        open_tracing(endpoint)


def test_nothing_is_imported_when_it_is_off() -> None:
    code = (
        "import sys, paceline.cli.serve.run; from paceline.server.metrics.tracing import open_tracing; "
        "assert open_tracing(None) is None; sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0
