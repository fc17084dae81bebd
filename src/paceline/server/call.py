"""What a route is given and what it gives back, without a word of HTTP plumbing.

`http` makes a `Call` of a request that has passed every limit, and turns what the handler returns or raises into
bytes. A handler never sees a socket and never builds an error body.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.server.access.caller import Caller

if TYPE_CHECKING:
    from paceline.server.access.rate_limits import Allowance


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
    headers: Callable[[], Mapping[str, str]] = dict  # called when the status goes out
    # Given a way to write a frame at once, frames may take it while `frames` is being waited for; see `EventStream`.
    divert: Callable[[Callable[[bytes], bool]], None] | None = None


Handler = Callable[[Call], Awaitable[Answer | Events | Download]]
