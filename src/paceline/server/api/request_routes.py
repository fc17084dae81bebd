"""PATCH /v1/requests/{id} and POST /v1/estimate: changing a request under way; when one would be served."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from paceline.errors import InvalidRequest
from paceline.server.api.fields import Field, FieldTable, Flag, Whole, ignored_header, operation
from paceline.server.api.openai_fields import CHAT, COMPLETIONS, LARGEST
from paceline.server.api.openai_requests import BodyParser
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.generate.estimates import estimate_body
from paceline.server.generate.requests import Wish
from paceline.server.generate.service import Service

PATH = "/v1/requests/{id}"
LONGEST_MS = 10**9
TABLE = FieldTable(
    PATH,
    [
        Field(name="priority", kind=Whole(-LARGEST, LARGEST), help="within its class, lower goes first"),
        Field(
            name="deadline_ms",
            kind=Whole(0, LONGEST_MS),
            help="milliseconds from now after which it is ended; 0 for none but the server's own",
        ),
        Field(
            name="paused",
            kind=Flag(),
            help="true: gives its place and memory back and waits; false: goes on at its old place in the order",
        ),
    ],
)


def change_routes(service: Service) -> list[Route]:
    async def change(call: Call) -> Answer | Events:
        given = TABLE.read(call.body, strict=True).fields
        found = await service.changes.change(call.path["id"], call.caller, Wish(**given))
        return Answer(body=msgspec.json.encode(found))

    return [
        Route(
            methods=("PATCH",),
            path=PATH,
            handler=change,
            takes_body=True,
            openapi=operation("Change a request under way", TABLE.schema(), parameters=("id",)),
        )
    ]


# POST /v1/estimate: whether and when a request would be served, without running it.


ESTIMATE = "/v1/estimate"


class EstimateRoute:
    """Takes what /v1/chat/completions and /v1/completions take."""

    def __init__(self, service: Service) -> None:
        self._service = service
        settings = service.settings
        self.chat, self.completions = (
            BodyParser(url, settings.limits, strict=settings.strict_fields) for url in (CHAT, COMPLETIONS)
        )

    async def answer(self, call: Call) -> Answer | Events:
        service = self._service
        service.check_loaded()
        given = call.body
        if not isinstance(given, Mapping) or ("prompt" in given) == ("messages" in given):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        parser = self.chat if "messages" in given else self.completions
        body = parser.parse(given, service.facts)
        if len(body.prompts) > 1:
            raise InvalidRequest("an estimate is of one prompt", param="prompt")
        estimate = await service.estimate(call, body)
        found = estimate_body(body.model, estimate)
        return Answer(body=msgspec.json.encode(found), headers=ignored_header(body.ignored))


def estimate_routes(service: Service) -> list[Route]:
    route = EstimateRoute(service)
    return [
        Route(
            methods=("POST",),
            path=ESTIMATE,
            handler=route.answer,
            takes_body=True,
            openapi=operation(
                "When a request would be served, without running it", route.chat.table.schema()
            ),
        )
    ]
