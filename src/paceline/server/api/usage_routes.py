"""GET /v1/admin/usage: what was used and billed, summed from the ledger, for whoever has an admin key."""

from __future__ import annotations

import asyncio

import msgspec

from paceline.server.api.describe import operation
from paceline.server.api.query import read_query
from paceline.server.api.route import Route
from paceline.server.billing.usage import read_by, read_time, read_usage
from paceline.server.call import Answer, Call, Events
from paceline.server.failures import UnsupportedRoute
from paceline.server.service import Service

USAGE = "/v1/admin/usage"


def usage_routes(service: Service) -> list[Route]:
    async def usage(call: Call) -> Answer | Events:
        ledger = service.counter.ledger_path
        if ledger is None:
            raise UnsupportedRoute("this server keeps no ledger; start it with --ledger FILE")
        asked = read_query(call.query, ("by", "since", "until"))
        by = read_by(asked.get("by", "key"))
        since, until = (
            read_time(asked[name], name) if name in asked else None for name in ("since", "until")
        )
        # A ledger may be long: it is read beside the event loop.
        rows = await asyncio.get_running_loop().run_in_executor(None, read_usage, ledger, by, since, until)
        body = {"object": "usage", "by": by, "since_ms": since, "until_ms": until, "data": rows}
        return Answer(body=msgspec.json.encode(body))

    return [
        Route(
            methods=("GET",),
            path=USAGE,
            handler=usage,
            takes_body=False,
            needs_admin=True,
            openapi=operation("Sum up the ledger: by=key,class,model,day, since=24h, until=DATE"),
        )
    ]
