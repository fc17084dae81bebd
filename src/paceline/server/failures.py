"""What can go wrong with one request to the server, beside what `paceline.errors` knows.

Each class carries the `code` of the error catalogue; `errors` gives it a status and a shape. Messages are whole
sentences for the client and never hold the words of an exception from inside.
"""

from __future__ import annotations

from paceline.errors import InvalidRequest, PacelineError, QueueFull
from paceline.server.tenant import CONCURRENCY, PRIORITY


class UnknownParameter(InvalidRequest):
    """A field nobody knows, while fields are read strictly (400)."""

    code = "unknown_parameter"


class UnsupportedParameter(InvalidRequest):
    """A known field with a value that would change the answer, and cannot (400)."""

    code = "unsupported_parameter"


class UnsupportedModality(InvalidRequest):
    """Pictures, sound and files (400)."""

    code = "unsupported_modality"


class ContextTooLong(InvalidRequest):
    """A prompt that leaves no room for an answer (400)."""

    code = "context_length_exceeded"


class UnknownModel(InvalidRequest):
    """The request names another model than the one that is loaded (404)."""

    code = "model_not_found"


class UnknownRequestId(InvalidRequest):
    """Nobody with this key has sent such a request lately (404)."""

    code = "request_not_found"


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
    """A branch ended with an error of ours (500); `code` is internal_error or numerical_error."""

    def __init__(self, message: str, *, code: str = "internal_error") -> None:
        super().__init__(message)
        self.code = code
