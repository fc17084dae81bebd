"""Routes of the OpenAI API that are not here: an answer that says so, instead of one that looks like a typing error."""

from __future__ import annotations

from paceline.server.api.route import Route
from paceline.server.call import Answer, Call, Events
from paceline.server.failures import UnsupportedRoute

MISSING = (
    *("/v1/embeddings", "/v1/moderations", "/v1/rerank", "/v1/score", "/v1/classify", "/v1/edits"),
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
    return [Route(methods=METHODS, path=path, handler=refuse_route, takes_body=False) for path in MISSING]
