"""What a place of the dial means: how long steps with prompts take, how much of one a prompt gets, how many rows run.

From 1 down to a quarter, steps become shorter, by equal factors for equal turns; below that they are as short as they
can be, and there are fewer rows. So whoever turns the dial down gives up throughput first where it buys the most.
Pure: a config in, limits out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from paceline.config import SchedulerConfig

ROWS_PART = 0.25  # of the dial; above it all rows may run
ROWS_SPAN = 8.0  # at 0 there is one row for so many of those that may run at a quarter
SMALLEST_SHARE = 0.25  # of a step's tokens for one prompt while others wait, at 0; all of them at 1
TOKENS_SPAN = 16  # without step costs: the largest step has so many times the tokens of the smallest
FEWEST_TOKENS = 8  # and at least so many: fewer take hardly less time
HEADROOM = 1.5  # the longest step: so much longer than the largest size of the table, for what its rows read
ROWS_SLOPE = (
    math.log(ROWS_SPAN) / ROWS_PART
)  # how the logarithm of the rows grows with the position, in their part
TYPICAL_CONTEXT = 256  # tokens that a row reads, where it is guessed what one more costs
PLACES = 4  # decimals of a position: what is on record is all there is


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What steps are held to."""

    target_s: float | None  # of a step with prompts; None: no step costs are known
    tokens: int  # most of a step
    share: float  # of these for one prompt while others wait
    rows: int

    def step_tokens(self, rows: int, fewest: int, most: int) -> int:
        """Most tokens of a step with so many decoding rows: prompts go on, however many rows there are."""
        return min(max(self.tokens, rows + fewest), most)


class Range:
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

    def at(self, position: float, most_rows: int | None = None) -> Limits:
        """What a place means where at most so many rows may run; None: as many as there are."""
        turned = max(0.0, position - ROWS_PART) / (1.0 - ROWS_PART)
        length = self.low * math.exp(turned * self._span)
        missing = max(0.0, ROWS_PART - position) / ROWS_PART
        rows = max(1, round((most_rows or self.rows) * math.exp(-missing * math.log(ROWS_SPAN))))
        return Limits(
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
