"""All routes of the API, for the application to mount in this order."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.server.api.admin_routes import admin_routes
from paceline.server.api.anthropic_routes import anthropic_routes
from paceline.server.api.batch_routes import disabled_routes
from paceline.server.api.change_routes import change_routes
from paceline.server.api.estimate_routes import estimate_routes
from paceline.server.api.explain_routes import explain_routes
from paceline.server.api.missing_routes import missing_routes
from paceline.server.api.model_routes import model_routes
from paceline.server.api.openai_fields import CHAT
from paceline.server.api.openai_routes import openai_routes
from paceline.server.api.responses_routes import responses_routes
from paceline.server.api.route import Route
from paceline.server.api.token_routes import token_routes
from paceline.server.api.traffic_routes import traffic_routes
from paceline.server.api.usage_routes import usage_routes
from paceline.server.service import Service

__all__ = ["Route", "routes"]


def routes(service: Service, batches: Sequence[Route] | None = None) -> list[Route]:
    """`batches`: the routes of files and batches, where the server has them."""
    answering = openai_routes(service)
    (chat,) = (route.handler for route in answering if route.path == CHAT)
    return [
        *answering,
        *model_routes(service),
        *token_routes(service),
        *anthropic_routes(service),
        *responses_routes(service),
        *explain_routes(service),
        *admin_routes(service),
        *traffic_routes(service, chat),
        *(disabled_routes() if batches is None else batches),
        *estimate_routes(service),
        *usage_routes(service),
        *change_routes(service),
        *missing_routes(),
    ]
