"""What several engines are and have done together: figures that a reader of one engine's understands.

Counts and totals are sums. What cannot be added is that of the engine it matters for most, or of the first. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from operator import is_not
from typing import Any

from paceline.process.client import EngineInfo, EngineStats

# Fields of `EngineStats` that are not added.
_FIRST = frozenset(("dial", "draft_width", "draft_gain", "standing", "sleep_level", "last_wake_s", "load"))


# Fields of `EngineStats` that count from the start of an engine.
_TOTALS = (
    "steps",
    "busy_s",
    "counters",
    "violations",
    "rejected_frames",
    "watch_cpu_s",
    "cpu_s",
    "wakes",
    "sleeps",
)


class JointTotals:
    """Of one engine over all its lives: an engine that is started again counts from 0, and totals never fall."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}  # of lives that are over
        self._last = EngineStats()

    def of(self, stats: EngineStats) -> EngineStats:
        """The figures of this moment, with the totals of all lives."""
        if stats.steps < self._last.steps:
            ended = {name: getattr(self._last, name) for name in _TOTALS}
            ended["counters"] = replace(ended["counters"], holding=0)  # which is a gauge
            self._before = added([self._before, ended]) if self._before else ended
        self._last = stats
        if not self._before:
            return stats
        return replace(
            stats, **{name: added([getattr(stats, name), total]) for name, total in self._before.items()}
        )


class JointFigures:
    """Of several engines, over their lives. They are added once for each report: requests ask for them."""

    def __init__(self) -> None:
        self._totals: list[JointTotals] = []
        self._told: list[EngineStats] = []
        self._joint = EngineStats()

    def of(self, told: list[EngineStats]) -> EngineStats:
        self._totals += [JointTotals() for _ in told[len(self._totals) :]]
        if len(told) != len(self._told) or any(map(is_not, told, self._told)):
            each = [totals.of(stats) for totals, stats in zip(self._totals, told, strict=True)]
            self._told, self._joint = told, joint_stats(each)
        return self._joint


def joint_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """A request must fit into any of them; what they hold is added."""
    first = infos[0]
    if len(infos) == 1:
        return first
    return replace(
        first,
        max_model_len=min(each.max_model_len for each in infos),
        max_num_seqs=sum(each.max_num_seqs for each in infos),
        num_blocks=sum(each.usable_blocks for each in infos) + 1,
        kv_bytes=sum(each.kv_bytes for each in infos),
        weight_bytes=sum(each.weight_bytes for each in infos),
        load_s=max(each.load_s for each in infos),
        notices=tuple(dict.fromkeys(notice for each in infos for notice in each.notices)),
    )


def joint_stats(parts: Sequence[EngineStats]) -> EngineStats:
    first = parts[0]
    gaps = [each.fairness_gap for each in parts if each.fairness_gap is not None]
    places = [each.next_place_s for each in parts if each.next_place_s is not None]
    special: dict[str, Any] = {
        "caches_prefixes": any(each.caches_prefixes for each in parts),
        "fairness_gap": max(gaps, default=None),
        "next_place_s": min(places, default=None),
        "adapters": replace(  # lists of numbers, and numbers
            added([each.adapters for each in parts]),
            running=tuple(number for each in parts for number in each.adapters.running),
            waiting=tuple(number for each in parts for number in each.adapters.waiting),
        ),
    }
    for spec in fields(EngineStats):
        if spec.name not in special:
            values = [getattr(each, spec.name) for each in parts]
            special[spec.name] = values[0] if spec.name in _FIRST else added(values)
    return replace(first, **special)


def added(values: Sequence[Any]) -> Any:
    """The sum of numbers, of values whose parts are, field by field and key by key; else the first."""
    first = values[0]
    if isinstance(first, bool | str) or first is None:
        return first
    if isinstance(first, int | float):
        return sum(values)
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for each in values for name in each)
        return {name: added([each[name] for each in values if name in each]) for name in names}
    if is_dataclass(first):
        return replace(
            first,
            **{spec.name: added([getattr(each, spec.name) for each in values]) for spec in fields(first)},
        )  # type: ignore[type-var]
    make: Callable[[Any], Any] = getattr(type(first), "_make", type(first))
    if isinstance(first, list | tuple):
        longest = max(map(len, values))
        return make([added([each[at] for each in values if at < len(each)]) for at in range(longest)])
    return first
