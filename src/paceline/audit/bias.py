"""Whether groups of requests were treated differently: delay and preemptions, compared group by group.

Each group is compared with all others together by a rank test (Mann-Whitney U, with the normal approximation and the
correction for ties), which asks nothing of the shape of the values. Chances are corrected for the number of
comparisons (Holm). A small chance says that a difference is there, not why: a group may simply send longer prompts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.audit.codec import decode_decision
from paceline.core.events import Decision, DecisionKind
from paceline.core.request import account_of
from paceline.errors import InputError

LEAST = 8  # requests in a group, and outside of it: fewer say nothing
UNKNOWN = "not recorded"
_LENGTHS = (128, 512, 2048, 8192)
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupComparison:
    """One group against all others."""

    by: str  # key, class or length
    group: str
    measure: str  # delay_s or preemptions
    count: int
    mean: float  # of the group
    mean_others: float
    higher: float  # chance that a request of the group has the higher value, ties counted half
    chance: float  # of a difference like this or larger if there is none, corrected for all comparisons


def length_class(num_prompt: int) -> str:
    """The class of a prompt's length, such as 129-512."""
    low = 0
    for high in _LENGTHS:
        if num_prompt <= high:
            return f"{low}-{high}"
        low = high + 1
    return f"{low}-"


_GROUPS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "key": lambda request: account_of(str(request["tenant"])),
    "class": lambda request: str(request["class"]),
    "length": lambda request: length_class(request["num_prompt"]),
}


def requests_of(pages: Iterable[str]) -> list[dict[str, Any]]:
    """The requests a decision log speaks of that were admitted and came to an end, from the texts of its pages."""
    live: dict[int, dict[str, Any]] = {}
    ended: list[dict[str, Any]] = []
    for page in map(json.loads, pages):
        if "start" in page:  # of another run, whose numbers begin anew
            live = {}
        for name, num_prompt, _, _, tenant, _, _, *rest in page.get("adds", ()):
            service_class = rest[0] if rest else UNKNOWN  # of a log from before classes were kept
            facts = {"tenant": tenant, "class": service_class, "num_prompt": num_prompt}
            live[name] = {**facts, "delay_s": None, "preemptions": 0}
        for entry in page.get("decisions", ()):
            _take(decode_decision(entry), live, ended)
    return [request for request in ended if request["delay_s"] is not None]


def _take(decision: Decision, live: dict[int, dict[str, Any]], ended: list[dict[str, Any]]) -> None:
    known = live.get(decision.request)
    if known is None:  # it came before the oldest page that is kept
        return
    if decision.kind is DecisionKind.ADMIT:
        known["delay_s"] = decision.seconds
    elif decision.kind is DecisionKind.PREEMPT:
        known["preemptions"] += 1
    elif decision.kind in (DecisionKind.FINISH, DecisionKind.REFUSE):
        ended.append(live.pop(decision.request))


def compare(requests: Sequence[Mapping[str, Any]], by: Sequence[str]) -> list[GroupComparison]:
    """Every group of every kind in `by` against the rest, for both measures; the least likely first."""
    unknown = [name for name in by if name not in _GROUPS]
    if unknown or not by:
        raise InputError(
            f"--by takes {', '.join(_GROUPS)}, separated by commas, not {', '.join(unknown) or 'nothing'}"
        )
    found = []
    for name in by:
        groups = np.array([_GROUPS[name](request) for request in requests])
        names = sorted(set(groups.tolist()))
        for group in names[:1] if len(names) == 2 else names:  # of two, one against the other says it all
            inside = groups == group
            if min(int(inside.sum()), int((~inside).sum())) < LEAST:
                continue
            for measure in ("delay_s", "preemptions"):
                values = np.array([request[measure] for request in requests], np.float64)
                found.append(_comparison(name, group, measure, values[inside], values[~inside]))
    return _corrected(sorted(found, key=lambda each: each.chance))


def _comparison(by: str, group: str, measure: str, own: Values, others: Values) -> GroupComparison:
    higher, chance = rank_test(own, others)
    return GroupComparison(
        by=by,
        group=group,
        measure=measure,
        count=len(own),
        mean=float(own.mean()),
        mean_others=float(others.mean()),
        higher=higher,
        chance=chance,
    )


def rank_test(one: Values, other: Values) -> tuple[float, float]:
    """Mann-Whitney: the chance that a value of `one` is the higher, and that of such a difference by luck."""
    together = np.concatenate([one, other])
    _, places, counts = np.unique(together, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[places]
    first, second, total = len(one), len(other), len(together)
    above = float(ranks[:first].sum()) - first * (first + 1) / 2
    ties = float((counts.astype(np.float64) ** 3 - counts).sum())
    variance = first * second / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 0.5, 1.0  # all values are the same
    distance = max(0.0, abs(above - first * second / 2) - 0.5)
    return above / (first * second), math.erfc(distance / math.sqrt(2 * variance))


def _corrected(found: list[GroupComparison]) -> list[GroupComparison]:
    """Holm's correction: many comparisons find something by chance alone."""
    corrected, least = [], 0.0
    for index, comparison in enumerate(found):
        least = max(least, min(1.0, comparison.chance * (len(found) - index)))
        corrected.append(replace(comparison, chance=least))
    return corrected
