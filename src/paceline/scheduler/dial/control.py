"""Holding a target: from what was seen and where the dial stands to where it should stand. Pure, and small moves only.

Too long is corrected soon, too short only when it is clearly so and when a limit of the dial is what made it so: a
position that changes nothing is not moved further (no wind-up). A dial that has to turn back waits twice as long before
it tries again, so that noise and the coarse steps of a table end in a rest, not in an oscillation.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from paceline.config.engine import SchedulerConfig
from paceline.core.dial import DialWord

# What a place of the dial means: how long steps with prompts take, how much of one a prompt gets, how many rows
# run.
#
# From 1 down to a quarter, steps become shorter, by equal factors for equal turns; below that they are as short as
# they can be, and there are fewer rows. So turning the dial down gives up throughput first where it buys the
# most. Pure: a config in, limits out.


ROWS_PART = 0.25  # of the dial; above it all rows may run
ROWS_SPAN = 8.0  # at 0 there is one row for each 8 that may run at a quarter
SMALLEST_SHARE = 0.25  # of a step's tokens for one prompt while others wait, at 0; all of them at 1
TOKENS_SPAN = 16  # without step costs: the largest step has 16 times the tokens of the smallest
FEWEST_TOKENS = 8  # of the smallest step: fewer take hardly less time
HEADROOM = 1.5  # the longest step over that of the largest size of the table, for what its rows read
# How the logarithm of the rows grows with the position, in their part.
ROWS_SLOPE = math.log(ROWS_SPAN) / ROWS_PART
TYPICAL_CONTEXT = 256  # tokens that a row reads, where it is guessed what one more costs
PLACES = 4  # decimals of a position: what is on record is all there is


@dataclass(frozen=True, slots=True, kw_only=True)
class DialLimits:
    """What steps are held to."""

    target_s: float | None  # of a step with prompts; None: no step costs are known
    tokens: int  # most of a step
    share: float  # of these for one prompt while others wait
    rows: int

    def step_tokens(self, rows: int, fewest: int, most: int) -> int:
        """Most tokens of a step with this number of decoding rows: prompts continue, however many rows there are."""
        return min(max(self.tokens, rows + fewest), most)


class DialRange:
    """From the shortest step to the longest, and from few rows to all."""

    def __init__(self, config: SchedulerConfig) -> None:
        costs, most = config.step_costs, config.max_num_batched_tokens
        self.by_time = costs is not None
        self._most, self.rows = most, config.max_num_seqs
        self._row_s = 0.0 if costs is None else costs.row_s + costs.context_s * TYPICAL_CONTEXT
        if costs is not None:
            last = max(bisect_right(costs.sizes, most) - 1, 0)
            low, high = max(costs.seconds[0], 1e-6), costs.seconds[last] * HEADROOM
            self.fewest = min(costs.sizes[0], most)
        else:
            self.fewest = max(min(FEWEST_TOKENS, most), most // TOKENS_SPAN)
            low, high = float(self.fewest), float(most)
        self.low, self.high = low, max(high, low)
        self._span = math.log(self.high / self.low)

    @property
    def slope(self) -> float:
        """How the logarithm of a step's length grows with the position, above the rows' part."""
        return max(self._span / (1.0 - ROWS_PART), 0.1)

    def rows_within(self, target_s: float) -> int:
        """Rows that decode in this time beside the shortest piece of a prompt, where it is known what a row costs."""
        if not self._row_s:
            return self.rows
        return min(max(int((target_s - self.low) / self._row_s), 1), self.rows)

    def at(self, position: float, most_rows: int | None = None) -> DialLimits:
        """What a position means where at most this number of rows may run; None: as many as there are."""
        turned = max(0.0, position - ROWS_PART) / (1.0 - ROWS_PART)
        length = self.low * math.exp(turned * self._span)
        missing = max(0.0, ROWS_PART - position) / ROWS_PART
        rows = max(1, round((most_rows or self.rows) * math.exp(-missing * math.log(ROWS_SPAN))))
        return DialLimits(
            target_s=round(length, 7) if self.by_time else None,
            tokens=self._most if self.by_time else min(max(1, round(length)), self._most),
            share=round(SMALLEST_SHARE + (1.0 - SMALLEST_SHARE) * position, PLACES),
            rows=rows,
        )

    def position_of(self, length: float) -> float:
        """Where steps have this length: seconds, or tokens where no costs are known."""
        if self._span <= 0.0 or length <= 0.0:
            return 1.0 if length >= self.high else ROWS_PART
        turned = math.log(length / self.low) / self._span
        return rounded(ROWS_PART + (1.0 - ROWS_PART) * turned, ROWS_PART, 1.0)


def rounded(position: float, low: float = 0.0, high: float = 1.0) -> float:
    """A position within bounds, as it is put on record."""
    return round(min(max(position, low), high), PLACES)


TOO_LONG = 0.04  # logarithm of what was seen over the target, above which is corrected
MISSED = 0.14  # the same (15 %), above which rows are taken away, and at the end of the dial a target counts as missed
GAIN, RELAXING = 0.7, 0.4  # of the way that would bring it to the target, and of the way back
LARGEST_MOVE = 0.12  # of the dial, at once
LONGEST_REST = 256  # judgements between two attempts to relax
FAR = (
    0.7  # logarithm below which it does not rest: half the target is another load than the one that was noisy
)
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
        # Rows are expensive: they are not taken away for what is nearly held.
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
