"""Which settings of an engine keep an SLO at the highest rate: a search in the simulator.

Owns the search. At a rate just above the best one so far, one knob after the other is turned to where the SLO is missed
by least, until it is kept; then the highest rate of that setting is the next to beat. Everything is decided by the
workload, the seed and the order of the knobs; only a limit of time can cut it short. What a simulation is, the caller
says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import InputError
from paceline.report.summary import Summary

BETTER = 1.02  # how much higher the rate is at which a better setting is looked for
LOWER = 1.005  # by how much a setting must lower the pressure to take the place of another
CLIMB = 2.0  # by how much the rate is raised while the SLO holds
PRECISION = 1.03  # to which the highest rate is found
LOWEST_RATE, HIGHEST_RATE = 1e-4, 1e6  # beyond the highest all requests are there at once

Value = int | float | str
Settings = Mapping[str, Value]
Key = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a percentile of a time must stay under, such as the p99 of TTFT."""

    measure: str  # ttft, itl, e2e
    percentile: str  # p50, p90, p99
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.measure}_{self.percentile}"

    def seen_s(self, summary: Summary) -> float | None:
        found: float | None = getattr(getattr(summary, f"{self.measure}_s"), self.percentile)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """An option and the values it is tried with."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setting that was simulated at a rate."""

    settings: Settings
    rate: float
    summary: Summary
    pressure: float  # the largest of seen / bound: 1 and below keeps the SLO

    @property
    def holds(self) -> bool:
        return self.pressure <= 1.0


@dataclass(slots=True, kw_only=True)
class Limits:
    """When to stop, whatever is left to try."""

    max_trials: int = 400
    is_over: Callable[[], bool] = field(default=lambda: False)


Simulate = Callable[[Settings, float], Summary]  # settings and a rate to measures


class Search:
    """Finds the settings that keep the bounds at the highest rate, or with the most room at a given rate."""

    def __init__(
        self, simulate: Simulate, bounds: Sequence[Bound], knobs: Sequence[Knob], limits: Limits | None = None
    ) -> None:
        if not bounds:
            raise InputError("there is nothing to keep: give at least one bound")
        self.trials: list[Trial] = []
        self.was_cut = False  # a limit ended it before everything was tried
        self._simulate = simulate
        self._bounds = tuple(bounds)
        self._knobs = tuple(knobs)
        self._limits = limits or Limits()
        self._known: dict[tuple[Key, float], Trial] = {}

    def highest_rate(self, start: Settings, first_rate: float) -> Trial | None:
        """The best setting at the highest rate it holds; None where nothing holds at any rate."""
        best = self._highest(start, first_rate)
        if best is None:
            # The setting it starts from may be what cannot keep the SLO: any other may do.
            others = (self._highest({**start, **move}, first_rate) for move in self._singles())
            best = next((trial for trial in others if trial is not None), None)
        while best is not None and best.rate * BETTER <= HIGHEST_RATE:
            better = self._descend(best.settings, best.rate * BETTER, until_it_holds=True)
            if better is None or not better.holds:
                break
            best = self._highest(better.settings, better.rate)
        return best

    def most_room(self, start: Settings, rate: float) -> Trial | None:
        """The setting that stays furthest below its bounds at `rate`."""
        return self._descend(start, rate)

    def best_of(self, count: int, rate: float) -> list[Trial]:
        """The best settings at one rate, each once: of what was tried, those that came closest are run there."""
        promising = sorted(self.trials, key=lambda trial: (-trial.rate * trial.holds, trial.pressure))
        different = list({_key(trial.settings): trial.settings for trial in promising}.values())
        found = [self._try(settings, rate, always=True) for settings in different[: 2 * count]]
        there = [trial for trial in found if trial is not None]
        return sorted(there, key=lambda trial: trial.pressure)[:count]

    def best_so_far(self, count: int, rate: float | None) -> list[Trial]:
        """The like without another simulation, for a search that was broken off: of what was tried at `rate`, or at the
        highest rate at which any held. Empty where there is nothing of the kind."""
        if rate is None:
            rate = max((trial.rate for trial in self.trials if trial.holds), default=math.nan)
        there = [trial for trial in self.trials if trial.rate == rate]
        return sorted(there, key=lambda trial: trial.pressure)[:count]

    # -- the search ----------------------------------------------------------------------------------------

    def _descend(self, start: Settings, rate: float, *, until_it_holds: bool = False) -> Trial | None:
        """Lower the pressure at one rate, one knob at a time, until no knob does any more, nor two of them together.

        Every value of a knob is tried: what it does to a tail is not smooth enough to follow its slope.
        """
        best = self._try(start, rate)
        moves, is_last = self._singles(), False
        while best is not None:
            before = best
            for move in moves:
                if until_it_holds and best.holds:
                    return best
                trial = self._try({**best.settings, **move}, rate)
                if trial is None:
                    return best
                if trial.pressure * LOWER < best.pressure:
                    best = trial
            if best is before:
                if is_last:
                    return best
                # More rows may help only with smaller steps, and the other way round.
                moves, is_last = self._pairs(), True
            else:
                moves, is_last = self._singles(), False
        return best

    def _highest(self, settings: Settings, first_rate: float) -> Trial | None:
        """The highest rate at which these settings keep the SLO, to within `PRECISION`."""
        low: Trial | None = None
        rate, failed = first_rate, math.inf
        while LOWEST_RATE <= rate <= HIGHEST_RATE:
            trial = self._try(settings, rate)
            if trial is None:
                return low
            if trial.holds:
                low = trial
                if failed / rate <= PRECISION:
                    return low
                rate = rate * CLIMB if failed == math.inf else math.sqrt(rate * failed)
            else:
                failed = rate
                if low is not None and failed / low.rate <= PRECISION:
                    return low
                rate = rate / CLIMB**2 if low is None else math.sqrt(low.rate * failed)
        return low

    def _try(self, settings: Settings, rate: float, *, always: bool = False) -> Trial | None:
        """A simulation, or what it gave before; None when there is no more time."""
        key = (_key(settings), rate)
        if key in self._known:
            return self._known[key]
        if not always and self._is_over():
            return None
        summary = self._simulate(settings, rate)
        trial = Trial(
            settings=settings, rate=rate, summary=summary, pressure=pressure_of(summary, self._bounds)
        )
        self._known[key] = trial
        self.trials.append(trial)
        return trial

    def _singles(self) -> list[dict[str, Value]]:
        return [{knob.name: value} for knob in self._knobs for value in knob.values]

    def _pairs(self) -> list[dict[str, Value]]:
        """The first two knobs together, every second value of each."""
        if len(self._knobs) < 2:
            return []
        one, other = self._knobs[:2]
        return [
            {one.name: value, other.name: with_value}
            for value in one.values[::2]
            for with_value in other.values[::2]
        ]

    def _is_over(self) -> bool:
        if len(self.trials) >= self._limits.max_trials or self._limits.is_over():
            self.was_cut = True
        return self.was_cut


def pressure_of(summary: Summary, bounds: Sequence[Bound]) -> float:
    """How much of its bounds a run uses; infinite where a request was not served to its end."""
    if summary.requests["finished"] < sum(summary.requests.values()):
        return math.inf
    shares = [(bound.seen_s(summary) or 0.0) / bound.seconds for bound in bounds]
    return max(shares)


def _key(settings: Settings) -> Key:
    return tuple(sorted(settings.items()))
