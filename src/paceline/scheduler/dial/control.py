"""Holding a target: from what was seen and where the dial stands to where it should stand. Pure, and small moves only.

Too long is corrected soon, too short only when it is clearly so and when a limit of the dial is what made it so: a
position that changes nothing is not moved further (no wind-up). Whoever has to turn back waits twice as long before
it tries again, so that noise and the coarse steps of a table end in a rest, not in an oscillation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.core.dial import DialWord
from paceline.scheduler.dial.limits import ROWS_PART, ROWS_SLOPE, rounded

TOO_LONG = 0.04  # logarithm of what was seen over the target, above which is corrected
MISSED = 0.14  # the same (15 %), above which rows are taken away, and at the end of the dial a target counts as missed
GAIN, RELAXING = 0.7, 0.4  # of the way that would bring it to the target, and of the way back
LARGEST_MOVE = 0.12  # of the dial, at once
LONGEST_REST = 256  # judgements between two attempts to relax
FAR = 0.7  # logarithm below which nobody rests: half the target is another load than the one that was noisy
FEWER = 4  # a quarter of the values will do to see that
TRIES = 3  # judgements at the end of the dial after which a target counts as out of reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """What is held and how the dial acts on it."""

    target_s: float
    tightens: int  # -1: turning down shortens it (time between tokens); 1: turning up does (first tokens)
    slope: float  # logarithm of the time for one turn of the dial, where steps become shorter
    low: float  # the ends of the dial that this target may use
    high: float
    too_short: float  # logarithm below which it may be relaxed
    largest_relaxing: float  # of the dial, at once
    fewest: int  # values without which it is not relaxed: a p99 of few is too short


class Controller:
    """One target."""

    def __init__(self, law: Law) -> None:
        self.law = law
        self.word = DialWord.STARTING
        self.reversals = 0
        self._rest = 0  # judgements before it may relax again
        self._next_rest = 1
        self._last_relaxed = False
        self._quiet = 0  # judgements since the last move
        self._at_end = 0

    def judge(
        self, position: float, seen_s: float, num_seen: int, *, binds: bool = True, settled: bool = True
    ) -> float:
        """Where to stand now. `binds`: limits of the dial made it so. `settled`: rows are as few as they may be."""
        law = self.law
        error = math.log(max(seen_s, 1e-9) / law.target_s)
        self._rest = max(0, self._rest - 1)
        self._quiet += 1
        if self._quiet % (4 * self._next_rest) == 0:
            self._next_rest = max(1, self._next_rest // 2)
        if error > TOO_LONG:
            return self._tighten(position, error, settled=settled)
        self._at_end = 0
        if error >= -law.too_short or not binds:
            self.word = DialWord.HOLDING if error >= -law.too_short else DialWord.SLACK
            return position
        far = error < -FAR
        if (self._rest and not far) or num_seen < (law.fewest // FEWER if far else law.fewest):
            self.word = DialWord.HOLDING
            return position
        slope = ROWS_SLOPE if position < ROWS_PART else law.slope
        turn = min(RELAXING * -error / slope, law.largest_relaxing)
        moved = rounded(position - law.tightens * turn, law.low, law.high)
        self.word = DialWord.CORRECTING if moved != position else DialWord.SLACK
        if moved != position:
            self._last_relaxed, self._quiet = True, 0
        return moved

    def _tighten(self, position: float, error: float, *, settled: bool) -> float:
        law = self.law
        end = law.low if law.tightens < 0 else law.high
        # Rows are dear: they are not taken away for what is nearly held.
        is_last_resort = law.tightens < 0 and position <= ROWS_PART
        if error <= MISSED and (position == end or is_last_resort):
            self.word, self._at_end = DialWord.HOLDING, 0
            return position
        if position == end:
            self._at_end += 1
            self.word = DialWord.UNREACHABLE if self._at_end >= TRIES else DialWord.CORRECTING
            return position
        self.word = DialWord.CORRECTING
        if not settled:  # what was asked for last has not come about yet
            return position
        if self._last_relaxed:
            self.reversals += 1
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self._last_relaxed, self._quiet = False, 0
        turn = min(GAIN * error / (ROWS_SLOPE if is_last_resort else law.slope), LARGEST_MOVE)
        lowest = ROWS_PART if law.low < ROWS_PART < position else law.low  # a stop on the way to fewer rows
        return rounded(position + law.tightens * turn, lowest, law.high)
