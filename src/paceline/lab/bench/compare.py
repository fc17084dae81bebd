"""Two results beside each other: what is better, what is worse, what is within noise.

Owns which measures are compared and how sure one can be. Where a result holds its samples, requests (for rates: slices
of time) are drawn again with replacement many times, and the interval is where most of the differences lie. Reads no
files and prints nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The samples in a result file, and drawing them again.
#
# A latency is drawn again by requests, because the gaps inside one request belong together. A rate is drawn again
# by slices of the run's time. What a file does not hold cannot be drawn: then there is None.


Floats = NDArray[np.float64]
SLICES = 20
FEWEST = 10  # requests; fewer say nothing about chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Redraw:
    """One measure that can be computed of samples drawn again."""

    cost: int  # values behind one draw
    draw: Callable[[np.random.Generator], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Columns of the requests that finished, in seconds and tokens; empty where a file lacks one."""

    due: Floats
    ttft: Floats
    e2el: Floats
    tpot: Floats  # 0 for a request of a single token, which keeps any bound
    gaps: Sequence[Floats]
    num_input: Floats
    num_output: Floats
    duration: float
    bounds: Mapping[str, float] | None  # of good requests, in milliseconds

    def redraw(self, name: str) -> Redraw | None:
        if name in RATES:
            values = self._rates().get(name)
            if values is None:
                return None
            return Redraw(
                cost=values.size, draw=lambda random: float(random.choice(values, values.size).mean())
            )
        statistic, _, rest = name.partition("_")
        metric = rest.removesuffix("_ms")
        of = _statistic(statistic)
        if of is None or metric not in ("ttft", "e2el", "tpot", "itl"):
            return None
        column = self.tpot[self.num_output > 1] if metric == "tpot" else getattr(self, metric, ())
        groups = self.gaps if metric == "itl" else [np.array([value]) for value in column]
        return _redraw_groups([group for group in groups if group.size], of)

    def _rates(self) -> dict[str, Floats]:
        """Rates in equal slices of the time of a run."""
        if not self.due.size or not self.duration:
            return {}
        edges = np.linspace(0.0, self.duration * (1 + 1e-9), SLICES + 1)

        def rate(moments: Floats, weights: Floats | None = None) -> Floats:
            counted: Floats = np.histogram(moments, bins=edges, weights=weights)[0] / (edges[1] - edges[0])
            return counted

        first, ends = self.due + self.ttft, self.due + self.e2el
        pieces = [each.size + 1 for each in self.gaps]
        times = np.concatenate(
            [start + np.append(0.0, np.cumsum(each)) for start, each in zip(first, self.gaps, strict=True)]
        )
        found = {
            "request_throughput": rate(ends),
            "output_throughput": rate(times, np.repeat(self.num_output / pieces, pieces)),
        }
        if self.num_input.size:
            found["total_token_throughput"] = found["output_throughput"] + rate(first, self.num_input)
        if self.bounds is not None:
            found["request_goodput"] = rate(ends[self._are_good(self.bounds)])
        return found

    def _are_good(self, bounds: Mapping[str, float]) -> NDArray[np.bool_]:
        mean_gap = np.array([each.mean() if each.size else 0.0 for each in self.gaps])
        values = {"ttft": self.ttft, "e2el": self.e2el, "tpot": self.tpot, "itl": mean_gap}
        good = np.ones(self.due.size, dtype=bool)
        for name, bound in bounds.items():
            good &= values[name] * 1e3 <= bound
        return good


def has_few(result: Mapping[str, Any]) -> bool:
    """Whether a file holds samples, but of so few requests that a difference may be chance."""
    finished = _finished(result)
    return finished is not None and len(finished) < FEWEST


def _finished(result: Mapping[str, Any]) -> list[int] | None:
    """Which requests finished; None where a file holds no samples."""
    ttfts, itls = result.get("ttfts"), result.get("itls")
    if not isinstance(ttfts, list) or not isinstance(itls, list) or len(ttfts) != len(itls):
        return None
    errors = result.get("errors") or [""] * len(ttfts)
    return [
        index for index, (ttft, error) in enumerate(zip(ttfts, errors, strict=False)) if ttft and not error
    ]


def read_samples(result: Mapping[str, Any]) -> Samples | None:
    """None where a file holds none, or too few."""
    finished = _finished(result)
    if finished is None or len(finished) < FEWEST:
        return None
    ttfts, itls = result["ttfts"], result["itls"]
    gaps = [np.array(itls[index], dtype=np.float64) for index in finished]
    ttft = np.array([ttfts[index] for index in finished], dtype=np.float64)
    given = result.get("e2els")
    e2el = np.array([given[index] for index in finished]) if given else ttft + [each.sum() for each in gaps]
    lengths = _column(result, "output_lens", finished)
    lengths = lengths if lengths.size else np.zeros(len(finished))
    bounds = result.get("goodput")
    return Samples(
        due=_column(result, "due_times", finished),
        ttft=ttft,
        e2el=e2el,
        tpot=np.where(lengths > 1, (e2el - ttft) / np.maximum(lengths - 1, 1), 0.0),
        gaps=gaps,
        num_input=_column(result, "input_lens", finished),
        num_output=lengths,
        duration=float(result.get("duration") or 0.0),
        bounds=bounds if isinstance(bounds, Mapping) else None,
    )


def _column(result: Mapping[str, Any], name: str, chosen: Sequence[int]) -> Floats:
    values = result.get(name)
    if not isinstance(values, list):
        return np.empty(0)
    return np.array([values[index] or 0.0 for index in chosen], dtype=np.float64)


Weighted = Callable[[Floats, NDArray[np.int64]], float]  # of ascending values, each with its count


def _statistic(name: str) -> Weighted | None:
    if name == "mean":
        return lambda values, times: float(values @ times / times.sum())
    share = 50.0 if name == "median" else float(name[1:]) if name.startswith("p") else None
    return None if share is None else lambda values, times: _percentile(values, times, share)


def _percentile(values: Floats, times: NDArray[np.int64], percent: float) -> float:
    """As of the values written out, each as many times as it is there."""
    until = np.cumsum(times)
    place = percent / 100.0 * (until[-1] - 1)
    low, high = values[np.searchsorted(until, [np.floor(place), np.ceil(place)], side="right")]
    return float(low + (high - low) * (place - np.floor(place)))


def _redraw_groups(groups: Sequence[Floats], of: Weighted) -> Redraw | None:
    """Groups are drawn whole. Values are sorted once; a draw only says how often each is there."""
    if len(groups) < FEWEST:
        return None
    flat = np.concatenate(groups)
    order = np.argsort(flat)
    values = flat[order]
    group_of = np.repeat(np.arange(len(groups)), [group.size for group in groups])[order]

    def draw(random: np.random.Generator) -> float:
        chosen = random.integers(0, len(groups), len(groups))
        return of(values, np.bincount(chosen, minlength=len(groups))[group_of])

    return Redraw(cost=flat.size, draw=draw)


REDRAWS, MOST_WORK = 1000, 40_000_000
NO_CHANGE = 0.001  # a difference below a thousandth is none, where nothing tells how sure it is
LATENCY_NAME = re.compile(r"(mean|median|p[0-9.]+)_(ttft|tpot|itl|e2el)_ms")
RATES = (
    *("request_throughput", "output_throughput", "total_token_throughput", "request_goodput"),
    *("requests_per_s", "output_tokens_per_s", "total_tokens_per_s"),
)
# What must be the same for a comparison to mean something, and what one usually compares.
SAME = (
    *(
        "model_id",
        "endpoint_type",
        "workload",
        "input_len",
        "output_len",
        "spread",
        "prefix_share",
        "num_prefixes",
    ),
    *("request_rate", "max_concurrency", "ramp", "arrivals", "num_prompts", "max_duration_s", "ignore_eos"),
    *("temperature", "extra_body", "goodput", "model", "is_interrupted"),
    *("client.cpu", "client.system", "hardware.cpu", "hardware.gpu"),
)

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureDifference:
    """One measure of two results. `change` is relative to the first; `low` and `high` bound it where that is known."""

    name: str
    before: float
    after: float
    change: float
    low: float | None
    high: float | None
    is_more_better: bool
    is_of_few: bool = False  # requests: too few to say anything

    @property
    def is_sure(self) -> bool:
        """Whether it is more than chance, as far as one knows."""
        if self.is_of_few:
            return False
        if self.low is None or self.high is None:
            return abs(self.change) >= NO_CHANGE
        return self.low > 0 or self.high < 0

    @property
    def is_worse(self) -> bool:
        return self.is_sure and (self.change < 0) == self.is_more_better

    @property
    def verdict(self) -> str:
        if self.is_of_few:
            return "too few"
        if not self.is_sure:
            return "the same" if self.low is None else "noise"
        return "worse" if self.is_worse else "better"


def compare(before: Result, after: Result, *, confidence: float = 95.0) -> list[MeasureDifference]:
    """Every measure that both results have."""
    one, two = read_samples(before), read_samples(after)
    is_of_few = has_few(before) or has_few(after)
    found = []
    for name, is_more_better in _measures(before):
        first, second = _number(before, name), _number(after, name)
        if first is None or second is None or first <= 0:
            continue
        low, high = _interval(name, (one, two), confidence)
        found.append(
            MeasureDifference(
                name=name,
                before=first,
                after=second,
                change=(second - first) / first,
                low=low,
                high=high,
                is_more_better=is_more_better,
                is_of_few=is_of_few,
            )
        )
    return found


def differing(before: Result, after: Result) -> list[str]:
    """What was not the same about two runs, one sentence for each."""
    found = []
    for name in SAME:
        first, second = _at(before, name), _at(after, name)
        if first != second and not (first is None and second is None):
            found.append(f"{name} differs: {_shown(first)} and {_shown(second)}")
    return found


def _measures(result: Result) -> Iterator[tuple[str, bool]]:
    """Names, and whether more is better; in the order of the file."""
    for name, value in result.items():
        if name in RATES:
            yield name, True
        elif LATENCY_NAME.fullmatch(name) or name == "ms_per_step":
            yield name, False
        elif name in ("ttft_s", "itl_s", "e2e_s") and isinstance(value, dict):
            yield from ((f"{name}.{part}", False) for part in ("mean", "p50", "p90", "p99"))


def _interval(
    name: str, pair: tuple[Samples | None, Samples | None], confidence: float
) -> tuple[float | None, float | None]:
    first, second = (None if samples is None else samples.redraw(name) for samples in pair)
    if first is None or second is None:
        return None, None
    redraws = max(100, min(REDRAWS, MOST_WORK // max(first.cost, second.cost, 1)))
    random = np.random.default_rng(0)
    changes = []
    for _ in range(redraws):
        one, two = first.draw(random), second.draw(random)
        if one > 0:
            changes.append((two - one) / one)
    if not changes:
        return None, None
    outside = (100.0 - confidence) / 2
    low, high = np.percentile(changes, (outside, 100.0 - outside))
    return float(low), float(high)


def _number(result: Result, name: str) -> float | None:
    value = result[name] if name in result else _at(result, name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _at(result: Result, path: str) -> Any:
    value: Any = result
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _shown(value: Any) -> str:
    return "nothing" if value is None else str(value)


def worse_than(differences: Sequence[MeasureDifference], allowed: float) -> list[MeasureDifference]:
    """Those that are surely worse, by more than a share."""
    return [each for each in differences if each.is_worse and abs(each.change) > allowed]
