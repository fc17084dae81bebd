"""GET /v1/requests/{id}/explain: why a request waited, gave way or ended, in sentences and in figures."""

from __future__ import annotations

import msgspec

from paceline.server.api.describe import operation
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.service import Service


def explain_routes(service: Service) -> list[Route]:
    async def explain(call: Call) -> Answer | Events:
        found = await service.explanations.explain(call.path["id"], call.caller)
        return Answer(body=msgspec.json.encode(found))

    return [
        Route(
            methods=("GET",),
            path="/v1/requests/{id}/explain",
            handler=explain,
            takes_body=False,
            openapi=operation("Tell the story of one of your requests", parameters=("id",)),
        )
    ]
