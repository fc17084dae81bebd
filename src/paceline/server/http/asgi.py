"""The ASGI application: every request passes here, once, in one order.

Host, route, key, content, body, handler, answer; whatever goes wrong is one problem of the catalogue. Nothing wraps
this, so that a piece of a stream goes from the handler to the connection without a stop. It knows handlers only by
their type.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote

from paceline.server.access.keys_file import DEFAULT_CALLER, Keyring
from paceline.server.access.rate_limits import RateLimits
from paceline.server.api.route import ANTHROPIC_ERRORS, OPENAI_ERRORS, PARAMETER, Route
from paceline.server.call import Answer, Call, Download, Events
from paceline.server.errors import Refusal, problem_of
from paceline.server.http.exchange import (
    CLIENT_CLOSED,
    NO_ROUTE,
    ClientGone,
    Exchange,
    Receive,
    Scope,
    Send,
    send_answer,
    send_events,
    send_file,
    send_problem,
)
from paceline.server.http.request_headers import (
    HostCheck,
    OriginRules,
    check_content,
    is_preflight,
    speaks_anthropic,
    text_headers,
)
from paceline.server.http.strict_json import read_object

# Which route a request means: exact paths first, then templates, on the bytes the client sent.
#
# Nothing is decoded, joined or normalised before the match, so that no spelling of a path can reach a route whose
# rules were checked for another. Only a template's parameters are decoded, after it.


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """A path that exists; `route` is None when it does not take the method."""

    template: str
    route: Route | None
    parameters: Mapping[str, str]
    allowed: tuple[str, ...]


class RouteTable:
    """All routes of a listener."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact: dict[str, list[Route]] = {}
        self._templates: dict[str, tuple[re.Pattern[str], list[Route]]] = {}
        for route in self.routes:
            if PARAMETER.search(route.path):
                entry = self._templates.setdefault(route.path, (_pattern(route.path), []))
                entry[1].append(route)
            else:
                self._exact.setdefault(route.path, []).append(route)

    def match(self, raw_path: bytes, method: str) -> RouteMatch | None:
        """The route of a path as it was sent, or None."""
        path = raw_path.decode("latin-1")
        routes = self._exact.get(path)
        if routes is not None:
            return _chosen(path, routes, method, {})
        for template, (pattern, candidates) in self._templates.items():
            found = pattern.fullmatch(path)
            if found is not None:
                parameters = {name: unquote(value) for name, value in found.groupdict().items()}
                return _chosen(template, candidates, method, parameters)
        return None

    def meant(self, raw_path: bytes) -> str | None:
        """The route that a path which does not exist most likely means: most often a base URL is wrong."""
        path = "/" + "/".join(part for part in raw_path.decode("latin-1").split("/") if part)
        described = [path for path, routes in self._exact.items() if any(route.openapi for route in routes)]
        likely = (OF_OTHER_SERVERS.get(path), path, f"/v1{path}")
        if found := next((route for route in likely if route in described), None):
            return found
        parts = (route for route in described if path.endswith(route) or path.startswith(f"{route}/"))
        return max(parts, key=len, default=None)


def _chosen(template: str, routes: list[Route], method: str, parameters: Mapping[str, str]) -> RouteMatch:
    allowed: list[str] = []
    for route in routes:
        methods = (*route.methods, "HEAD") if "GET" in route.methods else route.methods
        if method in methods:
            return RouteMatch(template, route, parameters, ())
        allowed += methods
    return RouteMatch(template, None, parameters, tuple(dict.fromkeys(allowed)))


def _pattern(template: str) -> re.Pattern[str]:
    parts: list[str] = []
    end = 0
    for found in PARAMETER.finditer(template):
        parts.append(re.escape(template[end : found.start()]))
        parts.append(f"(?P<{found.group(1)}>{'.+' if found.group(2) else '[^/]+'})")
        end = found.end()
    return re.compile("".join(parts) + re.escape(template[end:]))


# What clients of Ollama, llama.cpp and SGLang ask for, and what answers it here.
OF_OTHER_SERVERS = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/completion": "/v1/completions",
    "/generate": "/v1/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/embedding": "/v1/embeddings",
    "/api/tags": "/v1/models",
    "/api/show": "/v1/models",
    "/get_model_info": "/v1/models",
    "/healthz": "/health",
    "/redoc": "/docs",
}
TOO_MANY = 429
PARSED_ON_THE_LOOP_BYTES = 262_144  # larger bodies are parsed beside the event loop


class ExchangeLog(Protocol):
    """Called with how requests ended."""

    def ended(self, exchange: Exchange) -> None: ...

    def failed(self, exchange: Exchange, error: BaseException) -> None:
        """An error of ours, with everything the answer leaves out."""


@dataclass(slots=True, kw_only=True)
class AccessRules:
    """What requests are checked against while the server runs; parts are replaced, never changed."""

    hosts: HostCheck
    origins: OriginRules = field(default_factory=OriginRules)  # of web pages
    keyring: Keyring
    refusal: Callable[[], Refusal | None]  # why no new work is taken, if so
    stream_keep_alive_s: float
    public: frozenset[str] = field(default_factory=frozenset)  # templates that need no key
    rates: RateLimits = field(default_factory=RateLimits)  # kept when keys are replaced


class AsgiApp:
    """Answers requests from a table of routes."""

    def __init__(self, routes: Iterable[Route], rules: AccessRules, log: ExchangeLog) -> None:
        self.table = RouteTable(routes)
        self.rules = rules
        self.exchanges: set[Exchange] = set()
        self._log = log

    def stop_all(self, refusal: Refusal, *, only_unadmitted: bool = False) -> None:
        """End what is under way with an error."""
        for exchange in list(self.exchanges):
            if not (only_unadmitted and exchange.is_admitted):
                exchange.stop(refusal)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send, now_s=time.monotonic())
        self.exchanges.add(exchange)
        try:
            await self._answer(exchange)
        finally:
            exchange.over()
            self.exchanges.discard(exchange)
            self._log.ended(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        # Routes have a shape, but a client that cannot reach its route has to understand the answer too.
        shape = ANTHROPIC_ERRORS if speaks_anthropic(exchange.scope["headers"]) else OPENAI_ERRORS
        exchange.origin_headers = self.rules.origins.answer_headers(exchange.scope["headers"])
        try:
            match = self._match(exchange)
            if match.allowed and is_preflight(exchange.method, exchange.scope["headers"]):
                await self._answer_preflight(exchange, match)
                return
            if match.route is not None and match.route.error_shape == ANTHROPIC_ERRORS:
                shape = ANTHROPIC_ERRORS
            route, call = await self._admit(exchange, match)
            await self._run(exchange, route, call)
        except asyncio.CancelledError:
            refusal = exchange.take_cancellation()
            if exchange.lost:
                exchange.status = CLIENT_CLOSED
            elif refusal is not None:
                await self._send_error(exchange, refusal, shape)
            else:
                raise
        except ClientGone:
            exchange.status = CLIENT_CLOSED
        except Exception as error:
            await self._send_error(exchange, error, shape)

    async def _send_error(self, exchange: Exchange, error: BaseException, shape: str) -> None:
        problem = problem_of(error)
        exchange.error_code = problem.code
        exchange.refused_by = getattr(error, "limit", "")
        if problem.is_ours:
            self._log.failed(exchange, error)
        if problem.status == TOO_MANY and exchange.allowance is not None:
            exchange.allowance.take_back()
        if not exchange.has_begun and not exchange.lost:
            headers = error.headers if isinstance(error, Refusal) else None
            await send_problem(exchange, problem, shape, headers)

    # ------------------------------------------------------------ the order of checks

    def _match(self, exchange: Exchange) -> RouteMatch:
        scope = exchange.scope
        self.rules.hosts.check(scope["headers"], scope["http_version"])
        match = self.table.match(scope["raw_path"], exchange.method)
        if match is not None:
            exchange.route = match.template
            return match
        return RouteMatch(NO_ROUTE, None, {}, ())

    async def _answer_preflight(self, exchange: Exchange, match: RouteMatch) -> None:
        """A browser asks whether a page may send a request. It brings no key, and is told nothing a key is for."""
        headers = self.rules.origins.preflight_headers(exchange.scope["headers"], match.allowed)
        if not headers:
            raise _wrong_method(match)
        await send_answer(exchange, Answer(body=b"", media_type="text/plain", headers=headers))

    async def _admit(self, exchange: Exchange, match: RouteMatch) -> tuple[Route, Call]:
        scope, route = exchange.scope, match.route
        caller = DEFAULT_CALLER
        if match.template not in self.rules.public:
            caller = self.rules.keyring.admit(scope["headers"])
        exchange.tenant, exchange.service_class = caller.tenant, caller.service_class
        if match.template == NO_ROUTE:
            refusal = self.rules.refusal()
            # While the model is loaded its routes are not there yet, and may not be called missing.
            if refusal is not None and refusal.code == "starting":
                raise refusal
            raise Refusal("not_found", _not_found(self.table.meant(scope["raw_path"])))
        if route is None:
            raise _wrong_method(match)
        if route.needs_admin and not caller.is_admin:
            raise Refusal("admin_only")
        headers = text_headers(scope["headers"])
        if route.is_generation:
            refusal = self.rules.refusal()
            if refusal is not None:
                raise refusal
            exchange.allowance = self.rules.rates.open(caller)
            if exchange.allowance is not None:
                exchange.allowance.count_request()
        body = {}
        if route.takes_body:
            check_content(headers)
            data = await exchange.read_body()
            if len(data) > PARSED_ON_THE_LOOP_BYTES:
                body = await asyncio.get_running_loop().run_in_executor(None, read_object, data)
            else:
                body = read_object(data)
        exchange.is_admitted = not route.takes_stream
        call = Call(
            id=exchange.id,
            route=route.path,
            body=body,
            headers=headers,
            caller=caller,
            received_s=exchange.received_s,
            path=match.parameters,
            allowance=exchange.allowance,
            query=scope["query_string"].decode("latin-1"),
            chunks=exchange.body_chunks() if route.takes_stream else None,
        )
        return route, call

    async def _run(self, exchange: Exchange, route: Route, call: Call) -> None:
        if route.takes_body:
            exchange.watch()
        result = await route.handler(call)
        if isinstance(result, Events):
            if not route.takes_body:
                exchange.watch()  # a stream requested without a body ends with its reader too
            await send_events(exchange, result, self.rules.stream_keep_alive_s)
        elif isinstance(result, Download):
            exchange.watch()
            await send_file(exchange, result)
        else:
            await send_answer(exchange, result)


def _wrong_method(match: RouteMatch) -> Refusal:
    allowed = ", ".join(match.allowed)
    return Refusal("method_not_allowed", f"This route takes {allowed}.", headers={"allow": allowed})


def _not_found(meant: str | None) -> str | None:
    if meant is None:
        return None
    base = " A client's base URL ends in /v1." if meant.startswith("/v1/") else ""
    return f"There is no such route; {meant} may be meant, GET /docs lists all.{base}"
