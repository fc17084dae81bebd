"""When requests are due: the arrival patterns of the workloads, at a rate or along a ramp.

A ramp is drawn by rescaling time: arrivals at one a second are mapped through the inverse of how many requests there
should have been by then. Nothing here waits for anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError
from paceline.lab.workload.arrivals import AllAtOnce, Arrivals, GammaGaps, RecordedArrivals, draw_arrivals

Floats = NDArray[np.float64]
MAX_REQUESTS = 10_000_000
RAMP_FORM = "FROM:TO:SECONDS, in requests per second, such as 1:20:60"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A rate that moves in a straight line and then stays."""

    start: float
    end: float
    seconds: float

    def times(self, counts: Floats) -> Floats:
        """When this number of requests should have been sent."""
        slope = (self.end - self.start) / self.seconds
        total = (self.start + self.end) / 2 * self.seconds
        later: Floats = self.seconds + (counts - total) / self.end
        if slope == 0:
            return counts / self.start
        within = np.sqrt(np.maximum(self.start**2 + 2 * slope * np.minimum(counts, total), 0.0))
        return np.where(counts <= total, (within - self.start) / slope, later)


def parse_ramp(text: str) -> Ramp:
    try:
        start, end, seconds = (float(part) for part in text.split(":"))
    except ValueError:
        raise InputError(f"--ramp '{text}' is not understood; give {RAMP_FORM}") from None
    if not (0 <= start < 1e6 and 0 < end < 1e6 and 0 < seconds < 1e6):
        raise InputError(
            f"--ramp '{text}': rates must lie between 0 and a million, and the last one and the seconds above 0"
        )
    return Ramp(start=start, end=end, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalPlan:
    """How requests follow each other: a pattern, and a rate or a ramp; all at once without either."""

    pattern: Arrivals
    rate: float | None = None
    ramp: Ramp | None = None

    def due_s(self, *, num_requests: int | None, duration_s: float | None, seed: int) -> Floats:
        """Seconds after the start: of `num_requests`, or of those within `duration_s`, whichever ends first."""
        if self.rate is None and self.ramp is None:
            assert num_requests is not None
            return np.zeros(num_requests)
        count = num_requests if num_requests is not None else 256
        while True:
            times = self._draw(count, seed)
            is_enough = duration_s is not None and times[-1] > duration_s
            if num_requests is not None or is_enough:
                break
            count *= 2
            if count > MAX_REQUESTS:
                raise InputError(
                    f"that would be more than {MAX_REQUESTS:,} requests; lower the rate or --duration"
                )
        return times if duration_s is None else times[times <= duration_s]

    def _draw(self, count: int, seed: int) -> Floats:
        pattern = GammaGaps(variation=1.0) if isinstance(self.pattern, RecordedArrivals) else self.pattern
        if self.ramp is None:
            assert self.rate is not None
            return draw_arrivals(pattern, count, self.rate, seed)
        if not isinstance(pattern, GammaGaps):
            raise InputError("--ramp goes with --arrivals poisson, constant or gamma:CV; drop one of them")
        return self.ramp.times(draw_arrivals(pattern, count, 1.0, seed))


def check_pattern(pattern: Arrivals, *, has_rate: bool) -> None:
    """Refuse what has no meaning together."""
    if isinstance(pattern, AllAtOnce) and has_rate:
        raise InputError(
            "--arrivals all-at-once leaves nothing for --rate or --ramp to set; drop one of them"
        )
    if not has_rate and not isinstance(pattern, AllAtOnce | RecordedArrivals):
        raise InputError("--arrivals needs --rate or --ramp: how many requests per second")
