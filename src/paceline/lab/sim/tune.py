"""Which settings of an engine keep an SLO at the highest rate: a search in the simulator.

Owns the search. At a rate just above the best one so far, one knob after the other is turned to where the SLO is missed
by least, until it is kept; then the highest rate of that setting is the next to beat. Everything is decided by the
workload, the seed and the order of the knobs; only a limit of time can cut it short. What a simulation is, the caller
says; it may end one early by raising `TimeIsUp`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.errors import InputError
from paceline.lab.report.summary import Summary

BETTER = 1.02  # how much higher the rate is at which a better setting is looked for
LOWER = 1.005  # by how much a setting must lower the pressure to take the place of another
FAR = 4.0  # by how much a setting must raise the pressure for values beyond it not to be tried
LISTED = 2.0  # by how much a listed setting may miss the SLO, or the best one where none keeps it
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

    def away_from(self, value: Value) -> list[list[Value]]:
        """The other values by direction, nearest first; names have no direction, and 0 is off, beyond the largest."""
        others = [other for other in self.values if other != value]
        if isinstance(value, str) or any(isinstance(other, str) for other in others):
            return [others]
        down = [other for other in others if _size(other) < _size(value)]
        up = [other for other in others if _size(other) > _size(value)]
        return [sorted(down, key=_size, reverse=True), sorted(up, key=_size)]


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


class TimeIsUp(Exception):
    """A simulation that was ended early; the search stops with what it has."""


Simulate = Callable[[Settings, float], Summary]  # settings and a rate to measures


class TuneSearch:
    """Finds the settings that keep the bounds at the highest rate, or with the most room at a given rate."""

    def __init__(
        self,
        simulate: Simulate,
        bounds: Sequence[Bound],
        knobs: Sequence[Knob],
        *,
        max_trials: int = 400,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Stops after `max_trials` simulations, or when `is_over` says so, whatever is left to try."""
        if not bounds:
            raise InputError("there is nothing to keep: give at least one bound")
        self.trials: list[Trial] = []
        self.was_cut = False  # a limit ended it before everything was tried
        self._simulate = simulate
        self._bounds = tuple(bounds)
        self._knobs = tuple(knobs)
        self._max_trials, self._is_over = max_trials, is_over
        self._known: dict[tuple[Key, float], Trial] = {}

    def highest_rate(self, start: Settings, first_rate: float) -> Trial | None:
        """The best setting at the highest rate it holds; None where nothing holds at any rate."""
        best = self._highest(start, first_rate)
        if best is None:
            # The setting it starts from may be what cannot keep the SLO: any other may do.
            moves = [{knob.name: value} for knob in self._knobs for value in knob.values]
            others = (self._highest({**start, **move}, first_rate) for move in moves)
            best = next((trial for trial in others if trial is not None), None)
        while best is not None and best.rate * BETTER <= HIGHEST_RATE:
            better = self.most_room(best.settings, best.rate * BETTER, until_it_holds=True)
            if better is None or not better.holds:
                break
            best = self._highest(better.settings, better.rate)
        return best

    def best_of(self, count: int, rate: float) -> list[Trial]:
        """The best settings at one rate, each once: of what was tried, those that came closest are run there."""
        hopeless = {
            _key(trial.settings) for trial in self.trials if trial.rate <= rate and trial.pressure > FAR
        }
        promising = sorted(self.trials, key=lambda trial: (-trial.rate * trial.holds, trial.pressure))
        different = list({_key(trial.settings): trial.settings for trial in promising}.values())
        kept = [settings for settings in different if _key(settings) not in hopeless] or different[:1]
        found = [self._try(settings, rate, always=True) for settings in kept[: 2 * count]]
        return _listed([trial for trial in found if trial is not None], count)

    def best_so_far(self, count: int, rate: float | None) -> list[Trial]:
        """The like without another simulation, for a search that was broken off: of what was tried at `rate`, or at the
        highest rate at which any held. Empty where there is nothing of the kind."""
        if rate is None:
            rate = max((trial.rate for trial in self.trials if trial.holds), default=math.nan)
        return _listed([trial for trial in self.trials if trial.rate == rate], count)

    # -- the search ----------------------------------------------------------------------------------------

    def most_room(self, start: Settings, rate: float, *, until_it_holds: bool = False) -> Trial | None:
        """The setting that stays furthest below its bounds at `rate`, or the first that keeps them.

        Lowers the pressure, one knob at a time, until no knob does any more, nor two of them together.

        What a knob does to a tail is not smooth enough to follow its slope: values are tried from the nearest on, until
        one is worse by `FAR`.
        """
        first = self._try(start, rate)
        if first is None:
            return None
        descent = _Descent(first, until_it_holds=until_it_holds)
        while not descent.is_over:
            before = descent.best
            for path in self._paths(before.settings):
                self._follow(path, descent)
            if descent.best is before:
                # More rows may help only with smaller steps, and the other way round.
                for pair in self._pairs(descent.far):
                    self._follow([pair], descent)
            if descent.best is before:
                break
        return descent.best

    def _follow(self, path: Sequence[Mapping[str, Value]], descent: _Descent) -> None:
        """Try one change after the other, until there is no time or the rest is hopeless."""
        for position, move in enumerate(path):
            if descent.is_over:
                return
            best = descent.best
            trial = self._try({**best.settings, **move}, best.rate)
            if trial is None:
                descent.has_time = False
                return
            if trial.pressure * LOWER < best.pressure:
                descent.best = trial
            elif trial.pressure > FAR * best.pressure and len(move) == 1:
                descent.far.update(item for rest in path[position:] for item in rest.items())
                return

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
        if not always and (len(self.trials) >= self._max_trials or self._is_over()):
            self.was_cut = True
        if not always and self.was_cut:
            return None
        try:
            summary = self._simulate(settings, rate)
        except TimeIsUp:
            self.was_cut = True
            return None
        trial = Trial(
            settings=settings, rate=rate, summary=summary, pressure=pressure_of(summary, self._bounds)
        )
        self._known[key] = trial
        self.trials.append(trial)
        return trial

    def _paths(self, settings: Settings) -> list[list[dict[str, Value]]]:
        """Every knob in every direction."""
        return [
            [{knob.name: value} for value in values]
            for knob in self._knobs
            for values in knob.away_from(settings[knob.name])
        ]

    def _pairs(self, without: set[tuple[str, Value]]) -> list[dict[str, Value]]:
        """The first two knobs together, every second value of each."""
        if len(self._knobs) < 2:
            return []
        one, other = self._knobs[:2]
        return [
            {one.name: value, other.name: with_value}
            for value in one.values[::2]
            for with_value in other.values[::2]
            if (one.name, value) not in without and (other.name, with_value) not in without
        ]


@dataclass(slots=True)
class _Descent:
    """The best setting at one rate so far, and the values that were far worse."""

    best: Trial
    until_it_holds: bool
    far: set[tuple[str, Value]] = field(default_factory=set)
    has_time: bool = True

    @property
    def is_over(self) -> bool:
        return not self.has_time or (self.until_it_holds and self.best.holds)


def _listed(trials: Sequence[Trial], count: int) -> list[Trial]:
    """The best of them; one that misses by far more than the best is no advice."""
    ordered = sorted(trials, key=lambda trial: trial.pressure)
    most = LISTED * max(1.0, ordered[0].pressure) if ordered else 0.0
    return [trial for trial in ordered if trial.pressure <= most][:count]


def _size(value: Value) -> float:
    assert not isinstance(value, str)
    return value or math.inf


def pressure_of(summary: Summary, bounds: Sequence[Bound]) -> float:
    """How much of its bounds a run uses; infinite where a request was not served to its end."""
    if summary.requests["finished"] < sum(summary.requests.values()):
        return math.inf
    shares = [(bound.seen_s(summary) or 0.0) / bound.seconds for bound in bounds]
    return max(shares)


def _key(settings: Settings) -> Key:
    return tuple(sorted(settings.items()))
