"""One line for each request when it ends, and a line of statistics while there is traffic. Counts, never text.

Joins what the ASGI application knows of a request (route, status) with what its generations report (tokens, times),
and feeds both to the metrics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from paceline.process.client import EngineClient
from paceline.server.call import Call
from paceline.server.generate.request_record import RequestRecord
from paceline.server.http.exchange import NO_ROUTE, Exchange
from paceline.server.logs import log
from paceline.server.metrics.request_metrics import HttpMetrics, RequestFamilies

QUIET = frozenset(("/health", "/health/live", "/health/ready", "/health/deep", "/ping", "/metrics"))
NOT_FOUND = 404
LONGEST_PATH = 100  # characters of a path in a line


class RequestLog:
    """The observer of generations and the log of exchanges."""

    def __init__(self, requests: RequestFamilies, http: HttpMetrics, *, writes_lines: bool) -> None:
        self._requests = requests
        self._http = http
        self._writes_lines = writes_lines
        self._ended: dict[str, list[RequestRecord]] = {}  # generations of requests that still run
        self.on_finished: Callable[[RequestRecord], None] = lambda record: None  # called at every end
        self._by_model: Mapping[str, RequestFamilies] = {}
        # Every update passes these checks, without a pause.
        self.first_token = requests.first_token
        self.tokens = requests.tokens

    # ------------------------------------------------------------ generations

    def count_by_model(self, metrics: Mapping[str, RequestFamilies]) -> None:
        """Several models are served: each has figures of its own beside those of all."""
        total = self._requests

        def first_token(record: RequestRecord) -> None:
            metrics[record.model].first_token(record)
            total.first_token(record)

        def tokens(record: RequestRecord, count: int, time_s: float) -> None:
            last_s = record.last_token_s
            metrics[record.model].tokens(record, count, time_s)
            record.last_token_s = last_s
            total.tokens(record, count, time_s)

        self._by_model = metrics
        self.first_token, self.tokens = first_token, tokens

    def started(self, record: RequestRecord) -> None:
        self._requests.started(record)
        if self._by_model:
            self._by_model[record.model].started(record)
        self._ended.setdefault(record.id, [])

    def finished(self, record: RequestRecord) -> None:
        self._requests.finished(record)
        if self._by_model:
            self._by_model[record.model].finished(record)
        self._ended.setdefault(record.id, []).append(record)
        self.on_finished(record)

    # ------------------------------------------------------------ requests

    def ended(self, exchange: Exchange) -> None:
        self._http.count(exchange.route, exchange.method, exchange.status)
        if exchange.refused_by:
            self._http.count_refusal(exchange.refused_by, exchange.service_class)
        records = self._ended.pop(exchange.id, [])
        if not self._writes_lines or exchange.route in QUIET:
            return
        log(f"{exchange.method} {_shown_route(exchange)}", **_facts(exchange, records))

    def failed(self, exchange: Exchange, error: BaseException) -> None:
        log("request failed", level=logging.ERROR, error=error, id=exchange.id, route=exchange.route)

    # ------------------------------------------------------------ calls made in the process

    def call_ended(
        self, call: Call, status: int, code: str, *, line: int | None = None, is_again: bool = False
    ) -> None:
        records = self._ended.pop(call.id, [])
        if not self._writes_lines:
            return
        batch_id = call.caller.batch_id
        facts: dict[str, Any] = {"id": call.id}
        if batch_id:
            facts |= {"batch": batch_id, "line": line}
        facts |= {"status": status, "code": code, "tenant": call.caller.tenant}
        facts["time_s"] = round(time.monotonic() - call.received_s, 4)
        if batch_id:
            facts["again"] = is_again or None
        facts |= _generated(call.received_s, records)
        log(f"{'BATCH' if batch_id else 'TRAFFIC'} {call.route}", **facts)

    def call_failed(self, call: Call, error: BaseException) -> None:
        batch_id = call.caller.batch_id
        where = {"batch": batch_id} if batch_id else {"route": call.route}
        log("request failed", level=logging.ERROR, error=error, id=call.id, **where)


def _shown_route(exchange: Exchange) -> str:
    """The template of the route; of what was not found the path itself, without its query."""
    if exchange.route != NO_ROUTE and exchange.status != NOT_FOUND:
        return exchange.route
    path: bytes = exchange.scope["raw_path"]
    text = path.decode("latin-1")
    return text if len(text) <= LONGEST_PATH else text[: LONGEST_PATH - 3] + "..."


def _facts(exchange: Exchange, records: list[RequestRecord]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "id": exchange.id,
        "status": exchange.status,
        "code": exchange.error_code,
        "tenant": exchange.tenant,
        "time_s": round(time.monotonic() - exchange.received_s, 4),
    }
    if exchange.refused_by:
        facts["limit"] = exchange.refused_by
    return facts | _generated(exchange.received_s, records)


def _generated(received_s: float, records: list[RequestRecord]) -> dict[str, Any]:
    """What the generations of a request tell."""
    facts: dict[str, Any] = {}
    if not records:
        return facts
    first = min((r.first_token_s for r in records if r.first_token_s is not None), default=None)
    facts["finish"] = ",".join(dict.fromkeys(record.finish_reason for record in records))
    facts["prompt"] = sum(record.num_prompt for record in records)
    facts["cached"] = sum(record.num_cached for record in records)
    facts["output"] = sum(record.num_output for record in records)
    facts["ttft_s"] = None if first is None else round(first - received_s, 4)
    queued = [record.queue_s for record in records if record.queue_s is not None]
    facts["queue_s"] = round(max(queued), 4) if queued else None
    facts["preemptions"] = sum(record.preemptions for record in records) or None
    facts["stream"] = any(record.is_stream for record in records)
    return facts


class StatsLine:
    """The line people know from vLLM, written while something happens."""

    def __init__(self, number: int, client: EngineClient, requests: RequestFamilies) -> None:
        self._number = number  # of the model
        self._client = client
        self._requests = requests
        self._last = (time.monotonic(), 0, 0)
        self._was_idle = True

    def write(self) -> None:
        now_s, prompt, output = (
            time.monotonic(),
            self._requests.prompt_tokens,
            self._requests.generation_tokens,
        )
        last_s, last_prompt, last_output = self._last
        self._last = (now_s, prompt, output)
        stats = self._client.stats
        is_idle = prompt == last_prompt and output == last_output and stats.running + stats.waiting == 0
        if is_idle and self._was_idle:
            return
        self._was_idle = is_idle
        elapsed_s = max(1e-9, now_s - last_s)
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        hits = stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0
        preempted = f"Preemptions: {stats.counters.preempted}, " if stats.counters.preempted else ""
        log(
            f"Engine {self._number:03}: Avg prompt throughput: {(prompt - last_prompt) / elapsed_s:.1f} tokens/s, "
            f"Avg generation throughput: {(output - last_output) / elapsed_s:.1f} tokens/s, "
            f"Running: {stats.running} reqs, Waiting: {stats.waiting} reqs, {preempted}"
            f"KV cache usage: {usage:.1%}, Prefix cache hit rate: {hits:.1%}"
        )
