"""A real server as its operator sees it: the key figures of batching, spans of requests, and `paceline top`."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.client_server import ADMIN, COMPLETION, KEY, MODEL, ClientServer, client_server
from tests.e2e.model_cli import run
from tests.pure.server_tracing.collector import Collector

NUM_REQUESTS, NUM_TOKENS = 6, 40
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector | None]:
    try:
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError:
        yield None
        return
    made = Collector()
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: Collector | None) -> Iterator[ClientServer]:
    flags = ["--max-num-seqs", "4", "--slo-ttft-ms", "600000", "--cost-per-hour", "2"]
    if collector is not None:
        flags += ["--otlp-endpoint", collector.url]
    folder = tmp_path_factory.mktemp("server")
    with client_server(folder, *flags, PACELINE_ADMIN_KEY=ADMIN) as running:
        running.wait_for(200)
        threads = [threading.Thread(target=generate, args=(running,)) for _ in range(NUM_REQUESTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        running.wait_until(running.is_idle)
        yield running


def generate(server: ClientServer) -> None:
    body = {**COMPLETION, "prompt": "hello " * 20, "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 7}
    answer = server.ask("POST", "/v1/completions", body, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
    assert answer.status == 200, answer.body


def test_the_engines_totals_agree_with_each_other(server: ClientServer) -> None:
    steps, computed = server.metric("engine_steps_total"), server.metric("engine_computed_tokens_total")
    assert server.metric("generation_tokens_total") == NUM_REQUESTS * NUM_TOKENS
    assert server.metric("iteration_tokens_total_count") == steps
    assert server.metric("iteration_tokens_total_sum") == computed
    cached = server.metric("prefix_cache_hits_total")
    known = server.metric("prefix_cache_queries_total") - cached
    # The last token of an answer is drawn and never computed; a step planned ahead may compute one that is not wanted.
    # Drafts that were right came without being planned.
    done = computed + server.metric("spec_decode_num_accepted_tokens_total")
    assert known + NUM_REQUESTS * (NUM_TOKENS - 1) <= done <= known + NUM_REQUESTS * (NUM_TOKENS + 1)
    assert 0 < server.metric("engine_occupied_rows_total") <= steps * server.metric("engine_max_rows")
    assert server.metric("engine_padding_tokens_total") == 0
    assert server.metric("preemptions_total") == server.metric("num_preemptions_total")
    assert server.metric("request_max_num_generation_tokens_sum") == NUM_REQUESTS * NUM_TOKENS
    assert server.metric("goodput_requests_total") == NUM_REQUESTS


def test_work_follows_from_the_models_shape(server: ClientServer) -> None:
    flops = server.metric("estimated_flops_per_gpu_total")
    assert flops > 2 * server.metric("engine_computed_tokens_total")
    assert server.metric("estimated_read_bytes_per_gpu_total") > 0
    with pytest.raises(AssertionError, match="no metric"):
        server.metric("device_peak_flops")  # not known of a processor


def test_the_last_minute_is_told(server: ClientServer) -> None:
    server.wait_until(lambda: "slot_occupancy_mean" in server.page())
    assert 0 < server.metric("slot_occupancy_mean") <= 1
    assert 0 < server.metric("busy_share") <= 1.5
    assert server.metric("goodput_share") == 1
    assert server.metric("cost_per_million_tokens") > 0
    assert server.metric("cost_per_hour") == 2


def test_promtool_takes_a_real_page(server: ClientServer) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not there; it comes with Debian's package prometheus")
    text = server.page()
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    told = [line for line in (done.stdout + done.stderr).splitlines() if "should not contain ':'" not in line]
    assert len(told) == 1 and "iteration_tokens_total" in told[0]


def test_requests_become_spans_of_their_clients_trace(
    server: ClientServer, collector: Collector | None
) -> None:
    if collector is None:
        pytest.skip("the otel extra is not installed")
    server.wait_until(lambda: len(collector.spans) == NUM_REQUESTS)
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE}
    assert {span.name for span in collector.spans} == {f"text_completion {MODEL}"}
    server.wait_until(lambda: server.metric("otlp_spans_exported_total") == NUM_REQUESTS)
    assert server.metric("otlp_spans_dropped_total") == 0


def top(folder: Path, server: ClientServer, *flags: str, key: str) -> subprocess.CompletedProcess[str]:
    asked = ("top", "--url", server.url, "--once", *flags)
    return run(*asked, cache=folder, PACELINE_ADMIN_KEY=key, COLUMNS="80")


def test_top_shows_the_server(server: ClientServer, tmp_path: Path) -> None:
    done = top(tmp_path, server, "--json", key=ADMIN)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert (found["model"], found["rows"], found["state"]) == (MODEL, 4, "live")
    assert found["finished"] == NUM_REQUESTS and found["running"] == 0
    assert found["latencies_ms"]["ttft"]["p50"] > 0
    shown = top(tmp_path, server, key=ADMIN).stdout
    assert "0 of 4" in shown and max(map(len, shown.splitlines())) <= 80
    refused = top(tmp_path, server, key=KEY)
    assert refused.returncode == 1 and "403" in refused.stderr
