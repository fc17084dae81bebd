"""What was promised and what was kept: predicted against real first tokens, waiting by class, wishes that came true.

Plain numbers that requests add to, and their families for /metrics. Labels come from closed sets: classes of service
and what became of a wish. Belongs to the event loop, like all metrics.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from paceline.server.call import RequestRecord
from paceline.server.goodput import NONE, Goodput, Times
from paceline.server.histogram import E2E_BUCKETS, Histogram, buckets
from paceline.server.tenant import CLASSES, DEFAULT_CLASS

ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
FLOOR_S = 0.2  # a shorter time to the first token is judged as if it were this long
LABELS = ("model_name", "engine")


class PromiseMetrics:
    """Told of first tokens and endings."""

    def __init__(self, times: Times = NONE) -> None:
        self.error = Histogram(ERROR_BUCKETS)
        self.predicted_s = self.real_s = 0.0  # sums over first tokens that were predicted
        self.queued = {name: Histogram(E2E_BUCKETS) for name in CLASSES}
        self.goodput = Goodput(times)

    def first_token(self, record: RequestRecord) -> None:
        said_s = record.predicted_ttft_s
        if said_s is None or record.first_token_s is None:
            return
        seen_s = record.first_token_s - record.received_s
        self.error.observe(abs(said_s - seen_s) / max(seen_s, FLOOR_S))
        self.predicted_s += said_s
        self.real_s += seen_s

    def finished(self, record: RequestRecord) -> None:
        name = record.service_class if record.service_class in self.queued else DEFAULT_CLASS
        if record.queue_s is not None:
            self.queued[name].observe(record.queue_s)
        self.goodput.finished(record)


def promise_families(metrics: PromiseMetrics, prefix: str, labels: tuple[str, str]) -> Iterator[Metric]:
    text = "Error of the predicted time to the first token, as a share of the real one or 200 ms."
    error = HistogramMetricFamily(prefix + "predicted_ttft_error_ratio", text, labels=LABELS)
    error.add_metric(labels, *buckets(metrics.error))
    yield error
    for name, text, value in (
        ("predicted_ttft_seconds", "Sum of predicted times to first tokens that came.", metrics.predicted_s),
        ("real_ttft_seconds", "Sum of the real times of the same first tokens.", metrics.real_s),
    ):
        counter = CounterMetricFamily(prefix + name, text, labels=LABELS)
        counter.add_metric(labels, value)
        yield counter
    text = "From arrival to the first step, by class of service."
    queued = HistogramMetricFamily(prefix + "queue_time_by_class_seconds", text, labels=("class",))
    for name, histogram in metrics.queued.items():
        queued.add_metric((name,), *buckets(histogram))
    yield queued
    text = "Requests that were to have certain times, their own or the server's, by whether they had them."
    goodput = CounterMetricFamily(prefix + "goodput_requests", text, labels=("class", "slo", "result"))
    for key, count in metrics.goodput.counts.items():
        goodput.add_metric(key, count)
    yield goodput
