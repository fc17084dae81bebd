"""One route of the API, as the application mounts it, its description for OpenAPI, and how much one request may ask
for: one table for all routes.

The default limits are what a server accepts at most; an operator may lower them. Counts and sizes only: what values
mean is the business of the fields that use them. Limits of the transport (headers, body, depth) are in `http`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.core.sampling import MAX_BIAS, MAX_BRANCHES, MAX_LOGPROBS, MAX_STOP_IDS, MAX_STOPS, MAX_WORDS
from paceline.errors import ConfigError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The most that a request may hold."""

    branches: int = 8  # n
    prompts: int = 64  # in one request to /v1/completions
    inputs: int = 2_048  # in one request for vectors: texts, or documents of a query
    messages: int = 1_024
    # `max_tokens` up to here is no error, even if it exceeds the context.
    answer_tokens: int = 1_000_000
    # A text longer than this times the context is refused before it is tokenised.
    prompt_chars_per_token: int = 8
    stops: int = 4
    stop_bytes: int = 256
    stop_ids: int = MAX_STOP_IDS
    biases: int = MAX_BIAS
    bad_words: int = MAX_WORDS
    allowed_ids: int = 16_384
    top_logprobs: int = MAX_LOGPROBS
    completion_logprobs: int = 5
    name_chars: int = 256  # names, ids and the like that a request brings along
    cache_salt_chars: int = 128
    metadata_entries: int = 16
    metadata_chars: int = 512
    switches: int = 16  # chat_template_kwargs

    def lowered(self, **changes: int) -> RequestLimits:
        """These limits with some of them lowered. Raises ConfigError for one that is raised, or below 1."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise ConfigError(f"there is no limit {name}; there are {', '.join(known)}")
            if not 1 <= value <= known[name]:
                raise ConfigError(f"the limit {name} can be set from 1 to {known[name]}, not to {value}")
        return RequestLimits(**known | changes)


SERVER_LIMITS = RequestLimits()
# For requests out of an operator's own files: what the engine itself can do.
OWN_LIMITS = RequestLimits(
    branches=MAX_BRANCHES,
    prompts=1_000_000,
    inputs=1_000_000,
    messages=16_384,
    answer_tokens=2**31 - 1,
    prompt_chars_per_token=64,
    stops=MAX_STOPS,
    stop_bytes=1_024,
    allowed_ids=1_000_000,
    completion_logprobs=MAX_LOGPROBS,
)
