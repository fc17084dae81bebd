"""The description of the API: /openapi.json, /docs as a page, /version.

The document is made from the routes; routes that only say that they do not exist are not described. Examples come from
`api/examples.json`, which `tools/api_examples.py` records from a real server. The page is a static file without data:
it asks for /openapi.json with the key its user types in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from paceline.server.api.route import Route
from paceline.server.call import Answer, Call
from paceline.server.live.page_files import DOCS, file_handler
from paceline.version import __version__

EXAMPLES_FILE = Path(__file__).parent / "api" / "examples.json"
ADMIN_NOTE = "Needs an admin key where the server has keys."
# The groups of the page, by the beginnings of paths; the first match counts.
TAGS = {
    "generate": ("/v1/chat/", "/v1/completions", "/v1/responses", "/v1/messages"),
    "models and tokens": ("/v1/models", "/tokenize", "/detokenize"),
    "requests": ("/v1/requests", "/v1/estimate"),
    "files and batches": ("/v1/files", "/v1/batches"),
    "admin": ("/v1/admin/",),
    "health": ("/health", "/ping"),
    "server": ("/",),
}
_MEDIA_TYPES = {
    "response": "application/json",
    "stream": "text/event-stream",
    "text": "application/octet-stream",
}


def docs_routes(routes: Callable[[], Sequence[Route]]) -> list[Route]:
    """The routes that describe what `routes` gives at the moment they are asked."""

    async def openapi(call: Call) -> Answer:
        return Answer(body=msgspec.json.encode(openapi_document(routes())))

    async def version(call: Call) -> Answer:
        return Answer(body=msgspec.json.encode({"version": __version__}))

    return [
        _describing("/openapi.json", openapi, "The API as an OpenAPI document"),
        _describing("/docs", file_handler(DOCS), "The API as a page, with a form for every request"),
        _describing("/version", version, "The version of the server"),
    ]


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """The routes as an OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if not route.openapi:
            continue
        path = route.path.replace(":path}", "}")
        operations = paths.setdefault(path, {})
        for method in route.methods:
            tag = next(tag for tag, beginnings in TAGS.items() if path.startswith(beginnings))
            described = {"tags": [tag], "responses": {"200": {"description": "ok"}}}
            described |= dict(route.openapi)
            if route.needs_admin:
                described["description"] = ADMIN_NOTE
            example = _examples().get(f"{method} {path}")
            operations[method.lower()] = described if example is None else _with_example(described, example)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Paceline", "version": __version__},
        "tags": [{"name": tag} for tag in TAGS],
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


@cache
def _examples() -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = msgspec.json.decode(EXAMPLES_FILE.read_bytes())
    return found


def _with_example(operation: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the operation that carries a request and its answers."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(operation))
    content = found["responses"]["200"].setdefault("content", {})
    for name, media_type in _MEDIA_TYPES.items():
        if name in example:
            content.setdefault(media_type, {})["example"] = example[name]
    if "error" in example:
        found["responses"]["default"]["content"]["application/json"]["example"] = example["error"]
    if "request" in example:
        found["requestBody"]["content"]["application/json"]["example"] = example["request"]
    return found


def _describing(path: str, handler: Any, summary: str) -> Route:
    return Route(methods=("GET",), path=path, handler=handler, openapi={"summary": summary})
