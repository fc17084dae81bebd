"""What the engine has to send and the socket has not taken yet.

Steps never wait for the HTTP process: the events of any number of steps are joined into as few frames as fit, so that
what is kept is bounded by the requests that have not ended. Tokens are two columns of bytes that grow, endings and
rejections are kept, of the gauges only the newest. A frame has a bounded size.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from paceline.core.events import Finished, Forecast, LogprobEvent, StepEvents
from paceline.process.client import EngineStats
from paceline.process.frames import ID, TOKEN, Rejected, Update

# With the largest frame at its smallest allowed size (64 KiB) each kind may fill a sixth of it.
_SHARE = 6
_ENDING_BYTES = 176
_REJECTED_BYTES = 2048
_FORECAST_BYTES = 288
_LOGPROBS_BYTES = 128  # and 16 for each of the likeliest tokens


class Outbox:
    """Events that wait. `take` gives the next frame."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._bytes = max_frame_bytes // _SHARE
        self._branches = bytearray()
        self._tokens = bytearray()
        self._logprobs: deque[LogprobEvent] = deque()
        self._endings: deque[Finished] = deque()
        self._rejections: deque[Rejected] = deque()
        self._forecasts: deque[tuple[int, Forecast | None]] = deque()
        self._stats: EngineStats | None = None
        self._time_s = 0.0

    def __bool__(self) -> bool:
        return bool(
            self._tokens
            or self._endings
            or self._logprobs
            or self._rejections
            or self._forecasts
            or self._stats is not None
        )

    @property
    def has_answers(self) -> bool:
        """A client waits for a forecast or a rejection, which no step has to come before."""
        return bool(self._forecasts or self._rejections)

    def put(self, events: StepEvents) -> None:
        """Everything a step made known."""
        for tokens in events.tokens:
            self._branches += tokens.requests.astype(ID, copy=False).tobytes()
            self._tokens += tokens.tokens.astype(TOKEN, copy=False).tobytes()
            self._time_s = tokens.time_s
        if events.logprobs:
            self._logprobs.extend(events.logprobs)
        if events.finished:
            self._endings.extend(events.finished)

    def put_rejection(self, rejected: Rejected) -> None:
        self._rejections.append(rejected)

    def put_forecast(self, first: int, forecast: Forecast | None) -> None:
        self._forecasts.append((first, forecast))

    def put_ending(self, ending: Finished) -> None:
        self._endings.append(ending)

    def put_stats(self, stats: EngineStats) -> None:
        self._stats = stats

    def take(self) -> Update:
        """As much as one frame holds. Nothing overtakes: logprobs, then tokens, then endings."""
        logprobs = self._take_logprobs()
        branches, tokens = (b"", b"") if self._logprobs else self._take_tokens()
        endings = [] if self._tokens or self._logprobs else _some(self._endings, self._bytes // _ENDING_BYTES)
        rejections = _some(self._rejections, self._bytes // _REJECTED_BYTES)
        forecasts = _some(self._forecasts, self._bytes // _FORECAST_BYTES)
        stats, self._stats = self._stats, None
        return Update(
            time_s=self._time_s,
            branches=branches,
            tokens=tokens,
            logprobs=logprobs,
            endings=endings,
            rejections=rejections,
            stats=stats,
            forecasts=forecasts,
        )

    def _take_tokens(self) -> tuple[bytes, bytes]:
        most = self._bytes // (ID.itemsize + TOKEN.itemsize)
        if len(self._tokens) <= most * TOKEN.itemsize:  # as a rule: everything
            branches, tokens = bytes(self._branches), bytes(self._tokens)
            self._branches.clear()
            self._tokens.clear()
            return branches, tokens
        branches, tokens = (
            bytes(self._branches[: most * ID.itemsize]),
            bytes(self._tokens[: most * TOKEN.itemsize]),
        )
        del self._branches[: most * ID.itemsize]
        del self._tokens[: most * TOKEN.itemsize]
        return branches, tokens

    def _take_logprobs(self) -> list[LogprobEvent]:
        taken = []
        room = self._bytes * 2
        while self._logprobs and room > 0:  # one at least, whatever its size
            entry = self._logprobs.popleft()
            taken.append(entry)
            room -= _LOGPROBS_BYTES + 16 * len(entry.logprobs.top_tokens)
        return taken


Kind = TypeVar("Kind")


def _some(waiting: deque[Kind], most: int) -> list[Kind]:
    if len(waiting) <= most:
        taken = list(waiting)
        waiting.clear()
        return taken
    return [waiting.popleft() for _ in range(most)]
