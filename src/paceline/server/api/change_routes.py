"""PATCH /v1/requests/{id}: another priority or deadline for a request under way, or a pause."""

from __future__ import annotations

import msgspec

from paceline.server.api.describe import operation
from paceline.server.api.fields import Field, FieldTable
from paceline.server.api.kinds import Flag, Whole
from paceline.server.api.openai_fields import LARGEST
from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.live_requests import Wish
from paceline.server.service import Service

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
