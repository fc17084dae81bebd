"""What the live page asks an engine for: the feed of its steps, and what it is. For admins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import msgspec

from paceline.config.engine import POLICIES
from paceline.process.client import EngineClient
from paceline.server.api.fields import choice_of, operation, read_query
from paceline.server.api.route import Route
from paceline.server.api.sse import openai_error_frame
from paceline.server.call import Answer, Call, Events, Handler
from paceline.server.live.feed import Feed, latency_bounds
from paceline.server.metrics.requests import RequestMetrics
from paceline.version import __version__


def watch_routes(
    feed: Feed, client: EngineClient, requests: RequestMetrics, model_name: Callable[[], str]
) -> list[Route]:
    async def watch(call: Call) -> Answer | Events:
        with_past = choice_of(read_query(call.query, ("past",)), "past", ("true", "false")) == "true"
        return Events(frames=feed.messages(with_past=with_past), error_frame=openai_error_frame)

    async def about(call: Call) -> Answer | Events:
        values = {
            "version": __version__,
            "model": model_name(),
            "engine": asdict(client.info),
            "policies": POLICIES,
            "latency_bounds": latency_bounds(requests),
        }
        return Answer(body=msgspec.json.encode(values))

    def admin(path: str, handler: Handler, text: str) -> Route:
        return Route(
            methods=("GET",),
            path=path,
            handler=handler,
            takes_body=False,
            needs_admin=True,
            openapi=operation(text),
        )

    return [
        admin(
            "/v1/admin/watch",
            watch,
            "Watch the engine step by step, as server-sent events; ?past=true begins a minute ago",
        ),
        admin("/v1/admin/about", about, "What the engine is: sizes, device, version"),
    ]
