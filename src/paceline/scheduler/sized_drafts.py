"""How many drafts a step of a GPU verifies: the size of step that gives the most tokens per second.

There, steps have a few sizes, and one costs the same however much of it is used: drafts fill what room there is, the
likeliest first. What a size brings follows from what rows have been offered lately: the share of rows with a draft of
each kind, and the trust in that. Sorted by chance that is a curve, drafts of a row over those of them that are right,
renewed with every few results; a step asks it at each size. Seconds of each size are measured at the start and
corrected by what steps take.
Decision: docs/decisions/0040-drafts-on-the-gpu.md.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.config.speculative import DraftConfig
from paceline.core.fast import total
from paceline.core.plan import DRAFT_KINDS, LEAST_CHANCE, StepResult, StepWork, draft_depth
from paceline.scheduler.draft_budget import FIRST_TRUST, LATELY, DraftBudget, StepSeconds
from paceline.scheduler.modes import Mode

F64 = NDArray[np.float64]

GAIN = 1.04  # what is predicted must be better by this
OFFERED = 0.2  # weight of the last tallies in how many rows have a draft of each kind
FADING = 0.998  # of what is known of a size, by each step of another one: it is tried again after hundreds
FEWEST = 1e-3  # a smaller share of rows than this counts for nothing


class SizedBudget(DraftBudget):
    """Chooses a size for each step, and learns from each result."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        super().__init__(config, width)
        self.floor = LEAST_CHANCE  # room that is there costs nothing
        self._sizes = config.sizes
        self._sized = SizedSeconds(config.sizes, config.seconds)
        self._share: F64 = np.zeros(DRAFT_KINDS)
        self._share[0] = 1.0  # at first: every row has drafts, half of them right
        self._is_new = True
        self._lately: F64 = np.zeros(DRAFT_KINDS)
        self._rows_lately = 0
        self._curve = self._offers(np.full(DRAFT_KINDS, FIRST_TRUST))
        self._asked = (0, 0)
        self._answer = (0, 0)
        self._last_end_s = 0.0

    def choose(self, rows: int, left: int, prompt_tokens: int = 0) -> tuple[int, int]:
        left = min(left, rows * self.width)
        if prompt_tokens or left < 1:  # steps with prompts verify none
            self.chosen = 0
            return 0, 0
        if (rows, left) != self._asked:
            self._asked, self._answer = (rows, left), self._best_size(rows, left)
        self.chosen = self._answer[0]
        return self._answer

    def _best_size(self, rows: int, left: int) -> tuple[int, int]:
        """Most drafts of a row and of all rows, in the size of step that promises most."""
        best, found = GAIN / self._sized(-rows), (0, 0)
        for size in self._sizes[bisect_left(self._sizes, rows + 1) :]:
            room = min(size - rows, left)
            right, edge = self._right(room / rows)
            rate = (1.0 + right) / self._sized(size)
            if rate > best:
                best, found = rate, (max(1, draft_depth(self._best, 0.99 * edge, self.width)), room)
            if room == left:
                break
        return found

    def _right(self, drafts: float) -> tuple[float, float]:
        """Of this many drafts of a row those that are right, and the chance of the last."""
        number, right, chance = self._curve
        at = bisect_left(number, drafts)
        if at == len(number):
            return right[-1], LEAST_CHANCE
        if not at:
            return 0.0, chance[0]
        return right[at - 1] + (drafts - number[at - 1]) * chance[at], chance[at]

    def gains(self, rows: int, width: int) -> tuple[float, float]:
        plain, room = self._sized(-rows), rows * width
        size = self._sizes[min(bisect_left(self._sizes, rows + room), len(self._sizes) - 1)]
        ratio = plain / self._sized(size)
        return (1.0 + self._right(width)[0]) * ratio, (1.0 + self.right) * (ratio if self.right else 1.0)

    def learn(self, work: StepWork, result: StepResult, room: int = 0) -> None:
        times = result.times
        started_s = max(times.start_s, self._last_end_s)  # it waited for the one before it
        self._last_end_s = times.end_s
        if work.decode_rows and not work.prefill_tokens and not work.has_more:
            if times.end_s > started_s:
                key = -work.decode_rows
                if len(result.verified):
                    at = bisect_left(self._sizes, work.decode_rows + room)
                    key = self._sizes[min(at, len(self._sizes) - 1)]
                self._sized.learn(key, times.end_s - started_s)
            right = max(0.0, float(total(result.count)) / work.decode_rows - 1.0)
            self.right += LATELY * (right - self.right)
        if result.drafts is None:
            return
        self._lately += result.drafts.offered
        self._rows_lately += work.decode_rows
        self.learn_drafts(result.drafts)
        if self._tallies:
            return
        share = self._lately / max(self._rows_lately, 1)
        self._share = share if self._is_new else self._share + OFFERED * (share - self._share)
        self._is_new = False
        self._lately[:] = 0.0
        self._rows_lately = 0
        self._curve = self._offers(self._trust)
        self._asked = (0, 0)

    def _offers(self, trust: F64) -> tuple[list[float], list[float], list[float]]:
        """By falling chance: drafts of a row up to each, those of them that are right, and its chance."""
        kinds = self._share > FEWEST
        chance = trust[kinds][:, None] ** np.arange(1, self.width + 1)
        share = np.broadcast_to(self._share[kinds][:, None], chance.shape).ravel()
        chance = chance.ravel()
        order = np.argsort(-chance, kind="stable")
        chance, share = chance[order], share[order]
        start = np.zeros(1)
        number = np.concatenate([start, np.cumsum(share)])
        right = np.concatenate([start, np.cumsum(share * chance)])
        return number.tolist(), right.tolist(), np.concatenate([chance[:1], chance]).tolist() or [0.0]


class SizedSeconds(StepSeconds):
    """Seconds of steps with drafts by their size, and of steps without by minus their rows.

    What is known of a size that is not used fades: it may have been slow because the host was busy then, and would
    never be tried again.
    """

    def __init__(self, sizes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        super().__init__(0.0, 0.0)
        self._of_size = (sizes, seconds)
        self._learnt: dict[int, int] = {}  # of each size, as how many-th
        self._number, self._last = 0, 1.0

    def learn(self, tokens: int, seconds: float) -> None:
        self._number += 1
        super().learn(tokens, seconds)
        self._learnt[tokens] = self._number
        self._last += LATELY * (self._factors.get(tokens, 1.0) - self._last)

    def _base(self, tokens: int) -> float:
        sizes, seconds = self._of_size
        return seconds[min(bisect_left(sizes, abs(tokens)), len(sizes) - 1)]

    def _factor(self, tokens: int) -> float:
        factor, learnt = super()._factor(tokens), self._learnt.get(tokens)
        if learnt is None:
            return factor
        return self._last + (factor - self._last) * FADING ** (self._number - learnt)


def make_budget(config: SchedulerConfig, block_size: int, mode: Mode) -> DraftBudget | None:
    """None: no drafts are made. A row's drafts lie in two blocks at most."""
    drafts = config.drafts
    if drafts is None or mode.keeps_finished:
        return None
    width = min(drafts.width, block_size - 1)
    if width < 1:
        return None
    return SizedBudget(drafts, width) if drafts.sizes else DraftBudget(drafts, width)
