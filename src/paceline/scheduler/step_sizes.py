"""How many tokens a step may carry where no pace is kept: constants, or sizes learnt from how long steps take.

A CPU is shared with other processes, and what a step takes can change tenfold while serving. The line that was
measured at the start gives the shape, what steps took gives one factor. The sizes of the start hold as long as steps
stay between what they should take and about three times that; beyond, the size is the one that keeps the bound.
Learns from the times the runner tells, which the run log has, and from the scheduler's time, so that a replay learns
the same. It never looks at a clock.
Decision: docs/decisions/0031-a-busy-machine.md.
"""

from __future__ import annotations

import math

from paceline.config.engine import LearnedSteps, SchedulerConfig
from paceline.core.plan import StepTimes, StepWork

RATE = 0.25  # share of a surprise that the next step is thought to repeat
FURTHEST = 3.0  # most surprise that is taken in at once, as a logarithm: one stall moves no size
# Times what a step should take: smaller steps cost more per token, and a busy machine is slow enough.
TOLERATED = 3.2
FORGOTTEN_S = 10.0  # after which a slow machine is thought to be as it was at the start
GROWTH = 1.5  # most, at once, beyond what was measured or seen
# Tokens that a token attends to; steps with more tell what attention costs, not how fast we are.
LONG_CONTEXT = 1024
GRAIN = 8


class StepSizes:
    """Sizes of the steps beside decoding rows, and of those without any."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._learned = config.learned_steps
        self._start = (config.step_tokens(1), config.step_tokens(0))
        self.beside, self.alone = self._start
        self._slowness = 0.0  # logarithm of what steps take to what was measured
        self._learned_s = -math.inf
        self._last_end_s = 0.0  # of the runner's clock

    @property
    def rows(self) -> int:
        """Most rows that decode in a step: none has to stand still because steps are slow."""
        return max(self._start[0], self.beside)

    def tokens(self, decoding: int, done: int = 0) -> int:
        """Most tokens of a step with this number of decoding rows, whose first prompt is `done` tokens far."""
        learned = self._learned
        if learned is None:
            return self.beside if decoding else self.alone
        size = self.beside if decoding else self.alone
        if done * learned.product_s > 0.0:
            # Far inside a long prompt a token takes many times as long as at its beginning.
            target_s = TOLERATED * (learned.beside_s if decoding else learned.alone_s)
            left_s = target_s / math.exp(self._slowness) - learned.fixed_s - learned.token_s * decoding
            size = min(size, decoding + int(left_s / (learned.token_s + learned.product_s * done)))
        least = decoding + learned.least
        return min(max(size, least), self.rows) if decoding else max(size, min(least, self.alone))

    def learn(self, work: StepWork, times: StepTimes, now_s: float) -> None:
        """A step has run."""
        started_s = max(times.start_s, self._last_end_s)  # it waited for the one before it
        self._last_end_s = times.end_s
        learned, tokens = self._learned, work.decode_rows + work.prefill_tokens
        attended = work.prefill_context_products + work.decode_context
        if learned is None or work.has_more or not work.prefill_tokens:
            return
        if times.end_s <= started_s or attended > LONG_CONTEXT * tokens:
            return
        seen = math.log((times.end_s - started_s) / (learned.fixed_s + learned.token_s * tokens))
        self._slowness += RATE * min(max(seen - self._slowness, -FURTHEST), FURTHEST)
        self._learned_s = now_s
        self._resize(learned)

    def forget_old(self, now_s: float) -> None:
        """Drop a slowness that was measured long before `now_s`: the machine may be fast again."""
        if self._slowness > 0.0 and now_s - self._learned_s > FORGOTTEN_S and self._learned is not None:
            self._slowness = 0.0
            self._resize(self._learned)

    def _resize(self, learned: LearnedSteps) -> None:
        ratio = math.exp(self._slowness)
        beside, alone = self._start
        self.beside = _fitting(learned, ratio, learned.beside_s, (beside, self.beside), learned.most)
        self.alone = _fitting(learned, ratio, learned.alone_s, (alone, self.alone), learned.most_alone)
        self.alone = max(self.alone, min(self.beside, learned.most_alone))


def _fitting(learned: LearnedSteps, ratio: float, target_s: float, sizes: tuple[int, int], most: int) -> int:
    """The size nearest to that of the start whose steps take about `target_s`; `sizes` are that one and the last."""
    start, last = sizes

    def within(seconds: float) -> int:
        return int((seconds / ratio - learned.fixed_s) / learned.token_s) // GRAIN * GRAIN

    size = min(max(start, within(target_s)), max(within(TOLERATED * target_s), learned.least))
    furthest = int(max(start, last) * GROWTH)
    return max(min(size, furthest, most), min(learned.least, most))
