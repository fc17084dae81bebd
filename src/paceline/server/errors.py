"""The closed catalogue of errors a client can see: code, status, type, message.

Owns how an exception becomes a problem and a problem becomes bytes. The words of an exception reach a client only
where they are ours: those of request errors. Whatever is not in the catalogue is `internal_error`; the log has more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from paceline.core.events import NOT_FINITE
from paceline.errors import (
    DeadlineInfeasible,
    EngineFailed,
    InvalidRequest,
    InvalidTransition,
    NeverFits,
    PacelineError,
    QueueFull,
    SleepRefused,
    UnknownRequest,
)
from paceline.process.client import EngineUnavailable
from paceline.server.access.caller import CONCURRENCY, PRIORITY

# What can go wrong with one request to the server, beside what `paceline.errors` knows. Each class carries the `code`
# of the catalogue below. Messages are whole sentences for the client and never hold the words of an exception from
# inside.


class UnknownParameter(InvalidRequest):
    """An unknown field, while fields are read strictly (400)."""

    code = "unknown_parameter"


class UnsupportedParameter(InvalidRequest):
    """A known field with a value that would change the answer, and cannot (400)."""

    code = "unsupported_parameter"


class ContextTooLong(InvalidRequest):
    """A prompt that leaves no room for an answer (400)."""

    code = "context_length_exceeded"


class UnknownModel(InvalidRequest):
    """The request names another model than the one that is loaded (404)."""

    code = "model_not_found"


class UnknownRequestId(InvalidRequest):
    """No such request was sent with this key lately (404)."""

    code = "request_not_found"


class UnknownContext(InvalidRequest):
    """No context of this key has that id: it was deleted, its time is over, or it never was (404)."""

    code = "context_not_found"


class ContextsFull(QueueFull):
    """A key, or all keys together, keep as many contexts as may be (429)."""

    code = "context_limit_exceeded"


class BlendUnavailable(InvalidRequest):
    """Contexts cannot be copied into a prompt (400)."""

    code = "blend_unavailable"


class RequestEnded(InvalidRequest):
    """A request that was to be changed has ended (409)."""

    code = "request_ended"


class RequestBusy(InvalidRequest):
    """A request cannot be changed at this moment (409)."""

    code = "request_busy"


class UnsupportedRoute(PacelineError):
    """A route of the OpenAI API that this server does not have (404)."""

    code = "unsupported_route"


class NotPermitted(InvalidRequest):
    """The key does not allow what was asked (403, permission_error)."""

    code = "not_permitted"


class PriorityNotPermitted(NotPermitted):
    """A priority above what the key may ask for."""

    limit = PRIORITY


class TooBusy(QueueFull):
    """No place in the queue (429, `Retry-After` from `retry_after_s`)."""

    code = "queue_full"
    retry_after_s: float | None = 1


class ConcurrencyExceeded(TooBusy):
    """This key has as many requests under way as it may have (429)."""

    code = "concurrency_exceeded"
    limit = CONCURRENCY


class RateLimited(TooBusy):
    """This key has asked for as much as it may in a minute (429); `limit` is its name in the keys file."""

    code = "rate_limit_exceeded"

    def __init__(self, limit: str, per_minute: int, *, retry_after_s: int) -> None:
        message = f"the limit {limit} of this key, {per_minute}, is reached; try again in {retry_after_s} s"
        super().__init__(message, retry_after_s=retry_after_s)
        self.limit = limit


class PriceAboveMaximum(TooBusy):
    """A spot request costs more at this moment than it accepts (429); the price follows the load."""

    code = "price_above_maximum"
    retry_after_s = 5

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.param = "max_price"


class LedgerUnavailable(PacelineError):
    """What requests cost cannot be written down, so none are taken (503)."""

    code = "ledger_unavailable"
    retry_after_s = 5


class QueueTimeout(PacelineError):
    """No token came in the time a request may wait for its first (503, `Retry-After`)."""

    code = "queue_timeout"

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PacelineError):
    """The request ran longer than it may (504)."""

    code = "deadline_exceeded"


class GenerationFailed(PacelineError):
    """A branch ended with an error of ours (500); `code` says which."""

    def __init__(self, message: str, *, code: str = "internal_error") -> None:
        super().__init__(message)
        self.code = code


MAX_MESSAGE = 512
MAX_PARAM = 128
LONGEST_RETRY_S = 60  # clients give up on more, and until then a place may be free
INTERNAL = "internal_error"
BAD, AUTH, DENIED, MISSING = (
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
)
LIMITED, OURS = "rate_limit_error", "server_error"


class CatalogueEntry(NamedTuple):
    """One line of the catalogue."""

    status: int
    type: str
    message: str
    retry_after_s: int | None = None


_ENTRIES: Mapping[str, tuple[Any, ...]] = {
    # The connection and the request line.
    "bad_request": (400, BAD, "This is not a valid HTTP request."),
    "bad_version": (505, BAD, "Only HTTP/1.0 and HTTP/1.1 are spoken here."),
    "bad_host": (400, BAD, "The Host header is missing, repeated or not one of this server's names."),
    "request_timeout": (408, BAD, "The request did not arrive in time."),
    "uri_too_long": (414, BAD, "The request line is too long."),
    "headers_too_large": (431, BAD, "The request has too many or too large headers."),
    "body_too_large": (413, BAD, "The request body is too large."),
    "too_many_connections": (503, OURS, "The server has no free connection; try again later.", 1),
    # The route and the caller.
    "not_found": (404, MISSING, "There is no such route; GET /docs lists them."),
    "unsupported_route": (404, MISSING, "This route of the OpenAI API is not supported."),
    "method_not_allowed": (405, BAD, "This route does not take this method."),
    "invalid_api_key": (401, AUTH, "The API key is missing or wrong; send it as Authorization: Bearer KEY."),
    "key_disabled": (403, DENIED, "This API key is disabled."),
    "admin_only": (403, DENIED, "This route needs an admin key; paceline keys add NAME --admin makes one."),
    "not_permitted": (403, DENIED, "This API key does not allow that."),
    # The body.
    "unsupported_media_type": (
        415,
        BAD,
        "The body must be JSON and say so: add -H 'Content-Type: application/json'.",
    ),
    "empty_body": (400, BAD, "The request body is empty; send one JSON object."),
    "invalid_json": (400, BAD, "The request body is not valid JSON."),
    "not_an_object": (400, BAD, "The request body must be one JSON object."),
    "invalid_encoding": (400, BAD, "The request body must be UTF-8 without a byte order mark."),
    "duplicate_key": (400, BAD, "The request body has the same key twice in one object."),
    "too_deep": (400, BAD, "The request body is nested too deeply; 32 levels are allowed."),
    "too_many_keys": (400, BAD, "The request body has too many keys; 64 are allowed."),
    "key_too_long": (400, BAD, "A key of the request body is too long; 256 characters are allowed."),
    "invalid_number": (400, BAD, "Numbers must be finite and at most 4,300 digits long."),
    "invalid_unicode": (400, BAD, "A string of the request body holds half of a surrogate pair."),
    # What is asked for.
    "invalid_value": (400, BAD, "A field of the request is wrong."),
    "unknown_parameter": (400, BAD, "A field of the request is not known."),
    "unsupported_parameter": (400, BAD, "A field of the request is not supported."),
    "grammar_too_complex": (400, BAD, "A schema or grammar is too large, too deep or takes too long."),
    "unsupported_modality": (400, BAD, "Only text is supported."),
    "invalid_image": (400, BAD, "A picture of the request cannot be decoded or is too large."),
    "media_not_allowed": (400, BAD, "This server does not fetch that link."),
    "media_fetch_failed": (400, BAD, "The picture could not be fetched."),
    "blend_unavailable": (400, BAD, "Contexts cannot be blended here; leave context_reuse out."),
    "context_length_exceeded": (400, BAD, "The request is longer than the model's context."),
    "deadline_impossible": (400, BAD, "This machine cannot answer in the time that was asked for."),
    "invalid_adapter": (400, BAD, "The adapter cannot be used with this model."),
    "model_not_found": (404, MISSING, "This model does not exist; GET /v1/models lists what there is."),
    "request_not_found": (404, MISSING, "This key has sent no such request lately."),
    "context_not_found": (
        404,
        MISSING,
        "This key has no such context; GET /v1/contexts lists what there is.",
    ),
    "request_ended": (409, BAD, "This request has ended."),
    "sleep_refused": (409, BAD, "This model cannot be put to sleep."),
    "request_busy": (409, BAD, "This request cannot be changed at this moment; try again.", 1),
    # Files and batches.
    "invalid_multipart": (400, BAD, "The request body is not the form it says it is."),
    "file_not_found": (404, MISSING, "This key has no such file; GET /v1/files lists what there is."),
    "batch_not_found": (404, MISSING, "This key has no such batch; GET /v1/batches lists what there is."),
    "file_in_use": (400, BAD, "A batch that is not over reads this file; cancel it first."),
    "storage_quota_exceeded": (413, BAD, "The files of this key take as much as they may; delete some."),
    "storage_full": (507, OURS, "There is no room left for files and batches; try again later."),
    # Load.
    "rate_limit_exceeded": (429, LIMITED, "Too many requests; try again later.", 1),
    "queue_full": (429, LIMITED, "The queue is full; try again later.", 1),
    "too_many_batches": (429, LIMITED, "This key has too many batches that are not over.", 60),
    "tree_limit_exceeded": (429, LIMITED, "The tree has as many branches or tokens as it may."),
    "context_limit_exceeded": (429, LIMITED, "As many contexts are kept as may be; delete some."),
    "pin_limit_exceeded": (429, LIMITED, "As much is pinned as may be; delete a context."),
    "concurrency_exceeded": (429, LIMITED, "This key has too many requests under way.", 1),
    "price_above_maximum": (429, LIMITED, "The price is above max_price now; try again later.", 5),
    # Us.
    INTERNAL: (500, OURS, "Something went wrong here; the request id is in the header x-request-id."),
    "numerical_error": (500, OURS, NOT_FINITE),
    "grammar_error": (500, OURS, "The answer could not go on as its form demands."),
    "engine_lost_twice": (
        500,
        OURS,
        "Two engines were lost while they had this request; it is not tried again for ten minutes.",
    ),
    "starting": (503, OURS, "The model is being loaded; try again in a moment.", 2),
    "model_unavailable": (
        503,
        OURS,
        "This model could not be woken; an operator can try again: POST /v1/models/{id}/wake.",
        5,
    ),
    "engine_unavailable": (503, OURS, "The engine is not available; try again later.", 5),
    "queue_timeout": (503, OURS, "The request waited too long for its turn; try again later.", 5),
    "shutting_down": (503, OURS, "The server is shutting down; try again later.", 5),
    "ledger_unavailable": (503, OURS, "The ledger cannot be written; no requests are taken.", 5),
    "out_of_memory": (503, OURS, "There is not enough memory for this request now.", 5),
    "deadline_infeasible": (503, OURS, "There is too much to do to answer in the time asked for.", 1),
    "deadline_exceeded": (504, OURS, "The request took longer than it may."),
}
CATALOGUE = {code: CatalogueEntry(*entry) for code, entry in _ENTRIES.items()}

# Whose words are ours and meant for the client.
_SPEAKING = (
    *(InvalidRequest, QueueFull, QueueTimeout, DeadlineExceeded, DeadlineInfeasible),
    *(GenerationFailed, UnsupportedRoute, InvalidTransition, SleepRefused),
    LedgerUnavailable,
)
_ANTHROPIC_TYPES = {413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The answer to a client for an error."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the log should say more than the answer."""
        return self.code == INTERNAL


class Refusal(PacelineError):
    """The HTTP layer refuses a request; `code` is one of the catalogue."""

    def __init__(
        self, code: str, message: str | None = None, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message or CATALOGUE[code].message)
        self.code = code
        self.headers = dict(headers or {})


def problem_of(error: BaseException) -> Problem:
    """The answer to a client for an exception; an unknown one becomes `internal_error`."""
    code = _code_of(error)
    entry = CATALOGUE[code]
    message = str(error) if isinstance(error, (Refusal, *_SPEAKING)) and str(error) else entry.message
    param = getattr(error, "param", None)
    retry_after_s = None if entry.retry_after_s is None else getattr(error, "retry_after_s", None)
    return Problem(
        status=entry.status,
        type=entry.type,
        code=code,
        message=_shortened(message, MAX_MESSAGE),
        param=_shortened(param, MAX_PARAM) if isinstance(param, str) else None,
        retry_after_s=entry.retry_after_s if retry_after_s is None else whole_seconds(retry_after_s),
    )


def whole_seconds(seconds: float) -> int:
    """When to try again: never at once, and not so late that clients give up."""
    return min(max(1, math.ceil(seconds - 1e-9)), LONGEST_RETRY_S)


def openai_body(problem: Problem) -> bytes:
    """The error in the shape of the OpenAI API."""
    error = {
        "message": problem.message,
        "type": problem.type,
        "param": problem.param,
        "code": problem.code,
    }
    return msgspec.json.encode({"error": error})


def openai_error_frame(error: BaseException) -> bytes:
    """An error inside a stream of the OpenAI API."""
    return b"data: %b\n\n" % openai_body(problem_of(error))


def anthropic_body(problem: Problem) -> bytes:
    """The error in the shape of the Anthropic API, which has no param and no code."""
    kind = _ANTHROPIC_TYPES.get(problem.status, "api_error" if problem.type == OURS else problem.type)
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": problem.message}})


def _code_of(error: BaseException) -> str:
    code = getattr(error, "code", None) if isinstance(error, PacelineError) else None
    if isinstance(error, MemoryError):
        return "out_of_memory"
    if isinstance(error, EngineFailed):
        return "engine_unavailable"
    if isinstance(code, str) and code in CATALOGUE:
        return code
    if isinstance(error, EngineUnavailable):
        return "engine_unavailable"
    if isinstance(error, QueueFull):
        return "queue_full"
    if isinstance(error, NeverFits):
        return "context_length_exceeded"
    if isinstance(error, UnknownRequest):
        return "request_not_found"
    if isinstance(error, InvalidTransition):
        return "request_busy"
    return "invalid_value" if isinstance(error, InvalidRequest) else INTERNAL


def _shortened(text: str, limit: int) -> str:
    # Encoded and back: a message may quote a client's words, and those must never fail to be sent.
    clean = text.encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."
