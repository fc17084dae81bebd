"""One route of the API, as the application mounts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.server.call import Handler

OPENAI_ERRORS, ANTHROPIC_ERRORS = "openai", "anthropic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What answers where. `openapi` is the operation object of the path's method."""

    methods: tuple[str, ...]
    path: str  # a template, as "/v1/models/{id}"; `{id:path}` takes slashes too
    handler: Handler
    takes_body: bool  # one JSON object
    takes_stream: bool = False  # a body of any kind, which the handler reads as it comes
    openapi: Mapping[str, Any] = field(default_factory=dict)
    error_shape: str = OPENAI_ERRORS  # or ANTHROPIC_ERRORS
    needs_admin: bool = False  # shows or changes the server as a whole
    is_generation: bool = False  # whether it makes tokens: what a full or stopping server refuses
