"""Spans of requests for OpenTelemetry, as an extra: made and sent by a separate thread, off by default.

The event loop only puts an ended request into a short queue; when that is full, or the collector does not take what it
is sent, spans are dropped and counted. Names are those of the GenAI conventions, and for times that these do not name,
vLLM's. No text of prompts or answers is in them. OpenTelemetry is imported here alone, and only when it is used.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError
from paceline.server.generate.request_record import RequestRecord
from paceline.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

MOST_QUEUED = 4096  # requests whose span is still to be made
MOST_SENT = 512  # spans at once
COMPLETIONS = "/v1/completions"
TRACES_PATH = "/v1/traces"
_END = None

_logger = logging.getLogger("paceline.server")
Attributes = dict[str, Any]
Send = Callable[[Sequence["ReadableSpan"]], bool]


# A request that ended, its model, and the wall clock's nanoseconds at 0 of the monotonic clock.
_Ended = tuple[RequestRecord, str, int]


class Tracing:
    """Makes and sends spans. `finished` is called by the event loop, everything else happens in a thread."""

    def __init__(self, send: Send) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.num_exported = self.num_dropped = 0  # spans
        self.model_name: Callable[[], str] = lambda: ""
        self._send = send
        self._is_taken = True
        self._queue: queue.Queue[_Ended | None] = queue.Queue(MOST_QUEUED)
        self._ended = InMemorySpanExporter()
        # The environment may name the service, its sampler and its attributes, as OpenTelemetry has it.
        named = Resource.create({"service.version": __version__})
        if str(named.attributes.get("service.name", "")).startswith("unknown_service"):
            named = named.merge(Resource({"service.name": "paceline"}))
        provider = TracerProvider(resource=named, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = provider.get_tracer("paceline", __version__)
        self._thread = threading.Thread(target=self._run, name="paceline-otel", daemon=True)
        self._thread.start()

    def finished(self, record: RequestRecord) -> None:
        """A request has ended. Never waits."""
        zero_ns = time.time_ns() - time.monotonic_ns()
        try:
            self._queue.put_nowait((record, self.model_name(), zero_ns))
        except queue.Full:
            self.num_dropped += 1

    def figures(self) -> list[tuple[str, str, float]]:
        return [
            ("otlp_spans_exported", "Spans a collector has taken.", self.num_exported),
            ("otlp_spans_dropped", "Spans that were not taken.", self.num_dropped),
        ]

    def close(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, for at most this number of seconds."""
        try:
            self._queue.put(_END, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_open = True
        while is_open:
            ended = [self._queue.get()]
            while len(ended) < MOST_SENT and not self._queue.empty():
                ended.append(self._queue.get_nowait())
            is_open = _END not in ended
            self._export([each for each in ended if each is not None])

    def _export(self, ended: Sequence[_Ended]) -> None:
        made = 0
        try:
            for each in ended:
                self._make(each)
            spans = self._ended.get_finished_spans()
            self._ended.clear()
            made = len(spans)
            if spans and self._sent(spans):
                self.num_exported += made
                made = 0
        except Exception:
            _logger.exception("spans could not be made")
            made = max(made, len(ended))
        self.num_dropped += made

    def _sent(self, spans: Sequence[ReadableSpan]) -> bool:
        """Whether a collector took them; a change of that is logged once."""
        is_taken = self._send(spans)
        if is_taken != self._is_taken:
            self._is_taken = is_taken
            what = "takes spans again" if is_taken else "takes no spans; they are dropped until it does"
            _logger.warning("the collector of --otlp-endpoint %s", what)
        return is_taken

    def _make(self, ended: _Ended) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        record, model, zero_ns = ended
        carrier = {"traceparent": record.trace_parent, "tracestate": record.trace_state}
        parent = TraceContextTextMapPropagator().extract(
            {name: value for name, value in carrier.items() if value}
        )
        span = self._tracer.start_span(
            f"{operation(record)} {model}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=_wall_ns(record.received_s, zero_ns),
            attributes=attributes(record, model),
        )
        for name, time_s in moments(record):
            span.add_event(name, timestamp=_wall_ns(time_s, zero_ns))
        if record.finish_reason == "error" or record.error_code:
            span.set_status(Status(StatusCode.ERROR, record.error_code or "error"))
        span.end(_wall_ns(_end_s(record), zero_ns))


def open_tracing(endpoint: str | None) -> Tracing | None:
    """What sends spans to a collector; None where none is wanted. Raises ConfigError."""
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"--otlp-endpoint {endpoint} is no address of a collector; use one like http://localhost:4318"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExportResult
    except ImportError:
        raise ConfigError(
            "--otlp-endpoint needs OpenTelemetry, which is not installed: pip install 'paceline[otel]'"
        ) from None
    # Its own complaints, one for each attempt, would come between the lines of the log.
    theirs = logging.getLogger("opentelemetry")
    theirs.addHandler(logging.NullHandler())
    theirs.propagate = False
    path = "" if parts.path not in ("", "/") else TRACES_PATH
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + path)
    return Tracing(lambda spans: exporter.export(spans) is SpanExportResult.SUCCESS)


# -- what is in a span -------------------------------------------------------------------------------------


def operation(record: RequestRecord) -> str:
    if record.sampling is not None and record.sampling.pooling is not None:
        return "embeddings"
    return "text_completion" if record.route == COMPLETIONS else "chat"


def attributes(record: RequestRecord, model: str) -> Attributes:
    """Facts of a request by the names of the GenAI conventions; no text."""
    found: Attributes = {
        "gen_ai.operation.name": operation(record),
        "gen_ai.provider.name": "paceline",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": record.id,
        "gen_ai.response.finish_reasons": (record.finish_reason,),
        "gen_ai.request.stream": record.is_stream,
        "gen_ai.request.choice.count": record.num_branches,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.usage.input_tokens": record.num_prompt,
        "gen_ai.usage.output_tokens": record.num_output,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached,
        "paceline.class": record.service_class,
        "paceline.preemptions": record.preemptions,
    }
    sampling = record.sampling
    if sampling is not None:
        found["gen_ai.request.temperature"] = sampling.temperature
        found["gen_ai.request.top_p"] = sampling.top_p
        if sampling.top_k > 0:
            found["gen_ai.request.top_k"] = sampling.top_k
        if sampling.seed is not None:
            found["gen_ai.request.seed"] = sampling.seed
    if record.error_code:
        found["error.type"] = record.error_code
    return found | dict(_latencies(record))


def moments(record: RequestRecord) -> Iterator[tuple[str, float]]:
    """When a request's parts began, on the clock of this process."""
    yield "queued", record.received_s
    if record.queue_s is not None:
        yield "prefill", record.received_s + record.queue_s
    if record.first_token_s is not None:
        yield "decode", record.first_token_s


def _latencies(record: RequestRecord) -> Iterator[tuple[str, float]]:
    end_s, first_s = _end_s(record), record.first_token_s
    yield "gen_ai.latency.e2e", end_s - record.received_s
    if first_s is not None:
        yield "gen_ai.latency.time_to_first_token", first_s - record.received_s
        yield "gen_ai.latency.time_in_model_decode", end_s - first_s
    if record.queue_s is not None:
        yield "gen_ai.latency.time_in_queue", record.queue_s
        if first_s is not None:
            yield (
                "gen_ai.latency.time_in_model_prefill",
                max(0.0, first_s - record.received_s - record.queue_s),
            )


def _end_s(record: RequestRecord) -> float:
    return record.received_s if record.finished_s is None else record.finished_s


def _wall_ns(time_s: float, zero_ns: int) -> int:
    return zero_ns + int(time_s * 1e9)
