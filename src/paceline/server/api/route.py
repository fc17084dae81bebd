"""One route of the API, as the application mounts it, and its description for OpenAPI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.server.api.fields import FieldTable
from paceline.server.call import Handler

OPENAI_ERRORS, ANTHROPIC_ERRORS = "openai", "anthropic"
PARAMETER = re.compile(r"\{([a-z_]+)(:path)?\}")  # of a path
ERROR: dict[str, Any] = {
    "description": "The error object of the OpenAI API, or of the Anthropic API on its routes.",
    "content": {"application/json": {"schema": {"type": "object"}}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What answers where. `openapi` is the operation object of the path's method; empty: it is not described."""

    methods: tuple[str, ...]
    path: str  # a template, as "/v1/models/{id}"; `{id:path}` takes slashes too
    handler: Handler
    takes_body: bool = False  # one JSON object
    takes_stream: bool = False  # a body of any kind, which the handler reads as it comes
    openapi: Mapping[str, Any] = field(default_factory=dict)
    error_shape: str = OPENAI_ERRORS  # or ANTHROPIC_ERRORS
    needs_admin: bool = False  # shows or changes the server as a whole
    is_generation: bool = False  # whether it makes tokens: what a full or stopping server refuses


def described(
    methods: str, path: str, handler: Handler, summary: str, table: FieldTable | None = None, **more: Any
) -> Route:
    """A route with its operation object. With a table of fields it takes a body; one that generates can stream.

    `methods` are separated by spaces; `more` are fields of `Route`.
    """
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if more.get("is_generation"):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    openapi: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}, "default": ERROR},
    }
    if table is not None:
        schema = {"schema": table.schema()}
        openapi["requestBody"] = {"required": True, "content": {"application/json": schema}}
    if names := [name for name, _ in PARAMETER.findall(path)]:
        openapi["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return Route(
        methods=tuple(methods.split()),
        path=path,
        handler=handler,
        takes_body=table is not None,
        openapi=openapi,
        **more,
    )
