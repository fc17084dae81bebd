"""What was promised and what was kept: predicted against real first tokens, waiting by class, wishes that came true.

Plain numbers that requests add to, and their families for /metrics. Labels come from closed sets: classes of service,
kinds and reasons of preemption. Belongs to the event loop, like all metrics.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from paceline.server.call import RequestRecord
from paceline.server.histogram import E2E_BUCKETS, Histogram, buckets
from paceline.server.tenant import CLASSES, DEFAULT_CLASS
from paceline.serving.client import EngineClient, EngineUnavailable

ERROR_BUCKETS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
FLOOR_S = 0.2  # a shorter time to the first token is judged as if it were this long
LABELS = ("model_name", "engine")


class PromiseMetrics:
    """Told of first tokens and endings."""

    def __init__(self) -> None:
        self.error = Histogram(ERROR_BUCKETS)
        self.predicted_s = self.real_s = 0.0  # sums over first tokens that were predicted
        self.queued = {name: Histogram(E2E_BUCKETS) for name in CLASSES}
        self.wished = dict.fromkeys(CLASSES, 0)
        self.kept = dict.fromkeys(CLASSES, 0)

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
        if any(wish is not None for wish in record.wishes):
            self.wished[name] += 1
            self.kept[name] += is_kept(record)


def is_kept(record: RequestRecord) -> bool:
    """Whether a request ended well and had its first token, its tokens and its end when it wanted them."""
    deadline_ms, ttft_ms, itl_ms = record.wishes
    first_s, end_s = record.first_token_s, record.finished_s
    if record.finish_reason not in ("stop", "length") or first_s is None or end_s is None:
        return False
    gaps = max(1.0, record.num_output / max(1, record.num_branches) - 1.0)
    times = (
        (deadline_ms, end_s - record.received_s),
        (ttft_ms, first_s - record.received_s),
        (itl_ms, (end_s - first_s) / gaps if record.num_output > record.num_branches else 0.0),
    )
    return all(wish is None or seen_s <= wish / 1e3 for wish, seen_s in times)


def promise_families(
    metrics: PromiseMetrics, client: EngineClient, prefix: str, labels: tuple[str, str]
) -> Iterator[Metric]:
    text = "Error of the predicted time to the first token, as a share of the real one or 200 ms."
    error = HistogramMetricFamily(prefix + "predicted_ttft_error_ratio", text, labels=LABELS)
    error.add_metric(labels, *buckets(metrics.error))
    yield error
    for name, text, value in (
        ("predicted_ttft_seconds", "Sum of predicted times to first tokens that came.", metrics.predicted_s),
        ("real_ttft_seconds", "Sum of the real ones of the same.", metrics.real_s),
    ):
        counter = CounterMetricFamily(prefix + name, text, labels=LABELS)
        counter.add_metric(labels, value)
        yield counter
    text = "From arrival to the first step, by class of service."
    queued = HistogramMetricFamily(prefix + "queue_time_by_class_seconds", text, labels=("class",))
    for name, histogram in metrics.queued.items():
        queued.add_metric((name,), *buckets(histogram))
    yield queued
    for name, text, counts in (
        ("requests_with_wishes", "Requests that wanted something of their times.", metrics.wished),
        ("requests_with_wishes_kept", "Those that had it.", metrics.kept),
    ):
        family = CounterMetricFamily(prefix + name, text, labels=("class",))
        for label, count in counts.items():
            family.add_metric((label,), count)
        yield family
    yield from _engine_families(client, prefix, labels)


def _engine_families(client: EngineClient, prefix: str, labels: tuple[str, str]) -> Iterator[Metric]:
    stats = client.stats
    text = "Requests that gave way, by what became of their KV and for what."
    preempted = CounterMetricFamily(prefix + "preemptions", text, labels=("kind", "reason"))
    for rule, count in sorted(stats.preempted_by.items()):
        reason, _, kind = rule.partition(":")
        preempted.add_metric((kind, reason), count)
    yield preempted
    try:
        rows = client.info.max_num_seqs
    except EngineUnavailable:
        rows = 0
    gauges = [("slot_occupancy", "Share of rows in use, 0 to 1.", stats.running / rows if rows else 0.0)]
    if stats.fairness_gap is not None:
        text = "Most that waiting tenants are apart in what they were served for their weight, in tokens."
        gauges.append(("fairness_gap_tokens", text, stats.fairness_gap))
    if stats.next_place_s is not None:
        gauges.append(("next_place_seconds", "Until a request is thought to end.", stats.next_place_s))
    for name, text, value in gauges:
        gauge = GaugeMetricFamily(prefix + name, text, labels=LABELS)
        gauge.add_metric(labels, value)
        yield gauge
