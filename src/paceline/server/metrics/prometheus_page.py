"""/metrics in the text format of Prometheus, from the numbers of `metrics` at the moment of asking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from paceline.process.client import EngineClient
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call
from paceline.server.metrics.batching import BatchingMetrics
from paceline.server.metrics.histogram import buckets
from paceline.server.metrics.requests import (
    HttpMetrics,
    RequestMetrics,
    cache_labels,
    engine_counters,
    engine_gauges,
    promise_families,
)
from paceline.version import __version__

# Name, meaning, value; more gauges and counters than this module knows of.
Facts = Callable[[], Sequence[tuple[str, str, float]]]
# Name, meaning, label and the values by label: gauges whose label is from a closed set.
LabelledFacts = Callable[[], Sequence[tuple[str, str, str, Mapping[str, float]]]]
LABELS = ("model_name", "engine")


class MetricsPage(Collector):
    """Collects everything into one registry of its own."""

    def __init__(
        self,
        client: EngineClient,
        requests: RequestMetrics,
        http: HttpMetrics,
        batching: BatchingMetrics,
        *,
        prefix: str,
        more_gauges: Facts,
        more_counters: Facts,
    ) -> None:
        self.model_name = ""
        self.labelled: LabelledFacts = list
        self._client = client
        self._requests = requests
        self._http = http
        self._batching = batching
        self._prefix = prefix
        self._more = (more_gauges, more_counters)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def route(self) -> Route:
        async def metrics(call: Call) -> Answer:
            return Answer(body=self.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

        openapi = {
            "summary": "Metrics for Prometheus",
            "tags": ["server"],
            "responses": {"200": {"description": "ok"}},
        }
        return Route(methods=("GET",), path="/metrics", handler=metrics, takes_body=False, openapi=openapi)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        yield from self._engine()
        yield from self._generations()
        yield from self._batching.families(self._prefix, self._labels)
        yield from promise_families(self._requests.promises, self._prefix, self._labels)
        yield from self._traffic()

    @property
    def _labels(self) -> tuple[str, str]:
        return (self.model_name, "0")

    def _engine(self) -> Iterable[Metric]:
        more_gauges, more_counters = self._more
        for name, text, value in (*engine_gauges(self._client), *more_gauges()):
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, text, value in (*engine_counters(self._client), *more_counters()):
            yield self._counter(name, text, value)
        build = InfoMetricFamily(self._prefix + "build", "The version that runs.", labels=())
        build.add_metric((), {"version": __version__})
        yield build
        labels = cache_labels(self._client)
        if labels is not None:
            info = InfoMetricFamily(
                self._prefix + "cache_config", "Sizes and types of the KV cache.", labels=LABELS
            )
            info.add_metric(self._labels, labels)
            yield info

    def _generations(self) -> Iterable[Metric]:
        requests = self._requests
        yield self._counter("prompt_tokens", "Tokens of prompts.", requests.prompt_tokens)
        yield self._counter(
            "prompt_tokens_cached", "Tokens of prompts found in the cache.", requests.cached_tokens
        )
        yield self._counter("generation_tokens", "Tokens generated.", requests.generation_tokens)
        name = self._prefix + "request_success"
        ended = CounterMetricFamily(
            name, "Generations by how they ended.", labels=(*LABELS, "finished_reason")
        )
        for reason, count in requests.finished_by_reason.items():
            ended.add_metric((*self._labels, reason), count)
        yield ended
        name, text = self._prefix + "billed_units", "What requests were charged, in the unit of the prices."
        billed = CounterMetricFamily(name, text, labels=(*LABELS, "class"))
        for service_class, nano in requests.billed_nano.items():
            billed.add_metric((*self._labels, service_class), nano / 1e9)
        yield billed
        for name, (text, histogram) in requests.histograms.items():
            family = HistogramMetricFamily(self._prefix + name, text, labels=LABELS)
            family.add_metric(self._labels, *buckets(histogram))
            yield family

    def _traffic(self) -> Iterable[Metric]:
        name = self._prefix + "http_requests"
        family = CounterMetricFamily(name, "Requests by answer.", labels=("handler", "method", "status"))
        for labels, count in self._http.counts.items():
            family.add_metric(labels, count)
        yield family
        yield from self._keys()

    def _keys(self) -> Iterable[Metric]:
        http = self._http
        text = "Requests refused by a limit of their key."
        refused = CounterMetricFamily(
            self._prefix + "requests_refused_by_key_limit", text, labels=("limit", "class")
        )
        for labels, count in http.refused.items():
            refused.add_metric(labels, count)
        yield refused
        for name, text, label, counts in (
            ("api_keys", "Keys that are let in.", "class", http.keys_by_class()),
            ("api_keys_limited", "Keys that have a limit.", "limit", http.keys_by_limit()),
            *self.labelled(),
        ):
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=(label,))
            for value, number in counts.items():
                gauge.add_metric((value,), number)
            yield gauge

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        counter = CounterMetricFamily(self._prefix + name, text, labels=LABELS)
        counter.add_metric(self._labels, value)
        return counter


def name_prefix(given: str) -> str:
    """What names begin with: a word and a colon, as vLLM has it, unless it ends with an underscore."""
    return given if given.endswith(("_", ":")) else given + ":"
