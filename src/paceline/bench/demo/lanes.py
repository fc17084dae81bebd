"""What every row of a batch did in every step, in a word: nothing, prompt, decode, padding, or held and not computed.

Attached to an engine as its watcher, it keeps one byte per row and step, and the figures of a step for the meter. It
draws nothing; `Lanes` is what a picture is made from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.core.clock import Clock
from paceline.core.events import Decision
from paceline.core.plan import StepPlan
from paceline.report.lanes import DECODE, EMPTY, HELD, PADDING, PROMPT, Codes, Lanes
from paceline.scheduler.state import SchedulerState
from paceline.watch.measure import Meter, StepFigures, StepMeter


class LaneWatcher:
    """Looks on while an engine works; see `StepWatcher`."""

    def __init__(self, state: SchedulerState, meter: Meter, clock: Clock) -> None:
        self._state = state
        self._clock = clock
        self._steps = StepMeter(meter, 0, state)
        self._underway: dict[int, tuple[float, StepFigures, Codes]] = {}
        self._times: list[tuple[float, float]] = []
        self._codes: list[Codes] = []

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        self._underway[plan.seq] = (self._clock.now(), self._steps.figures(plan), self._codes_of(plan))

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        start_s, figures, codes = self._underway.pop(seq)
        if self._times:  # one that was planned ahead waited for the one before it
            start_s = max(start_s, self._times[-1][1])
        end_s = self._clock.now()
        self._steps.write(figures, start_s, end_s)
        self._times.append((start_s, end_s))
        self._codes.append(codes)

    def lanes(self, origin_s: float = 0.0) -> Lanes:
        """Everything so far; times count from `origin_s`."""
        times = np.array(self._times, np.float64).reshape(-1, 2) - origin_s
        codes, num_slots = self.latest(len(self._codes)), self._state.config.max_num_seqs
        used = max([num_slots, *(np.flatnonzero((codes != EMPTY).any(axis=0)) + 1).tolist()])
        return Lanes(start_s=times[:, 0], end_s=times[:, 1], codes=codes[:, :used], num_slots=num_slots)

    def latest(self, count: int) -> Codes:
        """The rows in the last steps, a step per line."""
        return np.array(self._codes[-count:], np.uint8).reshape(-1, len(self._state.rows.live))

    def _codes_of(self, plan: StepPlan) -> Codes:
        rows = self._state.rows
        codes = np.where(rows.live, np.uint8(HELD), np.uint8(EMPTY))
        codes[rows.live & rows.decoding] = DECODE
        codes[plan.spans.row] = PROMPT
        codes[(rows.done | rows.padding) & rows.live] = PADDING
        return codes
