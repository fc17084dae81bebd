"""Time as a value that is passed in.

The scheduler and the engine never read a wall clock: they ask the clock they were given, so that tests and the
simulator decide what time it is. Real clocks are monotonic; a jump of the system time moves no deadline.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from: seconds that never go back, from an arbitrary start."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when set: the fake of the seam, and the simulator's virtual time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time does not go back"
        self._now_s += seconds

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`; a time already passed moves nothing."""
        self._now_s = max(self._now_s, time_s)
