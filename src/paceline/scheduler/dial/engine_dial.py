"""The dial of one engine: its setting, its position, what it observed, and the limits that follow.

Gets every delivery of tokens while it is on, and is asked once a step whether it is time to move. Knows times only as
numbers it is given: the engine's clock, so that a replay moves in the same way. Recording a move and applying
the limits is the business of `steering` and of `step`.
Decision: docs/decisions/0024-the-dial.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.core.dial import OFF, DialKind, DialSetting, DialStatus, DialWord, format_time, setting_of
from paceline.scheduler.dial.control import ROWS_PART, Controller, DialLimits, DialRange, Law
from paceline.scheduler.step_sizes import StepSizes

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
