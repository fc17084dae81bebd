"""What became of one request, as its client saw it.

Owns the kinds of endings and the times that are kept. Times are of `time.perf_counter`, taken when bytes arrived. No
measure is computed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    REFUSED = "refused"  # 429, or 503 with a time to come back: the server is full
    REJECTED = "rejected"  # any other 4xx: the request is wrong
    SERVER_ERROR = "server error"  # any other 5xx
    STREAM_ERROR = "error in stream"  # an error event after the stream had begun
    BROKEN = "broken off"  # no whole answer, or none that can be read
    NO_CONNECTION = "no connection"
    TIMEOUT = "timeout"
    UNFINISHED = "unfinished"  # the run was ended before it


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request. What never happened is NaN, what the server did not tell is None."""

    index: int
    tenant: str = ""
    due_s: float  # when it should be sent
    sent_s: float = math.nan  # when it was sent, the last time if it was sent again
    piece_s: list[float] = field(default_factory=list)  # arrivals of text; several tokens may come in one
    ended_s: float = math.nan
    kind: Kind = Kind.UNFINISHED
    status: int = 0
    message: str = ""  # what the server, or the network, says about a failure
    retry_after_s: float | None = None  # of a refusal
    retries: int = 0
    wanted_tokens: int | None = None
    prompt_tokens: int | None = None  # these three as the server counted them
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.kind is Kind.FINISHED

    @property
    def num_output(self) -> int:
        """Tokens of the answer; where the server does not count, a piece of text is taken for one."""
        return len(self.piece_s) if self.output_tokens is None else self.output_tokens
