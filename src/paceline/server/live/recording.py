"""A run as the live page shows it afterwards: the messages it would have seen, and why everything was decided.

Watches one engine, in a simulation or in the replay of a log, from its first step to its last. Messages are those of
`feed`, with times of the run's own clock; they are kept packed, in bundles a page fetches as it comes to them. Knows
nothing of files, sockets or pages.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.audit.ring import DecisionRing
from paceline.core.events import Decision, DecisionKind, Finished, StepEvents, TokenEvents
from paceline.core.plan import StepPlan
from paceline.core.request import Request, RequestId
from paceline.engine.trace import PeriodicTrace, TraceDelta
from paceline.process.client import Explanation
from paceline.process.live_view import delta_values
from paceline.scheduler.state import SchedulerState
from paceline.server.live.feed import LATENCIES, message
from paceline.server.metrics.request_metrics import RequestFamilies
from paceline.version import __version__

INTERVAL_S = 0.1  # of the run, between two messages at its beginning
DOUBLES_AFTER = 1_500  # messages, after which they come half as often
BUNDLE = 8  # messages: a page reads one of them between two frames
MOST_DECISIONS = 500_000
NOT_KNOWN = -1  # how long a prompt is
_BEGINNINGS = (DecisionKind.ADMIT, DecisionKind.FORK)
_ENDINGS = (DecisionKind.FINISH, DecisionKind.REFUSE)


class Recording:
    """One run. Filled while it is watched, read when that is over."""

    def __init__(self, name: str, *, num_rows: int, device: str) -> None:
        self.name = name
        self.num_rows = num_rows
        self.device = device
        self.times: list[float] = []  # of the messages, on the run's clock
        self.bundles: list[bytes] = []  # gzip of a JSON array of messages
        self.answers: list[tuple[float, float]] = []  # when a request ended, and how long after its arrival
        self.is_over = False
        self.requests = RequestFamilies()
        self._pending: list[bytes] = []
        self._ring = DecisionRing(MOST_DECISIONS)
        self._latencies = _Latencies(self.requests)
        self._trace: PeriodicTrace | None = None
        self._state: SchedulerState | None = None

    def watch(self, state: SchedulerState) -> Recording:
        """Begin, as the watcher of the engine that has this state. Its clock shows when the run begins."""
        self._state = state
        self._trace = PeriodicTrace(state, self._take, interval_s=INTERVAL_S, doubles_after=DOUBLES_AFTER)
        self._trace.take_delta(state.clock.now())  # before anything has happened
        return self

    def bundle(self, number: int) -> bytes:
        """Messages as far as there are any; while the run goes on the last bundle still grows. Raises IndexError."""
        if number == len(self.bundles) and not self.is_over:
            return _packed(list(self._pending))
        return self.bundles[number]

    def now_s(self) -> float:
        """The time of the run; the last one when it is over."""
        if self._state is not None and not self.is_over:
            return self._state.clock.now()
        return self.times[-1] if self.times else 0.0

    async def explain(self, number: int) -> Explanation:
        """What was decided about a request, for `Explanations`."""
        known = self._ring.of(RequestId(number))
        return Explanation(known, bool(known) and not any(each.kind in _ENDINGS for each in known))

    # -- the watcher's calls -------------------------------------------------------------------------------

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        assert self._trace is not None
        self._keep(decisions)
        self._trace.submitted(plan, decisions, time_s)

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        assert self._trace is not None
        self._trace.completed(seq, time_s, failed=failed)

    def on_events(self, events: StepEvents) -> None:
        for tokens in events.tokens:
            self._latencies.tokens(tokens)
        for finished in events.finished:
            seconds = self._latencies.finished(finished)
            if seconds is not None:
                self.answers.append((finished.time_s, seconds))

    def close(self, decisions: Sequence[Decision], time_s: float) -> None:
        assert self._trace is not None
        self._keep(decisions)
        self._trace.take_delta(time_s)
        self._pack()
        self.is_over = True

    def _keep(self, decisions: Sequence[Decision]) -> None:
        assert self._state is not None
        self._ring.add(decisions)
        for decision in decisions:
            if decision.kind in _BEGINNINGS:
                request = self._state.requests.get(decision.request)
                arrival_s = decision.time_s - decision.seconds
                self._latencies.began(decision.request, arrival_s, _own_prompt(request))

    def _take(self, delta: TraceDelta) -> None:
        seen = msgspec.json.encode({"first": not self.times, "costs": None, **delta_values(delta)})
        self.times.append(delta.snapshot.time_s)
        self._pending.append(message(len(self.times), self.requests, seen))
        if len(self._pending) == BUNDLE:
            self._pack()

    def _pack(self) -> None:
        if self._pending:
            self.bundles.append(_packed(self._pending))
            self._pending = []


class Race:
    """The same requests under several batching modes, each mode a recording, run one after the other.

    What the race page gets about the runs as a whole; their messages are those of the recordings, which may still
    grow while the page reads them. Filled in one thread and read in another.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        *,
        what: str,
        is_live: bool,
        starts: Mapping[str, float] | None = None,
    ) -> None:
        """`what`: model, device and sizes in words; `starts`: when runs began, where that is before their recording."""
        self.recordings = recordings
        self.num_requests: int | None = None  # of every run, once it is known
        self._what = what
        self._is_live = is_live
        self._starts = starts or {}

    def recording(self, name: str) -> Recording:
        return next(each for each in self.recordings if each.name == name)

    def values(self) -> dict[str, Any]:
        """How the race stands."""
        return {
            "version": __version__,
            "what": self._what,
            "is_live": self._is_live,
            "num_requests": self.num_requests,
            "bundle": BUNDLE,
            "tracks": [self._track(each) for each in self.recordings],
        }

    def _track(self, recording: Recording) -> dict[str, Any]:
        has_begun = bool(recording.times)
        return {
            "name": recording.name,
            "rows": recording.num_rows,
            "state": "over" if recording.is_over else "running" if has_begun else "waiting",
            "start_s": self._starts.get(recording.name, recording.times[0]) if has_begun else None,
            "now_s": recording.now_s(),
            "num_messages": len(recording.times),
            "answers": list(recording.answers),
        }


def _packed(messages: Sequence[bytes]) -> bytes:
    return gzip.compress(b"[" + b",".join(messages) + b"]", 1, mtime=0)


def _own_prompt(request: Request | None) -> int:
    """Tokens of the prompt a request brings: branches share that of the one they come from, and a server counts a
    prompt once. `NOT_KNOWN` where the request has ended already, which tells its prompt itself."""
    if request is None:
        return NOT_KNOWN
    return request.num_prompt if request.parent is None else 0


class _Latencies:
    """The same counters and histograms a server fills, from columns of tokens."""

    def __init__(self, requests: RequestFamilies) -> None:
        self._requests = requests
        self._arrival_s = np.full(1024, np.nan)  # by request
        self._last_s = np.full(1024, np.nan)
        self._uncounted = np.full(1024, NOT_KNOWN)  # tokens of a prompt that has had no answer yet

    def began(self, request: int, arrival_s: float, num_prompt: int) -> None:
        if request >= len(self._arrival_s):
            size = max(request + 1, 2 * len(self._arrival_s))
            self._arrival_s = _grown(self._arrival_s, size, np.nan)
            self._last_s = _grown(self._last_s, size, np.nan)
            self._uncounted = _grown(self._uncounted, size, NOT_KNOWN)
        self._arrival_s[request] = arrival_s
        self._uncounted[request] = num_prompt

    def tokens(self, events: TokenEvents) -> None:
        is_first = events.index == 0
        first = events.requests[is_first]
        self._count("ttft", events.time_s - self._arrival_s[first])
        gaps = events.time_s - self._last_s[events.requests]
        gaps[1:][events.requests[1:] == events.requests[:-1]] = 0.0  # a draft comes with the token before it
        self._count("itl", gaps[~is_first])
        self._last_s[events.requests] = events.time_s
        self._requests.generation_tokens += len(events.requests)
        there = first[self._uncounted[first] != NOT_KNOWN]
        self._requests.prompt_tokens += int(self._uncounted[there].sum())
        self._uncounted[there] = 0

    def finished(self, finished: Finished) -> float | None:
        """Seconds from the request's arrival; None of one that never began."""
        has_begun = 0 <= finished.request < len(self._arrival_s)
        left = int(self._uncounted[finished.request]) if has_begun else NOT_KNOWN
        self._requests.prompt_tokens += finished.num_prompt if left == NOT_KNOWN else left
        if not has_begun:
            return None
        seconds = finished.time_s - float(self._arrival_s[finished.request])
        self._count("e2e", np.array([seconds]))
        return None if math.isnan(seconds) else seconds

    def _count(self, name: str, values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
        histogram = self._requests.histograms[LATENCIES[name]][1]
        known = values[~np.isnan(values)]
        places, times = np.unique(np.searchsorted(histogram.bounds, known), return_counts=True)
        histogram.largest = float(known.max(initial=histogram.largest))
        for place, count in zip(places.tolist(), times.tolist(), strict=True):
            histogram.counts[place] += count


def _grown(column: np.ndarray[Any, Any], size: int, fill: float) -> np.ndarray[Any, Any]:
    grown = np.full(size, fill, dtype=column.dtype)
    grown[: len(column)] = column
    return grown
