"""Families of metrics as the Prometheus format wants them, and counts of values by bucket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

LABELS = ("model_name", "engine")

E2E_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class Histogram:
    """Counts of values by bucket."""

    __slots__ = ("bounds", "counts", "largest", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = self.largest = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
        if value > self.largest:
            self.largest = value


def buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """How many values are at most each bound, and their sum."""
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        total += count
        found.append((bound, total))
    return found, histogram.total


# One value, or values by the values of labels.
Values = float | Histogram | Mapping[Any, float] | Mapping[Any, Histogram]


class Families:
    """Makes families under one prefix. Without labels, a family names the model and the engine."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self._prefix = prefix
        self._own = (model_name, "0")

    def gauge(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        """`values` are by the values of the labels."""
        return self._filled(GaugeMetricFamily(self._prefix + name, text, labels=labels or LABELS), values)

    def counter(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(self._prefix + name, text, labels=labels or LABELS), values)

    def histogram(self, name: str, text: str, values: Values, *labels: str) -> Metric:
        return self._filled(HistogramMetricFamily(self._prefix + name, text, labels=labels or LABELS), values)

    def gauge_by(self, name: str, text: str, values: Mapping[tuple[str, ...], float], *labels: str) -> Metric:
        """A gauge of the model and the engine with more labels."""
        return self.gauge(
            name, text, {(*self._own, *of): value for of, value in values.items()}, *LABELS, *labels
        )

    def counter_by(self, label: str, name: str, text: str, counts: Mapping[str, float]) -> Metric:
        """A counter of the model and the engine with one more label."""
        values = {(*self._own, value): count for value, count in counts.items()}
        return self.counter(name, text, values, *LABELS, label)

    def _filled(self, family: Any, values: Values) -> Metric:
        by_labels = values if isinstance(values, Mapping) else {self._own: values}
        for key, value in by_labels.items():
            family.add_metric(key, *(buckets(value) if isinstance(value, Histogram) else (value,)))
        filled: Metric = family
        return filled
