"""Operation objects of OpenAPI, out of the tables of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ERROR: dict[str, Any] = {
    "description": "The error object of the OpenAI API, or of the Anthropic API on its routes.",
    "content": {"application/json": {"schema": {"type": "object"}}},
}


def operation(
    summary: str,
    schema: Mapping[str, Any] | None = None,
    *,
    streams: bool = False,
    parameters: tuple[str, ...] = (),
) -> dict[str, Any]:
    """What a route takes and gives, as far as tools want to know."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    described: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "The answer.", "content": content}, "default": ERROR},
    }
    if schema is not None:
        body = {"required": True, "content": {"application/json": {"schema": dict(schema)}}}
        described["requestBody"] = body
    if parameters:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    return described
