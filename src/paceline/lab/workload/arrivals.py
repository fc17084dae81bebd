"""When requests arrive: the fitted processes of the generators and the redraws a user can ask for.

Every process is a Poisson process whose rate moves, drawn by time rescaling: unit-rate arrivals are mapped
through the inverse of the cumulative rate. Knows nothing of lengths, tenants or files. Times are rounded to
a microsecond, so that the last bits of a machine's logarithm do not show.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from enum import IntEnum
from statistics import NormalDist
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InputError

# Numbers drawn from fitted shapes: quantile tables, a Gaussian copula, seeded streams.
#
# Owns how a table of quantiles becomes samples and how two lengths of one request are tied together. Knows nothing
# of requests or traces. Every quantity has a separate stream, so that the first n requests of a workload do not
# depend on how many were asked for.


Floats = NDArray[np.float64]
NORMAL = NormalDist()


class RandomStream(IntEnum):
    """One independent stream of random numbers per quantity; the numbers are part of the result."""

    PROMPT = 0
    OUTPUT = 1
    ARRIVAL = 2
    INTENSITY = 3
    PAUSE = 4
    TENANT = 5
    SESSION = 6
    REDRAW = 7
    IMAGES = 8
    IMAGE_TOKENS = 9


def stream(seed: int, which: RandomStream) -> np.random.Generator:
    return np.random.default_rng([seed, int(which)])


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantileTable:
    """A distribution as its quantiles; between them straight, on a log scale if `geometric`."""

    levels: tuple[float, ...]  # ascending from 0 to 1
    values: tuple[float, ...]  # never descending; positive if geometric
    geometric: bool = True

    def __post_init__(self) -> None:
        assert len(self.levels) == len(self.values) and self.levels[0] == 0 and self.levels[-1] == 1
        assert all(a < b for a, b in zip(self.levels, self.levels[1:], strict=False))
        assert all(a <= b for a, b in zip(self.values, self.values[1:], strict=False))
        assert not self.geometric or self.values[0] > 0

    def at(self, level: Floats) -> Floats:
        if not self.geometric:
            return np.interp(level, self.levels, self.values)
        return np.exp(np.interp(level, self.levels, np.log(self.values)))

    def at_one(self, level: float) -> float:
        """`at` for one level, without the cost of an array."""
        right = min(bisect_right(self.levels, level), len(self.levels) - 1)
        low, high = self.levels[right - 1], self.levels[right]
        share = (level - low) / (high - low)
        first, last = self.values[right - 1], self.values[right]
        if self.geometric:
            return first * math.exp(share * math.log(last / first))
        return first + share * (last - first)


def normal_levels(values: Floats) -> Floats:
    """The cumulative normal probability of each value."""
    return np.array([NORMAL.cdf(value) for value in values.tolist()], dtype=np.float64)


def normal_correlation(rank_correlation: float) -> float:
    """The correlation of two normals whose ranks have this (Spearman) correlation."""
    return 2.0 * math.sin(math.pi / 6.0 * rank_correlation)


def draw_lengths(
    num_requests: int, seed: int, prompt: QuantileTable, output: QuantileTable, rank_correlation: float
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Prompt and output lengths with the tables' marginals, tied by a Gaussian copula."""
    first = stream(seed, RandomStream.PROMPT).standard_normal(num_requests)
    own = stream(seed, RandomStream.OUTPUT).standard_normal(num_requests)
    tie = normal_correlation(rank_correlation)
    second = tie * first + math.sqrt(1.0 - tie * tie) * own
    return whole(prompt.at(normal_levels(first))), whole(output.at(normal_levels(second)))


def whole(values: Floats) -> NDArray[np.int32]:
    """Lengths as whole numbers of at least one token."""
    return np.maximum(np.rint(values), 1.0).astype(np.int32)


ARRIVAL_FORMS = "recorded, poisson, constant, gamma:CV, onoff:ON_S,OFF_S[,BURST_FACTOR], all-at-once"
_PHASE_BOUNDS_S = (1e-3, 1e6)
_STRATUM_DRAWS = 64  # gamma draws behind each stratum; enough to place it, few enough to be free


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Slow or fast swings of the rate: a gamma factor of mean 1, redrawn every `window_s`."""

    window_s: float
    variance: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pauses:
    """Silences between stretches in which requests arrive; `per_cycle` of each make one cycle."""

    busy_s: QuantileTable
    pause_s: QuantileTable
    per_cycle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalProcess:
    """A Poisson process of mean `rate` times the product of its waves, with optional pauses and ticks.

    The factors of a wave are stratified over a cycle: every cycle holds each part of the gamma's range once,
    in random order. An hour therefore has the fitted mean rate and burstiness whatever the seed.
    """

    rate: float  # requests per second, while not paused
    cycle_s: float  # a multiple of every wave's window
    waves: tuple[Wave, ...]  # the finest window must divide the others
    profile: tuple[float, ...] = (1.0,)  # mean shape over a cycle, in equal slots
    pauses: Pauses | None = None
    tick_s: float = 0.0  # arrivals are recorded only every tick; 0: exactly

    def draw(self, num_requests: int, seed: int) -> Floats:
        unit = np.cumsum(stream(seed, RandomStream.ARRIVAL).standard_exponential(num_requests))
        times = self._rescale(unit, stream(seed, RandomStream.INTENSITY))
        if self.pauses is not None:
            times = _insert_pauses(times, self.pauses, stream(seed, RandomStream.PAUSE))
        if self.tick_s:
            times = np.floor_divide(times, self.tick_s) * self.tick_s
        return _rounded(times)

    def _rescale(self, unit: Floats, random: np.random.Generator) -> Floats:
        """The times at which the cumulative rate reaches each of the ascending values `unit`."""
        cell_s = min(wave.window_s for wave in self.waves)
        masses: list[Floats] = []
        total = 0.0
        while total <= unit[-1]:
            masses.append(self.rate * cell_s * self._cycle_factors(cell_s, random))
            total += float(masses[-1].sum())
        cumulative = np.concatenate(([0.0], np.cumsum(np.concatenate(masses))))
        times: Floats = np.interp(unit, cumulative, cell_s * np.arange(len(cumulative)))
        return times

    def _cycle_factors(self, cell_s: float, random: np.random.Generator) -> Floats:
        num_cells = round(self.cycle_s / cell_s)
        factors = np.repeat(np.array(self.profile), num_cells // len(self.profile))
        assert len(factors) == num_cells
        for wave in self.waves:
            num_windows = round(self.cycle_s / wave.window_s)
            assert num_cells % num_windows == 0
            factors = factors * np.repeat(
                _gamma_factors(num_windows, wave.variance, random), num_cells // num_windows
            )
        return factors


@dataclass(frozen=True, slots=True, kw_only=True)
class AllAtOnce:
    """Every request at time 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaGaps:
    """Independent gamma gaps; a coefficient of variation of 1 is a Poisson process, 0 is even spacing."""

    variation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OnOff:
    """Bursts: `burst` times the mean rate while on, what is left of the mean while off."""

    on_s: float
    off_s: float
    burst: float


Arrivals = AllAtOnce | GammaGaps | OnOff
POISSON = GammaGaps(variation=1.0)


def parse_arrivals(text: str) -> Arrivals | None:
    """`arrivals` of `load_workload` as a value, None for `recorded`; an InputError says which forms there are."""
    name, _, rest = text.partition(":")
    simple: dict[str, Arrivals | None] = {
        "recorded": None,
        "poisson": POISSON,
        "constant": GammaGaps(variation=0.0),
        "all-at-once": AllAtOnce(),
    }
    if text in simple:
        return simple[text]
    if name == "gamma":
        variation = _numbers(text, rest, counts=(1,))[0]
        if variation > 100:
            raise InputError(f"arrivals '{text}': the coefficient of variation must lie between 0 and 100")
        return GammaGaps(variation=variation)
    if name == "onoff":
        return _on_off(text, _numbers(text, rest, counts=(2, 3)))
    raise InputError(f"unknown arrivals '{text}'; the forms are {ARRIVAL_FORMS}")


def draw_arrivals(arrivals: Arrivals, num_requests: int, rate: float, seed: int) -> Floats:
    """Times of `num_requests` requests that arrive at `rate` a second on average."""
    random = stream(seed, RandomStream.REDRAW)
    match arrivals:
        case AllAtOnce():
            return np.zeros(num_requests, dtype=np.float64)
        case GammaGaps(variation=variation):
            return _rounded(np.cumsum(_gamma_gaps(variation, num_requests, random)) / rate)
        case OnOff():
            unit = np.cumsum(random.standard_exponential(num_requests))
            return _rounded(_on_off_times(arrivals, unit, rate))
        case _:
            assert_never(arrivals)


def _gamma_gaps(variation: float, num_requests: int, random: np.random.Generator) -> Floats:
    if variation < 1e-6:  # the shape 1 / variation**2 would overflow; this is even spacing to any observer
        return np.ones(num_requests, dtype=np.float64)
    if variation == 1.0:
        return random.standard_exponential(num_requests)
    shape = 1.0 / (variation * variation)
    return random.standard_gamma(shape, num_requests) / shape


def _on_off_times(arrivals: OnOff, unit: Floats, rate: float) -> Floats:
    cycle_s = arrivals.on_s + arrivals.off_s
    on_rate = rate * arrivals.burst
    on_mass = on_rate * arrivals.on_s
    off_rate = max(rate * cycle_s - on_mass, 0.0) / arrivals.off_s
    cycles, within = np.divmod(unit, rate * cycle_s)
    on = np.minimum(within, on_mass) / on_rate
    off = np.maximum(within - on_mass, 0.0) / off_rate if off_rate > 0 else np.zeros_like(within)
    return cycles * cycle_s + on + np.minimum(off, arrivals.off_s)


def _on_off(text: str, numbers: list[float]) -> OnOff:
    on_s, off_s = numbers[0], numbers[1]
    if not all(_PHASE_BOUNDS_S[0] <= phase_s <= _PHASE_BOUNDS_S[1] for phase_s in (on_s, off_s)):
        raise InputError(f"arrivals '{text}': ON_S and OFF_S must lie between 0.001 and 1000000 seconds")
    most = (on_s + off_s) / on_s
    burst = numbers[2] if len(numbers) == 3 else most
    if not 1.0 <= burst <= most * (1.0 + 1e-9):
        raise InputError(
            f"arrivals '{text}': BURST_FACTOR must lie between 1 (no bursts) and {most:g} (nothing arrives "
            "in the off phase)"
        )
    return OnOff(on_s=on_s, off_s=off_s, burst=min(burst, most))


def _numbers(text: str, rest: str, *, counts: tuple[int, ...]) -> list[float]:
    parts = rest.split(",")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in counts or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise InputError(f"cannot read arrivals '{text}'; the forms are {ARRIVAL_FORMS}")
    return numbers


def _gamma_factors(count: int, variance: float, random: np.random.Generator) -> Floats:
    """The means of `count` equally likely ranges of a gamma of mean 1, in random order."""
    draws = np.sort(random.standard_gamma(1.0 / variance, count * _STRATUM_DRAWS))
    factors = draws.reshape(count, _STRATUM_DRAWS).mean(axis=1)
    shuffled: Floats = random.permutation(factors / factors.mean())
    return shuffled


def _insert_pauses(busy_times: Floats, pauses: Pauses, random: np.random.Generator) -> Floats:
    """Stretch time on which only busy stretches were counted by the pauses that lie between them."""
    count = pauses.per_cycle
    busy_s: list[Floats] = []
    pause_s: list[Floats] = []
    total = 0.0
    while total <= busy_times[-1]:
        levels = (np.arange(count) + random.random((2, count))) / count
        busy_s.append(random.permutation(pauses.busy_s.at(levels[0])))
        pause_s.append(random.permutation(pauses.pause_s.at(levels[1])))
        total += float(busy_s[-1].sum())
    ends = np.cumsum(np.concatenate(busy_s))
    paused = np.concatenate(([0.0], np.cumsum(np.concatenate(pause_s))))
    return busy_times + paused[np.searchsorted(ends, busy_times, side="right")]


def _rounded(times: Floats) -> Floats:
    return np.round(times, 6)
