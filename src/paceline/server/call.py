"""What a route is given and what it gives back, without a word of HTTP plumbing.

`http` makes a `Call` of a request that has passed every limit, and turns what the handler returns or raises into
bytes. A handler never sees a socket and never builds an error body.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.core.request import NO_COST, Cost
from paceline.core.sampling import SamplingParams
from paceline.server.billing.charge import Charge, no_charge
from paceline.server.tenant import DEFAULT_CLASS, FREE, Prices

if TYPE_CHECKING:
    from paceline.server.rate_limits import Allowance


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, as far as the key tells; without keys everybody is the default tenant."""

    tenant: str = "default"
    service_class: str = DEFAULT_CLASS
    weight: float = 1.0  # the tenant's share where tenants compete
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers together
    max_concurrency: int | None = None
    lowest_priority_number: int | None = None  # a request may not ask for a smaller one
    prices: Prices = FREE
    is_admin: bool = False  # may use routes that change or show the server as a whole
    batch_id: str = ""  # of the batch that asks on behalf of the key, if one does


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to a route."""

    id: str  # made here; unique
    route: str  # the template of the matched route, from a closed set
    body: Mapping[str, Any]  # the JSON object; empty for GET
    headers: Mapping[str, str]  # lower-case names
    caller: Caller
    received_s: float  # monotonic
    path: Mapping[str, str] = field(default_factory=dict)
    allowance: Allowance | None = None  # what it counts against, where the key has limits by the minute
    query: str = ""  # what follows the path, as it was sent
    chunks: AsyncIterator[bytes] | None = None  # the body as it comes, for a route that takes a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A file to be sent, however large it is."""

    path: Path
    size: int
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/octet-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """A stream of server-sent events, each item one or more whole frames.

    The status goes out with the first item: whatever is raised before it is answered with its real status, whatever
    is raised later becomes one error frame, made by `error_frame`, and the end of the stream. The generator is
    closed in every case.
    """

    frames: AsyncGenerator[bytes, None]
    error_frame: Callable[[BaseException], bytes]
    headers: Mapping[str, str] = field(default_factory=dict)
    # Given a way to write a frame at once, frames may take it while `frames` is being waited for; see `EventStream`.
    divert: Callable[[Callable[[bytes], bool]], None] | None = None


Handler = Callable[[Call], Awaitable[Answer | Events | Download]]


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """How one generation went: what the log line and the metrics are made of. No text."""

    id: str
    route: str
    tenant: str
    received_s: float  # monotonic, of this process
    service_class: str = DEFAULT_CLASS
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    longest_output: int = 0  # tokens of the longest branch that has ended
    num_branches: int = 1
    max_tokens: int = 0
    first_token_s: float | None = None  # monotonic
    last_token_s: float | None = None  # on the engine's clock; kept by the observer
    finished_s: float | None = None
    queue_s: float | None = None
    preemptions: int = 0
    finish_reason: str = ""  # stop, length, abort or error; of the first branch that did not end well, if any
    error_code: str = ""
    is_stream: bool = False
    num_sent: int = 0  # of the output tokens, those whose frames were written; whole answers are sent at once
    cost: Cost = NO_COST  # of all branches that have ended
    charge: Charge = field(default_factory=no_charge)
    shows_receipt: bool = False  # whether its usage carries the receipt
    batch_id: str = ""
    predicted_ttft_s: float | None = None  # what the engine said when it took the request
    wishes: tuple[int | None, int | None, int | None] = (None, None, None)  # deadline, TTFT and ITL in ms
    sampling: SamplingParams | None = None
    trace_parent: str = ""  # of the trace its client says it belongs to, as it came
    trace_state: str = ""


class Observer(Protocol):
    """Who is told how generations go. Cheap calls that never raise; they are made once for each piece of news."""

    def started(self, record: RequestRecord) -> None:
        """Tokenised and handed to the engine."""

    def first_token(self, record: RequestRecord) -> None: ...

    def tokens(self, record: RequestRecord, count: int, time_s: float) -> None:
        """So many more output tokens, over all branches; the newest at `time_s` on the engine's clock."""

    def finished(self, record: RequestRecord) -> None:
        """Called exactly once for every `started`, in whatever way it ended."""


class NoObserver:
    """Nobody listens."""

    def started(self, record: RequestRecord) -> None:
        pass

    def first_token(self, record: RequestRecord) -> None:
        pass

    def tokens(self, record: RequestRecord, count: int, time_s: float) -> None:
        pass

    def finished(self, record: RequestRecord) -> None:
        pass
