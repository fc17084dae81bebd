"""How many engines are wanted, and why.

One pure function for all that start and stop engines: a cluster's policy, a gauge, the simulator. What comes in
is compared with what one engine serves within its bounds, by its step times; what waits has to be served too; and what
grows is reckoned to the moment when an engine started now would be ready. Up at once, down one at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

FILL = 0.75  # of what an engine can serve within its bounds: load is never even
KV_FILL = 0.85  # of the KV cache
LATELY_S, BEFORE_S = 15.0, 45.0  # what comes now, and what came before it
PEAK_S = 5.0  # between the moments at which a peak is looked for
NOTICED = 1.25  # a rise by less is chance
FURTHEST = 2.0  # what comes is not thought to grow by more than this while an engine starts
PATIENCE_S = 60.0  # after a change, before one engine fewer: and no less than a start takes


class Mix(NamedTuple):
    """What requests are like on average."""

    prompt: float  # tokens that are computed, not found in the cache
    answer: float
    context: float  # tokens that a row holds on average


class Limits(NamedTuple):
    step_s: float  # that rows can wait between two tokens
    rows: int
    kv_tokens: int


class Bounds(NamedTuple):
    least: int
    most: int


class Figures(NamedTuple):
    """How things stand in a fleet."""

    engines: int  # ready or starting
    ready: int
    demand: float  # requests a second, lately
    peak: float  # the most of that within the time a smaller fleet is held back
    growth: float  # requests a second, more each second
    waiting_s: float  # seconds of one engine that prompts wait for, of all engines together
    capacity: float  # requests a second that one engine serves within its bounds
    patience_s: float  # that a first token may take
    kv_use: float  # mean share of the KV cache that rows hold, of ready engines
    steady_s: float  # since the number of engines last changed


@dataclass(frozen=True, slots=True)
class Wanted:
    count: int
    why: str


def wanted(figures: Figures, bounds: Bounds, start_s: float) -> Wanted:
    """The number of engines that should be there. `start_s`: what one takes to start."""
    served = max(figures.capacity * FILL, 1e-9)
    ahead = figures.demand + max(0.0, figures.growth) * start_s
    ahead = min(ahead, FURTHEST * figures.demand)
    # What waits is to be gone when a first token may still be in time; engines that start cannot help before they do.
    late_s = max(0.0, figures.waiting_s - figures.ready * figures.patience_s)
    needs = {
        "demand": figures.demand / served,
        "growth": ahead / served,
        "queue": figures.demand / served + late_s / max(figures.patience_s, start_s),
        "kv": figures.ready * figures.kv_use / KV_FILL,
    }
    why = max(needs, key=lambda name: needs[name])
    count = math.ceil(needs[why] - 1e-9)
    if count < figures.engines:
        is_early = figures.steady_s < max(PATIENCE_S, start_s)
        was_needed = math.ceil(figures.peak / served - 1e-9)
        why = "patience" if is_early or was_needed >= figures.engines else "less"
        count = figures.engines - (why == "less")
    bounded = min(max(count, bounds.least), bounds.most)
    return Wanted(bounded, why if bounded == count else "bounds")


def capacity(step_s: Callable[[int, float, float], float], mix: Mix, limits: Limits) -> float:
    """Requests a second that one engine serves for good, no step of it longer than rows can wait.

    With so many rows decoding, an answer takes as many steps as it has tokens, and as many requests end in a step as
    begin: their prompts are read in it. `step_s` is asked for rows, the context of all of them, and prompt tokens.
    """
    answer = max(mix.answer, 1.0)

    def rate(rows: int) -> float:
        seconds = step_s(rows, rows * mix.context, rows / answer * mix.prompt)
        return rows / (answer * seconds) if rows == 1 or seconds <= limits.step_s else 0.0

    most = max(1, min(limits.rows, int(limits.kv_tokens / max(mix.context, 1.0))))
    low, high = 1, most
    while low < high:  # the most rows whose steps are in time: steps get longer with rows
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rate(middle) else (low, middle - 1)
    return rate(low)


class Demand:
    """Requests as they come, by second: how many lately, the most of late, and whether they grow."""

    def __init__(self, held_s: float) -> None:
        """`held_s`: how long a peak is remembered."""
        self._held_s = max(held_s, LATELY_S + BEFORE_S)
        self._seconds: deque[tuple[int, float]] = deque()  # a second, and what came in it
        self._began_s: float | None = None

    def comes(self, now_s: float, requests: float = 1.0) -> None:
        """In order of time."""
        if self._began_s is None:
            self._began_s = now_s
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            requests += self._seconds.pop()[1]
        self._seconds.append((second, requests))

    def at(self, now_s: float) -> tuple[float, float, float]:
        """Requests a second lately, the peak of that, and how much more it gets each second."""
        while self._seconds and self._seconds[0][0] < now_s - self._held_s:
            self._seconds.popleft()
        if self._began_s is None:
            return 0.0, 0.0, 0.0
        lately = self._mean(now_s - LATELY_S, now_s)
        before = self._mean(now_s - LATELY_S - BEFORE_S, now_s - LATELY_S)
        growth = (lately - before) / (0.5 * (LATELY_S + BEFORE_S)) if lately > NOTICED * before > 0.0 else 0.0
        ends = [now_s - back for back in range(0, int(self._held_s - LATELY_S) + 1, int(PEAK_S))]
        return lately, max(self._mean(end - LATELY_S, end) for end in ends), growth

    def _mean(self, start_s: float, end_s: float) -> float:
        assert self._began_s is not None
        seconds = end_s - max(start_s, self._began_s)
        came = sum(requests for second, requests in self._seconds if start_s <= second < end_s)
        return came / max(seconds, 1.0) if seconds > 0.0 else 0.0
