"""What the engine has to say and the socket has not taken yet.

Steps never wait for the HTTP process: news of any number of steps are joined into as few frames as fit, so that what
is kept is bounded by the requests that were not answered to their end. Tokens are two columns of bytes that grow,
endings and refusals are kept, of the gauges only the newest. A frame has a bounded size.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from paceline.core.events import Finished, LogprobEvent, StepEvents
from paceline.process.client import EngineStats
from paceline.process.frames import ID, TOKEN, BranchEnding, BranchLogprobs, News, Refusal, Told

# With the largest frame at its smallest allowed size (64 KiB) each kind may fill a sixth of it.
_SHARE = 6
_ENDING_BYTES = 176
_REFUSAL_BYTES = 2048
_TOLD_BYTES = 64
MAX_MESSAGE_CHARS = 512


class Outbox:
    """News that wait. `take` gives the next frame's worth."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._bytes = max_frame_bytes // _SHARE
        self._branches = bytearray()
        self._tokens = bytearray()
        self._logprobs: deque[BranchLogprobs] = deque()
        self._endings: deque[BranchEnding] = deque()
        self._refusals: deque[Refusal] = deque()
        self._told: deque[Told] = deque()
        self._stats: EngineStats | None = None
        self._time_s = 0.0

    def __bool__(self) -> bool:
        return bool(
            self._tokens
            or self._endings
            or self._logprobs
            or self._refusals
            or self._told
            or self._stats is not None
        )

    @property
    def has_answers(self) -> bool:
        """Somebody at the door waits for a word that no step has to come before."""
        return bool(self._told or self._refusals)

    def put(self, events: StepEvents) -> None:
        """Everything a step made known."""
        for tokens in events.tokens:
            self._branches += tokens.requests.astype(ID, copy=False).tobytes()
            self._tokens += tokens.tokens.astype(TOKEN, copy=False).tobytes()
            self._time_s = tokens.time_s
        if events.logprobs:
            self._logprobs.extend(map(_logprobs, events.logprobs))
        if events.finished:
            self._endings.extend(map(_ending, events.finished))

    def put_refusal(self, refusal: Refusal) -> None:
        self._refusals.append(refusal)

    def put_told(self, told: Told) -> None:
        self._told.append(told)

    def put_ending(self, ending: BranchEnding) -> None:
        self._endings.append(ending)

    def put_stats(self, stats: EngineStats) -> None:
        self._stats = stats

    def take(self) -> News:
        """As much as one frame holds. Nothing overtakes: logprobs, then tokens, then endings."""
        logprobs = self._take_logprobs()
        branches, tokens = (b"", b"") if self._logprobs else self._take_tokens()
        endings = [] if self._tokens or self._logprobs else _some(self._endings, self._bytes // _ENDING_BYTES)
        refusals = _some(self._refusals, self._bytes // _REFUSAL_BYTES)
        told = _some(self._told, self._bytes // _TOLD_BYTES)
        stats, self._stats = self._stats, None
        return News(self._time_s, branches, tokens, logprobs, endings, refusals, stats, told)

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

    def _take_logprobs(self) -> list[BranchLogprobs]:
        taken = []
        room = self._bytes * 2
        while self._logprobs and room > 0:  # one at least, whatever its size
            entry = self._logprobs.popleft()
            taken.append(entry)
            room -= 64 + 16 * len(entry.top_tokens)
        return taken


Kind = TypeVar("Kind")


def _some(waiting: deque[Kind], most: int) -> list[Kind]:
    if len(waiting) <= most:
        taken = list(waiting)
        waiting.clear()
        return taken
    return [waiting.popleft() for _ in range(most)]


def _ending(finished: Finished) -> BranchEnding:
    return BranchEnding(
        finished.request,
        finished.reason.value,
        finished.detail,
        finished.time_s,
        finished.num_prompt,
        finished.num_output,
        finished.num_cached,
        finished.preemptions,
        finished.queue_s,
        finished.cost,
    )


def _logprobs(event: LogprobEvent) -> BranchLogprobs:
    found = event.logprobs
    return BranchLogprobs(
        event.request,
        found.position,
        found.token,
        found.logprob,
        found.rank,
        found.top_tokens,
        found.top_logprobs,
    )
