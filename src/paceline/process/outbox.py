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
        self._time_s = 0.0
        self.logprobs: deque[LogprobEvent] = deque()
        self.endings: deque[Finished] = deque()
        self.rejections: deque[Rejected] = deque()
        self.forecasts: deque[tuple[int, Forecast | None]] = deque()
        self.stats: EngineStats | None = None

    def __bool__(self) -> bool:
        waiting = self._tokens or self.endings or self.logprobs or self.has_answers
        return bool(waiting) or self.stats is not None

    @property
    def has_answers(self) -> bool:
        """A client waits for a forecast or a rejection, which no step has to come before."""
        return bool(self.forecasts or self.rejections)

    def put(self, events: StepEvents) -> None:
        """Everything a step made known."""
        for tokens in events.tokens:
            self._branches += tokens.requests.astype(ID, copy=False).tobytes()
            self._tokens += tokens.tokens.astype(TOKEN, copy=False).tobytes()
            self._time_s = tokens.time_s
        self.logprobs.extend(events.logprobs)
        self.endings.extend(events.finished)

    def take(self) -> Update:
        """As much as one frame holds. Nothing overtakes: logprobs, then tokens, then endings."""
        logprobs = self._take_logprobs()
        most = 0 if self.logprobs else self._bytes // (ID.itemsize + TOKEN.itemsize)
        branches = _cut(self._branches, most * ID.itemsize)
        tokens = _cut(self._tokens, most * TOKEN.itemsize)
        held_back = self._tokens or self.logprobs
        endings = [] if held_back else _some(self.endings, self._bytes // _ENDING_BYTES)
        rejections = _some(self.rejections, self._bytes // _REJECTED_BYTES)
        forecasts = _some(self.forecasts, self._bytes // _FORECAST_BYTES)
        stats, self.stats = self.stats, None
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

    def _take_logprobs(self) -> list[LogprobEvent]:
        taken = []
        room = self._bytes * 2
        while self.logprobs and room > 0:  # one at least, whatever its size
            entry = self.logprobs.popleft()
            taken.append(entry)
            room -= _LOGPROBS_BYTES + 16 * len(entry.logprobs.top_tokens)
        return taken


Kind = TypeVar("Kind")


def _cut(column: bytearray, most: int) -> bytes:
    taken = bytes(column[:most])
    del column[:most]
    return taken


def _some(waiting: deque[Kind], most: int) -> list[Kind]:
    return [waiting.popleft() for _ in range(min(most, len(waiting)))]
