"""GET /v1/requests/{id}/explain: why a request waited, was preempted or ended, in sentences and in figures."""

from __future__ import annotations

import msgspec

from paceline.server.api.fields import operation
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.generate.requests import Explanations
from paceline.server.generate.service import Service

ANY_PATH = "/v1/admin/requests/{id}/explain"


def explain_routes(service: Service) -> list[Route]:
    async def explain(call: Call) -> Answer | Events:
        found = await service.explanations.explain(call.path["id"], call.caller)
        return Answer(body=msgspec.json.encode(found))

    return [
        explain_any_route(service.explanations),
        Route(
            methods=("GET",),
            path="/v1/requests/{id}/explain",
            handler=explain,
            takes_body=False,
            openapi=operation("Tell the story of one of your requests", parameters=("id",)),
        ),
    ]


def explain_any_route(explanations: Explanations, path: str = ANY_PATH) -> Route:
    """The story of whatever the engine knows, by its own number or by the id of the answer."""

    async def explain_any(call: Call) -> Answer | Events:
        found = await explanations.explain_any(call.path["id"], call.caller)
        return Answer(body=msgspec.json.encode(found))

    return Route(
        methods=("GET",),
        path=path,
        handler=explain_any,
        takes_body=False,
        needs_admin=True,
        openapi=operation(
            "Tell the story of any request, by its id or the engine's number", parameters=("id",)
        ),
    )
