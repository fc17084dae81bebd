"""Two results beside each other: what is better, what is worse, what cannot be told from chance.

Owns which measures are compared and how sure one can be. Where a result holds its samples, requests (for rates: slices
of time) are drawn again with replacement many times, and the interval is where most of the differences lie. Reads no
files and prints nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.samples import Samples, has_few, read_samples

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
class Difference:
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


def compare(before: Result, after: Result, *, confidence: float = 95.0, seed: int = 0) -> list[Difference]:
    """Every measure that both results have."""
    one, two = read_samples(before), read_samples(after)
    is_of_few = has_few(before) or has_few(after)
    found = []
    for name, is_more_better in _measures(before):
        first, second = _number(before, name), _number(after, name)
        if first is None or second is None or first <= 0:
            continue
        low, high = _interval(name, (one, two), confidence, seed)
        found.append(
            Difference(
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
    name: str, pair: tuple[Samples | None, Samples | None], confidence: float, seed: int
) -> tuple[float | None, float | None]:
    first, second = (None if samples is None else samples.redraw(name) for samples in pair)
    if first is None or second is None:
        return None, None
    redraws = max(100, min(REDRAWS, MOST_WORK // max(first.cost, second.cost, 1)))
    random = np.random.default_rng(seed)
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


def worse_than(differences: Sequence[Difference], allowed: float) -> list[Difference]:
    """Those that are surely worse, by more than a share."""
    return [each for each in differences if each.is_worse and abs(each.change) > allowed]
