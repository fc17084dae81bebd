"""How many drafts a step verifies: those that are worth their time.

A draft is a guess of a token behind the next one. Verifying it costs a token's time and gives a token if all guesses
up to it are right. It pays where the chance of that is above

    tokens per second now  x  seconds of one token more

which is a small number while few rows decode, and nearly 1 when many do. The chance of a draft is the product of the
trust in the drafts up to it, learnt from how drafts of the same kind have fared; seconds are learnt from what steps of
each size took. Both come with results, which the run log has, so that a replay decides the same. A step costs the
same few operations however many rows there are; the runner, which has the tokens, makes the drafts and leaves out
those below the floor. Tokens that a guide is certain of are worth it wherever one more token costs less than a row's
share of a step: there is room for them while answers with guides have had some lately, whatever guesses are worth.

On a GPU (`SizedBudget`) steps have a few sizes, and one costs the same however much of it is used: drafts fill what
room there is, the likeliest first. What a size brings follows from what rows have been offered lately: the share of
rows with a draft of each kind, and the trust in that. Sorted by chance that is a curve, drafts of a row over those of
them that are right, renewed with every few results; a step asks it at each size. Seconds of each size are measured at
the start and corrected by what steps take.
Decisions: docs/decisions/0036-drafts.md, docs/decisions/0040-drafts-on-the-gpu.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.config.speculative import DraftConfig
from paceline.core.fast import total
from paceline.core.plan import (
    DRAFT_KINDS,
    F32,
    LEAST_CHANCE,
    NO_TRUST,
    DraftTally,
    StepResult,
    StepWork,
    draft_depth,
)
from paceline.scheduler.modes import Mode

F64 = NDArray[np.float64]

FIRST_TRUST = 0.5
PRIOR = 4.0  # drafts that the first trust counts for
FORGETTING = math.log(0.98) / 16  # of what is known of a kind, 0.98 are left when 16 more have been compared
TALLIES = 4  # that are learnt from at once
MOVED = 0.01  # a change of trust that the runner is told of
MARGIN = 1.05  # what is predicted must be better by this
LATELY = 0.1  # weight of the last step in how many drafts are right
FEWEST_CERTAIN = 0.05  # tokens a step that guides are certain of, for which room is made
# Weights of the last step in what is known of step times. A machine that gets slower must be noticed before a size is
# taken for dear.
LEVEL, FACTOR, NEW_FACTOR = 0.15, 0.03, 0.1
MOST_SURPRISE = 2.0
RECORD_S = 1.0  # least time between two decisions on record


class DraftBudget:
    """Chooses for each step, and learns from each result."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        self.width = width
        self.floor = 0.0
        self._seconds = StepSeconds(config.fixed_s, config.token_s)
        self._drafted = 1.0  # drafts of a step that has any, lately
        self._certain = 0.0  # tokens that guides were certain of, in a step with guides, lately
        self._is_guided = False  # the last step had guides
        self._is_for_certain = False  # the room that was made last
        self._compared: F64 = np.zeros(DRAFT_KINDS)
        self._equal: F64 = np.zeros(DRAFT_KINDS)
        self._trust: F64 = np.full(DRAFT_KINDS, FIRST_TRUST)
        self._tallies: list[DraftTally] = []  # that nothing was learnt from yet
        self._best = 1.0  # trust of the kinds that were seen; at first none was
        self._told: F32 = NO_TRUST
        self._is_told = False
        self.right = 0.0  # drafts per row and step that were right, lately
        self.chosen = 0  # most drafts of a row in the last step that decoded
        self.recorded = 0  # width of the last decision on record
        self._recorded_s = -math.inf

    def choose(self, rows: int, left: int, prompt_tokens: int = 0) -> tuple[int, int]:
        """Most drafts of a row and of all rows, where so many rows decode beside so many tokens of prompts, and so many
        tokens are left."""
        plain = self._seconds(rows)
        if prompt_tokens:  # which are computed in any case: what drafts take is taken from steps without them
            token = self._seconds.of_prompts
        else:
            more = max(1, round(self._drafted))
            token = max(self._seconds(rows + more) - plain, 0.0) / more
        rate = rows * (1.0 + self.right) / plain if plain > 0.0 else 0.0
        self.floor = min(MARGIN * rate * token, 1.0)
        # Room is made for what the best kind may have: a row with room for drafts is known only within bounds.
        width = draft_depth(self._best, self.floor, self.width) if self.floor < 1.0 else 0
        self._is_for_certain = self._is_guided and self._certain >= FEWEST_CERTAIN and rows * token <= plain
        if self._is_for_certain:
            width = self.width
        tokens = min(left, rows * width)
        self.chosen = width if tokens > 0 else 0
        return self.chosen, max(tokens, 0)

    def gains(self, rows: int, width: int) -> tuple[float, float]:
        """Speed with drafts over speed without, for so many rows: as trust has it, if every row has as many as it may
        (or with what guides are certain of, if room is made for that), and as the last steps have had it."""
        plain = self._seconds(rows)
        best, drafted = self._best, max(1, round(self._drafted))
        if plain <= 0.0:
            return 1.0, 1.0
        expected, tokens = 1.0 + sum(best**depth for depth in range(1, width + 1)), rows + rows * width
        if width and self._is_for_certain:
            expected, tokens = 1.0 + self._certain / rows, rows + max(1, round(self._certain))
        predicted = expected * plain / self._seconds(tokens)
        return predicted, (1.0 + self.right) * plain / (
            self._seconds(rows + drafted) if self.right else plain
        )

    def is_news(self, width: int, now_s: float) -> bool:
        """Whether this width is another than the one that was put on record last, some time ago."""
        if width == self.recorded or now_s - self._recorded_s < RECORD_S:
            return False
        self._recorded_s = now_s
        return True

    def tell_trust(self) -> F32:
        """The chance of each kind, if it has moved since the runner was told."""
        if self._is_told:
            return NO_TRUST
        self._is_told = True
        if len(self._told) and np.abs(self._trust - self._told).max() <= MOVED:
            return NO_TRUST
        self._told = self._trust.astype(np.float32)
        return self._told

    def learn(self, work: StepWork, result: StepResult, room: int = 0) -> None:
        """A step has run, with room for this many drafts; here, those that were made count."""
        verified = int(total(result.verified)) if len(result.verified) else 0
        times = result.times
        self._is_guided = result.guided is not None
        if result.guided is not None:
            self._certain += LATELY * (result.guided.certain - self._certain)
        if verified:
            self._drafted += LATELY * (verified - self._drafted)
        if work.decode_rows and not work.prefill_tokens and not work.has_more:
            if times.end_s > times.start_s:
                self._seconds.learn(work.decode_rows + verified, times.end_s - times.start_s)
            right = max(0.0, float(total(result.count)) / work.decode_rows - 1.0)
            self.right += LATELY * (right - self.right)
        elif work.prefill_tokens and not work.has_more and times.end_s > times.start_s:
            tokens = work.decode_rows + verified
            self._seconds.learn_prompts(tokens, work.prefill_tokens, times.end_s - times.start_s)
        self.learn_drafts(result.drafts)

    def learn_drafts(self, tally: DraftTally | None) -> None:
        """How drafts fared."""
        if tally is None:
            return
        self._tallies.append(tally)
        if len(self._tallies) < TALLIES:
            return
        compared, equal, _ = total(self._tallies)
        self._tallies.clear()
        kept = np.exp(compared * FORGETTING)
        self._compared = self._compared * kept + compared
        self._equal = self._equal * kept + equal
        self._trust = (self._equal + FIRST_TRUST * PRIOR) / (self._compared + PRIOR)
        self._best = float((self._trust * np.minimum(self._compared, 1.0)).max())
        self._is_told = False


class StepSeconds:
    """Seconds of a step of decoding rows by its tokens, in units that cancel where one is divided by another.

    The line of the start gives what nothing is known of; what steps took gives each size a factor. A factor is kept
    relative to the mean of the last steps of all sizes, so that longer contexts, or a slower machine, change no ratio.
    Steps are not a line: kernels take rows in fours.
    """

    def __init__(self, fixed_s: float, token_s: float) -> None:
        self._fixed_s, self._token_s = fixed_s, token_s
        self._level = 0.0  # of all sizes, lately
        self._factors: dict[int, float] = {}
        self._sizes: list[int] = []  # that have one, in order
        self._prompts_s = self._prompts = 0.0  # of the last steps with prompts, beside what their rows took

    def learn(self, tokens: int, seconds: float) -> None:
        base_s = self._base(tokens)
        if base_s <= 0.0:
            return
        seen, level = seconds / base_s, self._level
        if not level:
            self._level = level = seen
        seen = min(seen, MOST_SURPRISE * level)  # a stall says nothing of the steps after it
        factor = self._factor(tokens)
        self._level += LEVEL * (seen / factor - level)
        weight = FACTOR
        if tokens not in self._factors:
            weight = NEW_FACTOR
            insort(self._sizes, tokens)
        self._factors[tokens] = factor + weight * (seen / level - factor)

    def learn_prompts(self, tokens: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many tokens of decoding rows read so many of prompts too."""
        more = max(seconds / (self._level or 1.0) - self(tokens), 0.0)
        self._prompts_s += FACTOR * (more - self._prompts_s)
        self._prompts += FACTOR * (prompt_tokens - self._prompts)

    @property
    def of_prompts(self) -> float:
        """Seconds of a token beside prompts: what one of the prompts' takes."""
        return self._prompts_s / self._prompts if self._prompts else self._token_s

    def __call__(self, tokens: int) -> float:
        return self._base(tokens) * self._factor(tokens)

    def _base(self, tokens: int) -> float:
        return self._fixed_s + self._token_s * tokens

    def _factor(self, tokens: int) -> float:
        """Of this size, or of the next smaller one that is known."""
        factors = self._factors
        if tokens in factors:
            return factors[tokens]
        below = bisect_left(self._sizes, tokens)
        return factors[self._sizes[below - 1]] if below else 1.0


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
