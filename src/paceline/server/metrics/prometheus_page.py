"""/metrics in the text format of Prometheus, from the numbers of `metrics` at the moment of asking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from paceline.process.client import EngineClient
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call
from paceline.server.metrics.batching import BatchingMetrics
from paceline.server.metrics.families import LABELS, Families
from paceline.server.metrics.requests import (
    HttpMetrics,
    RequestMetrics,
    cache_labels,
    engine_counters,
    engine_gauges,
    forecast_families,
)
from paceline.version import __version__

# Name, meaning, value; more gauges and counters than this module knows of.
Facts = Callable[[], Sequence[tuple[str, str, float]]]
# Name, meaning, label and the values by label: gauges whose label is from a closed set.
LabelledFacts = Callable[[], Sequence[tuple[str, str, str, Mapping[str, float]]]]


class MetricsPage(Collector):
    """Collects everything into one separate registry."""

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

        summary = {"summary": "Metrics for Prometheus"}
        return Route(methods=("GET",), path="/metrics", handler=metrics, openapi=summary)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        make = Families(self._prefix, self.model_name)
        yield from self._engine(make)
        yield from self._generations(make)
        yield from self._batching.families(make)
        yield from forecast_families(self._requests.forecasts, make)
        yield from self._traffic(make)

    def _engine(self, make: Families) -> Iterable[Metric]:
        more_gauges, more_counters = self._more
        for fact in (*engine_gauges(self._client), *more_gauges()):
            yield make.gauge(*fact)
        for fact in (*engine_counters(self._client), *more_counters()):
            yield make.counter(*fact)
        build = InfoMetricFamily(self._prefix + "build", "The version that runs.", labels=())
        build.add_metric((), {"version": __version__})
        yield build
        yield from self._adapters(make)
        labels = cache_labels(self._client)
        if labels is not None:
            name, text = self._prefix + "cache_config", "Sizes and types of the KV cache."
            info = InfoMetricFamily(name, text, labels=LABELS)
            info.add_metric((self.model_name, "0"), labels)
            yield info

    def _adapters(self, make: Families) -> Iterable[Metric]:
        """Where adapters are served. The names are the operator's: a client cannot add to them."""
        stats, known = self._client.stats.adapters, self._client.adapters
        if not known:
            return
        names = {info.number: name for name, info in known.items()}
        yield make.gauge("adapters", "Adapters that requests may name.", len(known))
        yield make.gauge("adapters_resident", "Adapters in memory.", stats.resident)
        yield make.counter("adapters_read", "Adapters read again because a request needed them.", stats.read)
        yield make.counter("adapters_evicted", "Adapters evicted to make a place for others.", stats.evicted)
        labels = {
            "max_lora": str(stats.most or len(known)),
            "running_lora_adapters": ",".join(sorted(names[each] for each in stats.running if each in names)),
            "waiting_lora_adapters": ",".join(sorted(names[each] for each in stats.waiting if each in names)),
        }
        text = "Adapters of running and waiting requests; the value is the time."
        yield make.gauge("lora_requests_info", text, {tuple(labels.values()): time.time()}, *labels)

    def _generations(self, make: Families) -> Iterable[Metric]:
        requests = self._requests
        yield make.counter("prompt_tokens", "Tokens of prompts.", requests.prompt_tokens)
        text = "Tokens of prompts found in the cache."
        yield make.counter("prompt_tokens_cached", text, requests.cached_tokens)
        yield make.counter("generation_tokens", "Tokens generated.", requests.generation_tokens)
        text = "Generations by how they ended."
        yield make.counter_by("finished_reason", "request_success", text, requests.finished_by_reason)
        text = "Tool calls in answers: complete; incomplete: cut off or no JSON object; text: it only looked like one."
        yield make.counter_by("outcome", "tool_calls", text, requests.tool_calls)
        text = "What requests were charged, in the unit of the prices."
        billed = {name: nano / 1e9 for name, nano in requests.billed_nano.items()}
        yield make.counter_by("class", "billed_units", text, billed)
        for name, (text, histogram) in requests.histograms.items():
            yield make.histogram(name, text, histogram)

    def _traffic(self, make: Families) -> Iterable[Metric]:
        http = self._http
        text, labels = "Requests by answer.", ("handler", "method", "status")
        yield make.counter("http_requests", text, http.counts, *labels)
        text = "Requests refused by a limit of their key."
        yield make.counter("requests_refused_by_key_limit", text, http.refused, "limit", "class")
        for name, text, label, counts in (
            ("api_keys", "Keys that are let in.", "class", http.keys_by_class()),
            ("api_keys_limited", "Keys that have a limit.", "limit", http.keys_by_limit()),
            *self.labelled(),
        ):
            yield make.gauge(name, text, {(value,): number for value, number in counts.items()}, label)


def name_prefix(given: str) -> str:
    """What names begin with: a word and a colon, as vLLM has it, unless it ends with an underscore."""
    return given if given.endswith(("_", ":")) else given + ":"
