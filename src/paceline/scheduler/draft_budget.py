"""How many drafts a step verifies: those that are worth their time.

A draft is a guess of a token behind the next one. Verifying it costs a token's time and gives a token if all guesses
up to it are right. It pays where the chance of that is above

    tokens per second now  x  seconds of one token more

which is a small number while few rows decode, and nearly 1 when many do. The chance of a draft is the product of the
trust in the drafts up to it, learnt from how drafts of the same kind have fared; seconds are a line through what steps
took. Both come with results, which the run log has, so that a replay decides the same. A step costs the same few
operations however many rows there are; the runner, which has the tokens, makes the drafts and leaves out those below
the floor.
Decision: docs/decisions/0036-drafts.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import DraftConfig, SchedulerConfig
from paceline.core.plan import DRAFT_KINDS, F32, NO_TRUST, StepPlan, StepResult, StepWork
from paceline.scheduler.modes import Mode

FIRST_TRUST = 0.5
PRIOR = 4.0  # drafts that the first trust counts for
KEPT = 0.98  # of what is known of a kind, when 16 more of it have been compared
MOVED = 0.02  # a change of trust that the runner is told of
MARGIN = 1.05  # what is predicted must be better by this
LATELY = 0.1  # weight of the last step in how many drafts are right
LINE_KEPT = 0.97  # of what is known of step times, with each step
LINE_PRIOR = 8.0  # steps that the line of the start counts for


class DraftBudget:
    """Chooses for each step, and learns from each result."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        self.width = width
        self.floor = 0.0
        self._line = StepLine(config.fixed_s, config.token_s)
        self._compared: NDArray[np.float64] = np.zeros(DRAFT_KINDS)
        self._equal: NDArray[np.float64] = np.zeros(DRAFT_KINDS)
        self._trust: F32 = np.full(DRAFT_KINDS, FIRST_TRUST, np.float32)
        self._told: F32 = NO_TRUST
        self.right = 0.0  # drafts per row and step that were right, lately

    def choose(self, rows: int, left: int) -> tuple[int, int]:
        """Most drafts of a row and of all rows, where so many rows decode and so many tokens are left."""
        fixed_s, token_s = self._line.values()
        seconds = fixed_s + token_s * rows
        rate = rows * (1.0 + self.right) / seconds if seconds > 0.0 else 0.0
        self.floor = min(MARGIN * rate * token_s, 1.0)
        tokens = min(left, rows * self.width)
        if tokens < 1 or self.floor >= 1.0:
            return 0, 0
        return self.width, tokens

    def stamp(self, plan: StepPlan, width: int, tokens: int) -> StepPlan:
        """The plan with what the runner needs to know of drafts."""
        trust = NO_TRUST
        if not len(self._told) or np.abs(self._trust - self._told).max() > MOVED:
            trust = self._told = self._trust.copy()
        return plan._replace(draft_width=width, draft_tokens=tokens, draft_floor=self.floor, trust=trust)

    def learn(self, work: StepWork, result: StepResult) -> None:
        """A step has run."""
        verified = int(result.verified.sum()) if len(result.verified) else 0
        times = result.times
        if (
            work.decode_rows
            and not work.prefill_tokens
            and not work.swap_blocks
            and times.end_s > times.start_s
        ):
            self._line.learn(work.decode_rows + verified, times.end_s - times.start_s)
        if work.decode_rows and not work.prefill_tokens:
            right = max(0.0, float(result.count.sum()) / work.decode_rows - 1.0)
            self.right += LATELY * (right - self.right)
        if result.drafts is None:
            return
        compared, equal = result.drafts
        kept = KEPT ** (compared / 16.0)
        self._compared = self._compared * kept + compared
        self._equal = self._equal * kept + equal
        trust = (self._equal + FIRST_TRUST * PRIOR) / (self._compared + PRIOR)
        self._trust = trust.astype(np.float32)


class StepLine:
    """Seconds of a step of decoding rows as a line over its tokens, through what the last steps took."""

    def __init__(self, fixed_s: float, token_s: float) -> None:
        self._start = (fixed_s, token_s)
        self._ratio = 1.0
        self._sums = np.zeros(5)  # of 1, tokens, tokens squared, seconds, seconds times tokens

    def learn(self, tokens: int, seconds: float) -> None:
        self._sums *= LINE_KEPT
        self._sums += (1.0, tokens, tokens * tokens, seconds, seconds * tokens)

    def values(self) -> tuple[float, float]:
        """Seconds of a step, and of a token more; the slope of the start, where sizes of steps have not differed."""
        number, tokens, squares, seconds, products = self._sums.tolist()
        fixed_s, token_s = self._start
        if number < 1.0:
            return fixed_s, token_s
        mean, mean_s = tokens / number, seconds / number
        expected_s = fixed_s + token_s * mean
        slope = token_s * (mean_s / expected_s) if expected_s > 0.0 else 0.0  # on a slower machine, steeper
        spread = squares - tokens * mean
        # The slope of the start counts for so many steps whose sizes lay a token apart.
        slope = (products - seconds * mean + LINE_PRIOR * slope) / (spread + LINE_PRIOR)
        slope = min(max(slope, 0.0), mean_s / mean)
        return mean_s - slope * mean, slope


def make_budget(config: SchedulerConfig, block_size: int, mode: Mode) -> DraftBudget | None:
    """None: no drafts are made. A row's drafts lie in two blocks at most."""
    drafts = config.drafts
    if drafts is None or mode.keeps_finished:
        return None
    width = min(drafts.width, block_size - 1)
    return DraftBudget(drafts, width) if width > 0 else None
