"""The key figures of continuous batching over the last minute, for those who look without a database of metrics.

Differences of the same totals that /metrics shows as counters, noted about once a second; nothing is counted here.
What cannot be said, because nothing happened or the device is not known, is left out. Belongs to the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

WINDOW_S = 60.0
LEAST_S = 0.5  # between two notes


class Totals(NamedTuple):
    """What is known at one moment, since the start of the engine or of the server."""

    time_s: float
    steps: int = 0
    busy_s: float = 0.0
    row_places: int = 0  # rows there are, summed over steps
    occupied_rows: int = 0
    computed_tokens: int = 0
    padding_tokens: int = 0
    preemptions: int = 0
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    met: int = 0
    missed: int = 0


class Limits(NamedTuple):
    """What the figures are shares of; None where it is not known."""

    peak_flops: float | None = None
    peak_bandwidth: float | None = None
    cost_per_hour: float | None = None


class Recent:
    """Keeps a minute of totals."""

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self.totals = totals
        self._notes: deque[Totals] = deque()

    def note(self, seen: Totals | None = None) -> None:
        """To be called about once a second; `seen` are totals of a moment before now."""
        now = self.totals() if seen is None else seen
        if self._notes and now.steps < self._notes[-1].steps:
            self._notes.clear()  # another engine, which counts from nothing
        if self._notes and now.time_s - self._notes[-1].time_s < LEAST_S:
            return
        self._notes.append(now)
        while len(self._notes) > 2 and now.time_s - self._notes[1].time_s >= WINDOW_S:
            self._notes.popleft()

    def change(self) -> Totals | None:
        """What the last minute added; its `time_s` is how long it was. None before there is a second of it."""
        now = self.totals()
        if not self._notes or now.steps < self._notes[-1].steps:
            return None
        then = self._notes[0]
        if now.time_s - then.time_s < LEAST_S:
            return None
        return Totals._make(new - old for new, old in zip(now, then, strict=True))


def recent_figures(change: Totals | None, limits: Limits) -> Iterator[tuple[str, str, float]]:
    """Name, meaning and value of what can be said of the last minute."""
    if change is None:
        return
    elapsed_s = change.time_s
    yield "busy_share", "Share of the last minute that the engine spent in steps.", change.busy_s / elapsed_s
    text = "Requests that gave way, by the second, in the last minute."
    yield "preemptions_per_second", text, change.preemptions / elapsed_s
    if change.row_places:
        text = "Share of rows in use in the steps of the last minute."
        yield "slot_occupancy_mean", text, change.occupied_rows / change.row_places
    if change.computed_tokens:
        text = "Share of the tokens computed in the last minute that was padding."
        yield "padding_share", text, change.padding_tokens / change.computed_tokens
    if change.met + change.missed:
        text = "Share of the requests of the last minute that had their times, of those that have any."
        yield "goodput_share", text, change.met / (change.met + change.missed)
        text = "Requests that had their times, by the second, in the last minute."
        yield "goodput_requests_per_second", text, change.met / elapsed_s
    if limits.peak_flops:
        text = "Share of the device's peak arithmetic that the last minute used."
        yield "compute_share", text, change.flops / elapsed_s / limits.peak_flops
    if limits.peak_bandwidth:
        text = "Share of the device's peak memory bandwidth that the last minute used."
        moved = change.read_bytes + change.written_bytes
        yield "memory_share", text, moved / elapsed_s / limits.peak_bandwidth


def recent_costs(change: Totals | None, limits: Limits) -> dict[str, float]:
    """What a million tokens cost at the pace of the last minute, by which tokens are counted."""
    if change is None or limits.cost_per_hour is None:
        return {}
    cost = limits.cost_per_hour * change.time_s / 3600.0
    counts = {"output": change.output_tokens, "all": change.output_tokens + change.prompt_tokens}
    return {name: cost / count * 1e6 for name, count in counts.items() if count}
