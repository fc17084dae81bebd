"""The application: which routes there are, on which listener, and what they share.

The one file of the server that knows all its parts. Before the model is loaded only probes and descriptions are
there; `open_api` adds the API when the engine and the tokenizer are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from paceline.config.server import LOOPBACK, ServerConfig, split_list
from paceline.errors import ConfigError
from paceline.process.client import EngineClient
from paceline.server.access.caller import Caller
from paceline.server.access.keys_file import Keyring
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call
from paceline.server.errors import Refusal
from paceline.server.generate.request_record import Times
from paceline.server.generate.requests import RecentRequests
from paceline.server.health import PUBLIC, ServerStatus, health_routes
from paceline.server.http.asgi import AccessRules, AsgiApp, RouteTable
from paceline.server.http.listener import Listener
from paceline.server.http.request_headers import HostCheck, OriginRules
from paceline.server.live.feed import WatchedModel, feeds_of, watch_routes
from paceline.server.live.page_files import DOCS, PAGE, file_handler, page_routes
from paceline.server.metrics.batching import BatchingMetrics
from paceline.server.metrics.prometheus_page import (
    Facts,
    LabelledFacts,
    MetricsPage,
    ModelFigures,
    name_prefix,
)
from paceline.server.metrics.request_metrics import HttpMetrics, RequestFamilies
from paceline.server.request_log import RequestLog, StatsLine
from paceline.version import __version__

METRICS = frozenset(("/metrics",))


class Background(Protocol):
    """Something that works beside the requests, as long as the server serves."""

    def start(self) -> None: ...

    def drain(self) -> None:
        """The server is about to stop: begin nothing more."""

    async def stop(self) -> None:
        """End in a moment, whatever is under way."""


class ModelPart(NamedTuple):
    """One model behind the API."""

    name: str
    share: float  # of the device's time, against those of the others
    client: EngineClient
    recent: RecentRequests


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """What is there once a model is loaded."""

    routes: Sequence[Route]
    model_name: str  # of the first
    models: Sequence[ModelPart] = ()  # all of them
    is_full: Callable[[], bool] = lambda: False
    gauges: Facts = list  # more than the application knows of
    labelled: LabelledFacts = list
    background: Sequence[Background] = ()
    large_bodies: Mapping[bytes, int] = field(default_factory=dict)  # paths to which more bytes may be posted
    close: Callable[[], None] = lambda: None


class Application:
    """The ASGI applications of a server and everything behind them but the API itself."""

    def __init__(self, config: ServerConfig, client: EngineClient, keyring: Keyring) -> None:
        self.status = ServerStatus(client)
        observe = config.observe
        slo = (observe.slo_e2e_ms, observe.slo_ttft_ms, observe.slo_itl_ms)
        self.requests = RequestFamilies(Times(*slo))
        self.http = HttpMetrics()
        self.http.callers = keyring.callers
        self.log = RequestLog(self.requests, self.http, writes_lines=not config.disable_log_requests)
        self.dropped_lines: Callable[[], int] = lambda: 0
        self.more_counters: Facts = list
        self.listeners: list[Listener] = []
        self.loop_lag_s = 0.0  # kept by the lifecycle
        # Told the tenants' shares when the API is there and whenever keys are read again: for a fair scheduler.
        self.on_weights: Callable[[Mapping[str, float]], None] = lambda weights: None
        self._api_gauges: Facts = list
        self.batching = BatchingMetrics(client, self.requests, cost_per_hour=config.observe.cost_per_hour)
        self.metrics = MetricsPage(
            client,
            self.requests,
            self.http,
            self.batching,
            prefix=name_prefix(config.metrics_prefix),
            more_gauges=self._gauges,
            more_counters=self._counters,
        )
        self._config = config
        self.models = [WatchedModel("", 1.0, client, self.requests, feeds_of(client, self.requests))]
        self.stats_lines: list[StatsLine] = []
        self._own = [
            *health_routes(self.status),
            *docs_routes(lambda: self.main.table.routes),
            *watch_routes(lambda: self.models),
            *page_routes(),
        ]
        if config.metrics_port is None:
            self._own.append(self.metrics.route())
        bound = "localhost" if config.uds is not None else config.host
        public = PUBLIC | PAGE | (METRICS if config.metrics_without_key else frozenset())
        self.main = AsgiApp(self._own, self._rules(bound, keyring, public), self.log)
        self.side = self._side_app(keyring) if config.metrics_port is not None else None

    @property
    def apps(self) -> list[AsgiApp]:
        return [self.main] if self.side is None else [self.main, self.side]

    def become_ready(self, api: Api) -> None:
        """The API is there: from now on requests are taken."""
        self.metrics.model_name = api.model_name
        self.models = [self.models[0]._replace(name=api.model_name)]
        if len(api.models) > 1:
            self._count_by_model(api.models)
        for model, part in zip(self.models, api.models, strict=False):
            part.recent.keeps_words = self.may_show_prompts
            for feed in model.feeds:
                feed.recent, feed.models = part.recent, self.models
        self.status.is_full = api.is_full
        self._api_gauges = api.gauges
        self.metrics.labelled = api.labelled
        self.stats_lines = [
            StatsLine(number, model.client, model.requests) for number, model in enumerate(self.models)
        ]
        self.note()  # what comes from now on is new
        self.main.table = RouteTable([*api.routes, *self._own])
        self.on_weights(self.main.rules.keyring.weights)

    def note(self) -> None:
        """To be called about once a second, for figures of the last minute."""
        self.batching.recent.note()
        for model in self.metrics.models[1:]:
            model.batching.recent.note()

    def _count_by_model(self, parts: Sequence[ModelPart]) -> None:
        observe = self._config.observe
        slo = Times(observe.slo_e2e_ms, observe.slo_ttft_ms, observe.slo_itl_ms)
        figures, models = [], []
        for place, part in enumerate(parts):
            requests = RequestFamilies(slo)
            batching = BatchingMetrics(part.client, requests) if place else self.batching
            figures.append(ModelFigures(part.name, part.client, requests, batching))
            feeds = feeds_of(part.client, requests)
            models.append(WatchedModel(part.name, part.share, part.client, requests, feeds))
        self.metrics.models, self.models = figures, models
        self.log.count_by_model({each.name: each.requests for each in figures})

    def replace_keys(self, keyring: Keyring) -> None:
        """Other keys from now on. What is under way keeps the rights it came with."""
        for app in self.apps:
            app.rules.keyring = keyring
            app.rules.rates.keep_only(keyring.weights)
        self.http.callers = keyring.callers
        self.on_weights(keyring.weights)
        if not self.may_show_prompts():
            for model in self.models:
                for feed in model.feeds:
                    feed.past.clear()

    def may_show_prompts(self) -> bool:
        """Whether the live page may show the first words of prompts."""
        choice = self._config.observe.show_prompts
        is_private = self._config.is_loopback and not len(self.main.rules.keyring)
        return choice == "always" or (choice == "auto" and is_private)

    def caller_of(self, tenant: str) -> Caller | None:
        """What the key of a tenant allows now; None when it is not let in."""
        return self.main.rules.keyring.caller_of(tenant)

    @property
    def num_under_way(self) -> int:
        return sum(exchange.is_admitted for exchange in self.main.exchanges)

    def stop_all(self, *, only_unadmitted: bool = False) -> None:
        for app in self.apps:
            app.stop_all(Refusal("shutting_down"), only_unadmitted=only_unadmitted)

    def _side_app(self, keyring: Keyring) -> AsgiApp:
        host = self._config.metrics_host
        routes = [self.metrics.route(), *health_routes(self.status)]
        # Every process of this machine may read numbers on a loopback port; from elsewhere a key is needed.
        is_open = self._config.metrics_without_key or is_loopback(host)
        public = PUBLIC | METRICS if is_open else PUBLIC
        return AsgiApp(routes, self._rules(host, keyring, public), self.log)

    def _rules(self, bound: str, keyring: Keyring, public: frozenset[str]) -> AccessRules:
        return AccessRules(
            hosts=HostCheck.of(bound, split_list(self._config.allowed_hosts)),
            origins=OriginRules.of(split_list(self._config.allowed_origins)),
            keyring=keyring,
            refusal=self.status.refusal,
            stream_keep_alive_s=self._config.stream_keep_alive_s,
            public=public,
        )

    def _gauges(self) -> list[tuple[str, str, float]]:
        connections = sum(listener.num_connections for listener in self.listeners)
        return [
            ("http_connections", "Open connections.", connections),
            ("http_requests_under_way", "Requests being answered.", len(self.main.exchanges)),
            ("generations_under_way", "Generations between start and end.", self.requests.under_way),
            ("event_loop_lag_seconds", "The latest the event loop was in ten seconds.", self.loop_lag_s),
            *self._api_gauges(),
        ]

    def _counters(self) -> list[tuple[str, str, float]]:
        counts = [listener.counts for listener in self.listeners]
        return [
            ("connections_refused", "Refused before a route was known.", sum(c.refused for c in counts)),
            ("connections_stalled", "Cut because nothing was read.", sum(c.stalled for c in counts)),
            ("connections_timed_out", "Requests that came too slowly.", sum(c.timed_out for c in counts)),
            ("log_lines_dropped", "Lines the log's output did not take.", self.dropped_lines()),
            *self.more_counters(),
        ]


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def check_exposure(config: ServerConfig, keyring: Keyring) -> None:
    """Refuse to open a server to others without a key."""
    if len(keyring):
        return
    hint = "set --api-keys-file or PACELINE_API_KEY (see SECURITY.md), or listen on 127.0.0.1"
    if not config.is_loopback:
        raise ConfigError(f"--host {config.host} lets other machines in, which needs a key: {hint}")
    is_exposed = config.metrics_port is not None and not is_loopback(config.metrics_host)
    if is_exposed and not config.metrics_without_key:
        raise ConfigError(f"--metrics-host {config.metrics_host} lets other machines in: {hint}")


# The description of the API: /openapi.json, /docs as a page, /version.
#
# The document is made from the routes; routes that only say that they do not exist are not described. Examples come
# from `api/examples.json`, which `tools/api_examples.py` records from a real server. The page is a static file
# without data: it asks for /openapi.json with the key its user types in.


EXAMPLES_FILE = Path(__file__).parent / "api" / "examples.json"
ADMIN_NOTE = "Needs an admin key where the server has keys."
# The groups of the page, by the beginnings of paths; the first match counts.
TAGS = {
    "generate": ("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages"),
    "vectors": (
        *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/v1/score"),
        *("/embed", "/rerank", "/score", "/classify", "/predict"),
    ),
    "models and tokens": ("/v1/models", "/tokenize", "/detokenize"),
    "contexts": ("/v1/contexts",),
    "requests": ("/v1/requests", "/v1/estimate"),
    "files and batches": ("/v1/files", "/v1/batches"),
    "admin": ("/v1/admin/",),
    "health": ("/health", "/ping"),
    "server": ("/",),
}
_MEDIA_TYPES = {
    "response": "application/json",
    "stream": "text/event-stream",
    "text": "application/octet-stream",
}


def docs_routes(routes: Callable[[], Sequence[Route]]) -> list[Route]:
    """The routes that describe what `routes` gives at the moment they are asked."""

    async def openapi(call: Call) -> Answer:
        return Answer(body=msgspec.json.encode(openapi_document(routes())))

    async def version(call: Call) -> Answer:
        return Answer(body=msgspec.json.encode({"version": __version__}))

    return [
        _describing("/openapi.json", openapi, "The API as an OpenAPI document"),
        _describing("/docs", file_handler(DOCS), "The API as a page, with a form for every request"),
        _describing("/version", version, "The version of the server"),
    ]


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """The routes as an OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not route.openapi:
            continue
        path = route.path.replace(":path}", "}")
        operations = paths.setdefault(path, {})
        for method in route.methods:
            tag = next(tag for tag, beginnings in TAGS.items() if path.startswith(beginnings))
            described = {"tags": [tag], "responses": {"200": {"description": "ok"}}}
            described |= dict(route.openapi)
            if route.needs_admin:
                described["description"] = ADMIN_NOTE
            example = _examples().get(f"{method} {path}")
            operations[method.lower()] = described if example is None else _with_example(described, example)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__},
        "tags": [{"name": tag} for tag in TAGS],
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


@cache
def _examples() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = msgspec.json.decode(EXAMPLES_FILE.read_bytes())
    return found


def _with_example(operation: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the operation that carries a request and its answers."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(operation))
    content = found["responses"]["200"].setdefault("content", {})
    for name, media_type in _MEDIA_TYPES.items():
        if name in example:
            content.setdefault(media_type, {})["example"] = example[name]
    if "error" in example:
        found["responses"]["default"]["content"]["application/json"]["example"] = example["error"]
    if "request" in example:
        found["requestBody"]["content"]["application/json"]["example"] = example["request"]
    return found


def _describing(path: str, handler: Any, summary: str) -> Route:
    return Route(methods=("GET",), path=path, handler=handler, openapi={"summary": summary})
