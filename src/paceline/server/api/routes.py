"""All routes of the API, for the application to mount in this order."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.server.api.admin_routes import admin_routes, traffic_routes, usage_routes
from paceline.server.api.anthropic import anthropic_routes
from paceline.server.api.batch_routes import disabled_routes
from paceline.server.api.context_routes import context_routes
from paceline.server.api.fleet_routes import fleet_routes
from paceline.server.api.generation_route import pooled_routes
from paceline.server.api.model_routes import (
    adapter_routes,
    model_routes,
    routes_by_model,
    sleep_routes,
    token_routes,
)
from paceline.server.api.openai_fields import CHAT
from paceline.server.api.openai_routes import openai_routes
from paceline.server.api.request_routes import change_routes, estimate_routes, explain_routes, tree_routes
from paceline.server.api.responses import responses_routes
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.errors import UnsupportedRoute
from paceline.server.generate.service import Service

# Routes of the OpenAI API that are not here: an answer that says so, instead of one that looks like a typing error.


MISSING = (
    *(
        "/v1/moderations",
        "/v1/classify",
        "/v1/edits",
        "/pooling",
        "/embed_all",
        "/embed_sparse",
        "/similarity",
    ),
    *("/v1/audio/{rest:path}", "/v1/images/{rest:path}", "/v1/videos", "/v1/videos/{rest:path}"),
    *("/v1/uploads", "/v1/uploads/{rest:path}", "/v1/fine_tuning/{rest:path}"),
    *("/v1/assistants", "/v1/assistants/{rest:path}", "/v1/threads", "/v1/threads/{rest:path}"),
    *("/v1/vector_stores", "/v1/vector_stores/{rest:path}", "/v1/realtime", "/v1/realtime/{rest:path}"),
    *("/v1/conversations", "/v1/conversations/{rest:path}", "/v1/responses/{rest:path}"),
    *("/v1/messages/batches", "/v1/messages/batches/{rest:path}"),
)
METHODS = ("GET", "POST", "DELETE")


async def refuse_route(call: Call) -> Answer | Events:
    shown = call.route.partition("/{")[0]
    raise UnsupportedRoute(f"{shown} is not supported by this server; GET /docs lists what is")


def missing_routes() -> list[Route]:
    """`openapi` stays empty: what does not exist is not described."""
    return [Route(methods=METHODS, path=path, handler=refuse_route) for path in MISSING]


def routes(
    service: Service, batches: Sequence[Route] | None = None, further: Sequence[Service] = ()
) -> list[Route]:
    """`batches`: the routes of files and batches, where the server has them. `further`: of other models."""
    services = (service, *further)
    return [
        *sleep_routes(services),
        *model_routes(services),
        *adapter_routes(services),
        *context_routes(services),
        *fleet_routes(service),
        *routes_by_model(services, _routes_of_model),
        *(disabled_routes() if batches is None else batches),
        *missing_routes(),
    ]


def _routes_of_model(service: Service) -> list[Route]:
    answering = openai_routes(service)
    (chat,) = (route.handler for route in answering if route.path == CHAT)
    return [
        *answering,
        *pooled_routes(service),
        *token_routes(service),
        *anthropic_routes(service),
        *responses_routes(service),
        *explain_routes(service),
        *admin_routes(service),
        *traffic_routes(service, chat),
        *estimate_routes(service),
        *usage_routes(service),
        *tree_routes(service),
        *change_routes(service),
    ]
