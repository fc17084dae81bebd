"""GET /v1/models and /v1/models/{id}: what this server answers for, with the fields of OpenAI and of Anthropic."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from paceline.llm.defaults import described_sampling
from paceline.server.api.describe import operation
from paceline.server.api.openai_requests import checked_model
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.service import Service


class ModelRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def all(self, call: Call) -> Answer | Events:
        cards = [self._card(name) for name in self._service.model.names]
        page = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}  # Anthropic's
        return Answer(body=msgspec.json.encode({"object": "list", "data": cards, **page}))

    async def one(self, call: Call) -> Answer | Events:
        name = checked_model(call.path["id"], self._service.facts)
        return Answer(body=msgspec.json.encode(self._card(name)))

    def _card(self, name: str) -> dict[str, Any]:
        model = self._service.model
        return {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "paceline",
            "root": model.names[0],
            "parent": None,
            "max_model_len": self._service.facts.max_model_len,
            "permission": [],
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(model.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "paceline": {"default_sampling": described_sampling(model.generation)},
        }


def model_routes(service: Service) -> list[Route]:
    routes = ModelRoutes(service)
    return [
        Route(
            methods=("GET", "HEAD"),
            path="/v1/models",
            handler=routes.all,
            takes_body=False,
            openapi=operation("List the models"),
        ),
        Route(
            methods=("GET", "HEAD"),
            path="/v1/models/{id:path}",
            handler=routes.one,
            takes_body=False,
            openapi=operation("Tell about one model", parameters=("id",)),
        ),
    ]
