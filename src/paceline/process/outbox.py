"""What the engine has to send and the socket has not taken yet.

Steps never wait for the HTTP process: the events of any number of steps are joined into as few frames as fit, so that
what is kept is bounded by the requests that have not ended. Tokens are two columns of bytes that grow, endings and
rejections are kept, of the gauges only the newest. A frame has a bounded size. What has a place among the tokens (a
branch is held, tokens were put in) begins a new frame.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Finished, Forecast, Held, LogprobEvent, StepEvents, TokenEvents
from paceline.process.client import EngineStats
from paceline.process.frames import ID, TOKEN, Rejected, Update

# With the largest frame at its smallest allowed size (64 KiB) each kind may fill a sixth of it.
_SHARE = 6
ENDING_BYTES = 256  # of one with the largest numbers; a test holds it to the fields that there are
_REJECTED_BYTES = 2048
_FORECAST_BYTES = 288
_LOGPROBS_BYTES = 128  # and 16 for each of the likeliest tokens


@dataclass(slots=True)
class _Stretch:
    """Tokens between two events that have a place among them."""

    held: list[Held] = field(default_factory=list)  # before its tokens
    is_injected: bool = False
    branches: bytearray = field(default_factory=bytearray)
    tokens: bytearray = field(default_factory=bytearray)
    logprobs: deque[LogprobEvent] = field(default_factory=deque)
    time_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not (self.tokens or self.logprobs or self.held)


class Outbox:
    """Events that wait. `take` gives the next frame."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._bytes = max_frame_bytes // _SHARE
        self._stretches = deque([_Stretch()])
        self.endings: deque[Finished] = deque()
        self.rejections: deque[Rejected] = deque()
        self.forecasts: deque[tuple[int, Forecast | None]] = deque()
        self.stats: EngineStats | None = None

    def __bool__(self) -> bool:
        if self.endings or self.has_answers or self.stats is not None:
            return True
        return len(self._stretches) > 1 or not self._stretches[0].is_empty

    @property
    def has_answers(self) -> bool:
        """A client waits for a forecast or a rejection, which no step has to come before."""
        return bool(self.forecasts or self.rejections)

    def put(self, events: StepEvents) -> None:
        """Everything a step made known."""
        if events.logprobs:
            self._at(is_injected=False).logprobs.extend(events.logprobs)
        after: list[tuple[TokenEvents, NDArray[np.bool_]]] = []
        for batch in events.tokens:
            if events.held:
                # Of a held branch, tokens that came before the hold go first.
                follows = np.zeros(len(batch.requests), np.bool_)
                for hold in events.held:
                    follows |= (batch.requests == hold.request) & (batch.index >= hold.num_output)
                if follows.any():
                    after.append((batch, follows))
                    self._put_tokens(batch, ~follows)
                    continue
            self._put_tokens(batch)
        if events.held:
            self._stretches.append(_Stretch(held=list(events.held)))
        for batch, follows in after:
            self._put_tokens(batch, follows)
        self.endings.extend(events.finished)

    def _put_tokens(self, batch: TokenEvents, only: NDArray[np.bool_] | None = None) -> None:
        requests, tokens = batch.requests, batch.tokens
        if only is not None:
            requests, tokens = requests[only], tokens[only]
        if not len(tokens):
            return
        stretch = self._at(is_injected=batch.is_injected)
        stretch.branches += requests.astype(ID, copy=False).tobytes()
        stretch.tokens += tokens.astype(TOKEN, copy=False).tobytes()
        stretch.time_s = batch.time_s

    def _at(self, *, is_injected: bool) -> _Stretch:
        """Where tokens of a kind go next."""
        last = self._stretches[-1]
        if last.is_injected != is_injected:
            if last.tokens or last.logprobs:
                last = _Stretch(is_injected=is_injected)
                self._stretches.append(last)
            else:
                last.is_injected = is_injected
        return last

    def take(self) -> Update:
        """As much as one frame holds. Nothing overtakes: logprobs, held branches, then tokens, then endings."""
        while len(self._stretches) > 1 and self._stretches[0].is_empty:
            self._stretches.popleft()
        stretch = self._stretches[0]
        logprobs = self._take_logprobs(stretch.logprobs)
        most = 0 if stretch.logprobs else self._bytes // (ID.itemsize + TOKEN.itemsize)
        branches = _cut(stretch.branches, most * ID.itemsize)
        tokens = _cut(stretch.tokens, most * TOKEN.itemsize)
        held, stretch.held = stretch.held, []
        held_back = len(self._stretches) > 1 or stretch.tokens or stretch.logprobs
        endings = [] if held_back else self._take_endings()
        rejections = _some(self.rejections, self._bytes // _REJECTED_BYTES)
        forecasts = _some(self.forecasts, self._bytes // _FORECAST_BYTES)
        stats, self.stats = self.stats, None
        return Update(
            time_s=stretch.time_s,
            branches=branches,
            tokens=tokens,
            logprobs=logprobs,
            endings=endings,
            rejections=rejections,
            stats=stats,
            forecasts=forecasts,
            held=held,
            is_injected=stretch.is_injected,
        )

    def _take_endings(self) -> list[Finished]:
        taken: list[Finished] = []
        room = self._bytes
        while self.endings and (not taken or room >= ENDING_BYTES + len(self.endings[0].vector)):
            taken.append(self.endings.popleft())  # one at least, whatever its vector
            room -= ENDING_BYTES + len(taken[-1].vector)
        return taken

    def _take_logprobs(self, waiting: deque[LogprobEvent]) -> list[LogprobEvent]:
        taken = []
        room = self._bytes * 2
        while waiting and room > 0:  # one at least, whatever its size
            entry = waiting.popleft()
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
