"""GET /v1/requests/{id}/explain: why a request waited, gave way or ended, in sentences and in figures."""

from __future__ import annotations

import msgspec

from paceline.server.api.describe import operation
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.explanations import Explanations
from paceline.server.failures import UnknownRequestId
from paceline.server.service import Service

ANY_PATH = "/v1/admin/requests/{number}/explain"
MOST_DIGITS = 18


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
    """The story of whatever the engine knows, by its own number."""

    async def explain_any(call: Call) -> Answer | Events:
        number = call.path["number"]
        if not number.isdecimal() or len(number) > MOST_DIGITS:
            raise UnknownRequestId("the engine's requests have numbers; this is none")
        return Answer(body=msgspec.json.encode(await explanations.explain_number(int(number))))

    return Route(
        methods=("GET",),
        path=path,
        handler=explain_any,
        takes_body=False,
        needs_admin=True,
        openapi=operation("Tell the story of any request by the engine's number", parameters=("number",)),
    )
