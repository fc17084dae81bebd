"""/metrics in the text format of Prometheus, from the numbers of `metrics` at the moment of asking."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from paceline.process.client import EngineClient, EngineState
from paceline.process.fleet.fleet import Fleet
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call
from paceline.server.metrics.batching import BatchingMetrics
from paceline.server.metrics.families import LABELS, Families
from paceline.server.metrics.request_metrics import (
    HttpMetrics,
    RequestFamilies,
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


class ModelFigures(NamedTuple):
    """Where the figures of one model come from."""

    name: str
    client: EngineClient
    requests: RequestFamilies
    batching: BatchingMetrics


class MetricsPage(Collector):
    """Collects everything into one separate registry."""

    def __init__(
        self,
        client: EngineClient,
        requests: RequestFamilies,
        http: HttpMetrics,
        batching: BatchingMetrics,
        *,
        prefix: str,
        more_gauges: Facts,
        more_counters: Facts,
    ) -> None:
        self.model_name = ""
        self.labelled: LabelledFacts = list
        self.models: Sequence[ModelFigures] = ()  # where there are several
        self.fleet = client if isinstance(client, Fleet) else None
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
        own = ModelFigures(self.model_name, self._client, self._requests, self._batching)
        models = self.models or (own,)
        families = [family for model in models for family in self._of_model(model)]
        yield from joined(families) if len(models) > 1 else families
        yield from self._server(Families(self._prefix, self.model_name))

    def _of_model(self, model: ModelFigures) -> Iterable[Metric]:
        make = Families(self._prefix, model.name)
        for fact in engine_gauges(model.client):
            yield make.gauge(*fact)
        for fact in engine_counters(model.client):
            yield make.counter(*fact)
        labels = cache_labels(model.client)
        if labels is not None:
            name, text = self._prefix + "cache_config", "Sizes and types of the KV cache."
            info = InfoMetricFamily(name, text, labels=LABELS)
            info.add_metric((model.name, "0"), labels)
            yield info
        yield from self._generations(make, model.requests)
        yield from model.batching.families(make)
        yield from forecast_families(model.requests.forecasts, make)
        yield from self._adapters(make, model.client)
        if self.fleet is not None:
            yield from fleet_families(self.fleet, make, model.name)

    def _server(self, make: Families) -> Iterable[Metric]:
        more_gauges, more_counters = self._more
        for fact in more_gauges():
            yield make.gauge(*fact)
        for fact in more_counters():
            yield make.counter(*fact)
        build = InfoMetricFamily(self._prefix + "build", "The version that runs.", labels=())
        build.add_metric((), {"version": __version__})
        yield build
        yield from self._traffic(make)

    def _adapters(self, make: Families, client: EngineClient) -> Iterable[Metric]:
        """Where adapters are served. The names are the operator's: a client cannot add to them."""
        stats, known = client.stats.adapters, client.adapters
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
        yield make.gauge_by("lora_requests_info", text, {tuple(labels.values()): time.time()}, *labels)

    def _generations(self, make: Families, requests: RequestFamilies) -> Iterable[Metric]:
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


def joined(families: Iterable[Metric]) -> list[Metric]:
    """One family of each name; samples without the label of a model are added up."""
    found: dict[str, tuple[Metric, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]]] = {}
    for family in families:
        _, samples = found.setdefault(family.name, (family, {}))
        for sample in family.samples:
            key = (sample.name, tuple(sample.labels.items()))
            before = samples.get(key)
            samples[key] = sample if before is None else sample._replace(value=before.value + sample.value)
    for family, samples in found.values():
        family.samples = list(samples.values())
    return [family for family, _ in found.values()]


def name_prefix(given: str) -> str:
    """What names begin with: a word and a colon, as vLLM has it, unless it ends with an underscore."""
    return given if given.endswith(("_", ":")) else given + ":"


def fleet_families(fleet: Fleet, make: Families, model_name: str) -> Iterable[Metric]:
    """Of several engines behind one server; what is their sum stands where one engine's stands."""
    yield make.counter_by("rule", "routed", "Requests by the rule that chose their engine.", fleet.routed)
    text = "Requests whose engine was lost: resumed behind their output, restarted, or given up."
    yield make.counter_by("outcome", "failovers", text, fleet.failovers)
    ready, running, waiting, usage, tokens, restarts = {}, {}, {}, {}, {}, {}
    for member in fleet.members:
        key, stats = (model_name, str(member.number)), member.engine.stats
        ready[key] = float(member.engine.state is EngineState.READY and not member.is_draining)
        running[key], waiting[key] = float(stats.running), float(stats.waiting)
        usage[key] = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        tokens[key], restarts[key] = fleet.output_tokens[member.number], member.num_restarts()
    yield make.gauge("fleet_engine_up", "1 when this engine takes requests.", ready, *LABELS)
    yield make.gauge("fleet_requests_running", "Requests in the batch of this engine.", running, *LABELS)
    yield make.gauge("fleet_requests_waiting", "Requests that wait in this engine.", waiting, *LABELS)
    yield make.gauge("fleet_kv_cache_usage_perc", "Share of its KV blocks in use, 0 to 1.", usage, *LABELS)
    yield make.counter("fleet_generation_tokens", "Tokens generated by this engine.", tokens, *LABELS)
    yield make.counter(
        "fleet_engine_restarts", "Times that this engine was started again.", restarts, *LABELS
    )
