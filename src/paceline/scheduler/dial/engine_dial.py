"""The dial of one engine: its setting, its position, what it observed, and the limits that follow.

Gets every delivery of tokens while it is on, and is asked once a step whether it is time to move. Knows times only as
numbers it is given: the engine's clock, so that a replay moves in the same way. Recording a move and applying
the limits is the business of `steering` and of `step`.
Decision: docs/decisions/0024-the-dial.md.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.core.dial import OFF, DialKind, DialSetting, DialStatus, DialWord, format_time, setting_of
from paceline.scheduler.step_sizes import StepSizes

# Holding a target: from what was seen and where the dial stands to where it should stand. Pure, and small moves only.
#
# Too long is corrected soon, too short only when it is clearly so and when a limit of the dial is what made it so: a
# position that changes nothing is not moved further (no wind-up). A dial that has to turn back waits twice as long
# before it tries again, so that noise and the coarse steps of a table end in a rest, not in an oscillation.


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
            self.fewest = min(costs.sizes[0], costs.LONG, most)
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
# Logarithm below which it does not rest: half the target is another load than the one that was noisy.
FAR = 0.7
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


# Quantiles of what was seen lately, in fixed memory: counts by size, in slices of which the oldest go.
#
# Sizes grow by two percent from a tenth of a millisecond on, so that a quantile is right within one percent. Adding
# costs the same for any number of values in the window; nothing here knows a clock, the caller says when to turn.
# Bounds come from products alone, so that every machine sorts a value into the same place.


GROWTH = 1.02
LEAST_S, NUM_SIZES = 1e-4, 815  # up to a thousand seconds
NUM_SLICES = 8
_BOUNDS = np.array(
    list(accumulate(repeat(GROWTH, NUM_SIZES - 1), lambda bound, by: bound * by, initial=LEAST_S))
)

Seconds = NDArray[np.float64]


class Window:
    """Times of one kind."""

    def __init__(self) -> None:
        self._slices: NDArray[np.int64] = np.zeros((NUM_SLICES, NUM_SIZES + 1), np.int64)
        self._counts: NDArray[np.int64] = np.zeros(NUM_SIZES + 1, np.int64)  # of all slices
        self._marked = [0] * NUM_SLICES
        self._times = [0] * NUM_SLICES
        self._now = 0
        self.total = 0

    def add(self, seconds: Seconds, *, marked: bool = False) -> None:
        """Add values, one at least; `marked` ones are also counted separately."""
        first = seconds[0]
        if (seconds == first).all():  # rows that decode side by side all have the same gap
            place = int(np.searchsorted(_BOUNDS, first))
            self._slices[self._now, place] += len(seconds)
            self._counts[place] += len(seconds)
        else:
            found = np.bincount(np.searchsorted(_BOUNDS, seconds), minlength=NUM_SIZES + 1)
            self._slices[self._now] += found
            self._counts += found
        self.total += len(seconds)
        self._times[self._now] += 1
        if marked:
            self._marked[self._now] += len(seconds)

    def turn(self) -> None:
        """A slice is over: the oldest one is forgotten."""
        self._now = (self._now + 1) % NUM_SLICES
        oldest = self._slices[self._now]
        self._counts -= oldest
        self.total -= int(oldest.sum())
        oldest[:] = 0
        self._marked[self._now] = self._times[self._now] = 0

    def clear(self) -> None:
        self._slices[:] = 0
        self._counts[:] = 0
        self._marked = [0] * NUM_SLICES
        self._times = [0] * NUM_SLICES
        self.total = 0

    @property
    def times(self) -> int:
        """How often values were added: values that came together are not independent of each other."""
        return sum(self._times)

    @property
    def marked_share(self) -> float:
        return sum(self._marked) / self.total if self.total else 0.0

    def quantile(self, share: float, beside: Seconds | None = None) -> float | None:
        """What all but `1 - share` of the values stay below, those of `beside` counted too; None without values."""
        counts, total = self._counts, self.total
        if beside is not None and len(beside):
            counts = counts + np.bincount(np.searchsorted(_BOUNDS, beside), minlength=NUM_SIZES + 1)
            total += len(beside)
        if not total:
            return None
        place = int(np.searchsorted(np.cumsum(counts), share * total))
        place = min(max(place, 1), NUM_SIZES - 1)
        return float(0.5 * (_BOUNDS[place - 1] + _BOUNDS[place]))


P99 = 0.99
# A p99 of fewer steps is the longest of them, which may have stalled: then a p90 is looked at.
ENOUGH_STEPS, P90 = 100, 0.9
FEW_STEPS = 8  # without which nothing is judged
# Between two judgements: a second, or this number of targets if that is less.
SECOND_S, GAPS_APART, LEAST_APART_S = 1.0, 30.0, 0.05
# Of each target: judgements to a slice of the window, values without which nothing is judged and nothing is relaxed.
SLICES = {DialKind.ITL: 1.0, DialKind.TTFT: 5.0}
FEWEST = {DialKind.ITL: (50, 400), DialKind.TTFT: (50, 150)}
LARGEST_RELAXING = {DialKind.ITL: 0.06, DialKind.TTFT: 0.03}
AHEAD = 0.97  # of a target, for the first place where step costs are known: steps vary
BINDING = 0.01  # share of tokens whose step was cut by the limits: only then is it they that make the p99
TOO_SHORT = {DialKind.ITL: 0.10, DialKind.TTFT: 0.40}

Index = NDArray[np.int64]
Waits = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The dial has looked: from where to where it moved, and what it saw."""

    before: float
    after: float
    seen_s: float
    word_before: DialWord
    word: DialWord


class Dial:
    """Off until it is set."""

    def __init__(self, config: SchedulerConfig, num_rows: int, sizes: StepSizes | None = None) -> None:
        """`sizes` are those of steps while it is off."""
        self.config = config
        self._sizes = sizes if sizes is not None else StepSizes(config)
        self._range = DialRange(config)
        self._last_s = np.full(num_rows, np.nan)  # when each row got its last token
        self._gaps, self._firsts = Window(), Window()
        self._due_s = self._turn_s = 0.0  # when it looks again, and when the next slice begins
        self._apart_s = SECOND_S
        self._controller: Controller | None = None
        self.setting = OFF
        self.position = self._place_of_config()
        self.limits: DialLimits | None = None  # None: those of the config
        # That may run, here and wherever steps are cut first.
        self._most_rows = self._target_rows = config.max_num_seqs
        self.moves = 0
        self.reason = ""
        self.fewest = config.fewest_step_tokens  # prompt tokens that every step so far was allowed
        setting = setting_of(config)
        if setting is not None:
            self.set(setting)

    @property
    def watches(self) -> bool:
        return self.limits is not None

    @property
    def word(self) -> DialWord:
        if self._controller is not None:
            return self._controller.word
        return DialWord.OFF if self.limits is None else DialWord.FIXED

    def set(self, setting: DialSetting) -> None:
        """Another setting from now on. A target begins where the dial stands, or where step costs say it is held."""
        if self.limits is None:
            self._last_s[:] = np.nan
        self.setting, self.moves, self.reason = setting, 0, ""
        self._controller = None
        self._gaps.clear()
        self._firsts.clear()
        self._due_s = self._turn_s = 0.0
        self._apart_s = min(max(GAPS_APART * (setting.target_s or SECOND_S), LEAST_APART_S), SECOND_S)
        if setting.kind is DialKind.OFF:
            self.position, self.limits = self._place_of_config(), None
            return
        position = self.position
        self._most_rows = self._target_rows = self._range.rows
        if setting.kind is DialKind.POSITION:
            position = round(setting.value, 4)
        else:
            law = self._law(setting)
            self._controller = Controller(law)
            if setting.kind is DialKind.ITL and self._range.by_time:
                position = self._range.position_of(law.target_s * AHEAD)
                if law.low < ROWS_PART:
                    self._most_rows = self._target_rows = self._range.rows_within(law.target_s)
            position = min(max(position, law.low), law.high)
        self.fewest = min(self.fewest, self._range.fewest)
        self._stand(position)

    # -- what is seen --------------------------------------------------------------------------------------

    def tokens(self, rows: Index, place: Index, now_s: float, *, is_full: bool) -> None:
        """Rows got a token, their `place`-th since they joined; `is_full`: the step was cut by its limits.

        The first since a row joined has no gap here: waiting for a row is not what the dial can shorten.
        """
        gaps = now_s - self._last_s[rows]
        self._last_s[rows] = now_s
        gaps = gaps[(place > 0) & np.isfinite(gaps)]
        if len(gaps):
            self._gaps.add(gaps, marked=is_full)

    def first_token(self, seconds: float) -> None:
        self._firsts.add(np.array([seconds]))

    # -- moving --------------------------------------------------------------------------------------------

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._due_s

    def judge(self, now_s: float, *, rows: int, waits: Waits) -> Judgement | None:
        """Look at the window and move. `rows` are taken now; `waits` is how long each request has waited so far."""
        controller, limits = self._controller, self.limits
        assert limits is not None
        kind = DialKind.TTFT if self.setting.kind is DialKind.TTFT else DialKind.ITL
        of_gaps = kind is DialKind.ITL
        window, beside = (self._gaps, None) if of_gaps else (self._firsts, waits)
        num_seen = window.total + (0 if beside is None else len(beside))
        enough = num_seen >= FEWEST[kind][0] and (not of_gaps or window.times >= FEW_STEPS)
        seen_s = window.quantile(P99, beside) if enough else None
        if seen_s is None:
            return None
        if of_gaps and window.times < ENOUGH_STEPS:
            seen_s = self._of_few_steps(seen_s)
        self._due_s = now_s + self._apart_s
        before, word_before = self.position, self.word
        if controller is not None:
            crowded = self.position < ROWS_PART and len(waits) > 0 and rows >= limits.rows
            binds = not of_gaps or crowded or window.marked_share >= BINDING
            settled = not of_gaps or rows <= limits.rows
            after = controller.judge(before, seen_s, window.total, binds=binds, settled=settled)
            if after >= ROWS_PART:
                self._most_rows = self._target_rows
            elif before >= ROWS_PART:
                # Fewer than run now: to allow fewer than might run would change nothing.
                self._most_rows = min(max(rows, 1), self._target_rows)
            self._stand(after)
            self.reason = self._reason(seen_s) if controller.word is DialWord.UNREACHABLE else ""
        if self.position != before:
            self.moves += 1
            self._gaps.clear()
            self._firsts.clear()
            self._turn_s = now_s + SLICES[kind] * self._apart_s
        elif now_s >= self._turn_s:
            self._gaps.turn()
            self._firsts.turn()
            self._turn_s = now_s + SLICES[kind] * self._apart_s
        return Judgement(
            before=before, after=self.position, seen_s=seen_s, word_before=word_before, word=self.word
        )

    def _of_few_steps(self, p99_s: float) -> float:
        """What a p99 of few steps tells: that it is too long only where one step in ten is."""
        target_s = self.setting.target_s
        if target_s is None or p99_s <= target_s:
            return p99_s
        return max(self._gaps.quantile(P90) or 0.0, target_s)

    def status(self) -> DialStatus:
        config, limits = self.config, self.limits
        gaps, firsts = (window.quantile(P99) for window in (self._gaps, self._firsts))
        target_s = (config.step_target_ms or 0.0) / 1e3 if config.keeps_pace else None
        if limits is not None:
            target_s = limits.target_s
        return DialStatus(
            setting=self.setting,
            word=self.word,
            reason=self.reason,
            position=self.position,
            itl_p99_ms=_milliseconds(gaps),
            ttft_p99_ms=_milliseconds(firsts),
            step_target_ms=_milliseconds(target_s),
            max_step_tokens=self._sizes.beside if limits is None else limits.tokens,
            max_prompt_tokens=self._sizes.alone if limits is None else limits.tokens,
            prompt_share=config.long_prefill_share if limits is None else limits.share,
            max_rows=config.max_num_seqs if limits is None else limits.rows,
            moves=self.moves,
            reversals=0 if self._controller is None else self._controller.reversals,
        )

    # -- helpers -------------------------------------------------------------------------------------------

    def _stand(self, position: float) -> None:
        self.position, self.limits = position, self._range.at(position, self._most_rows)

    def _place_of_config(self) -> float:
        config = self.config
        if config.keeps_pace and config.step_target_ms:
            return self._range.position_of(config.step_target_ms / 1e3)
        return 1.0

    def _law(self, setting: DialSetting) -> Law:
        target_s = setting.target_s
        assert target_s is not None
        if setting.kind is DialKind.TTFT:
            tightens, low = 1, ROWS_PART
        else:
            # Fewer rows do not help where the shortest step with prompts is already too long.
            hopeless = self._range.by_time and self._range.low >= target_s
            tightens, low = -1, ROWS_PART if hopeless else 0.0
        return Law(
            target_s=target_s,
            tightens=tightens,
            slope=self._range.slope,
            low=low,
            high=1.0,
            too_short=TOO_SHORT[setting.kind],
            largest_relaxing=LARGEST_RELAXING[setting.kind],
            fewest=FEWEST[setting.kind][1],
        )

    def _reason(self, seen_s: float) -> str:
        limits = self.limits
        assert limits is not None
        seen = f"the p99 seen is {format_time(seen_s)}"
        if self.setting.kind is DialKind.TTFT:
            return (
                f"{seen} although every step gives prompts all it may ({limits.tokens:,} tokens); "
                "send fewer requests, add an engine or raise the target"
            )
        shortest = "" if limits.target_s is None else f" ({format_time(limits.target_s)} with prompts)"
        return (
            f"{seen} although steps are as short as they can be{shortest} and no more than {limits.rows:,} "
            "rows may run; raise the target or take a smaller model"
        )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
