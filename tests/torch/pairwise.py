"""Covering sets: few combinations of factors in which every allowed pair of values occurs together.

Most mistakes need one or two things to happen at once, so a set that covers all pairs finds nearly what the full
product finds. Deterministic for a seed. Knows nothing of what the factors mean.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
CANDIDATES = 12


def product(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Every allowed combination."""
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if allowed(row)]


def covering(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool], *, seed: int = 0
) -> list[Row]:
    """Rows that cover every pair that any allowed row has, made greedily."""
    rng = random.Random(seed)
    rows = product(factors, allowed)
    # By factor the places of its values in the rows: a table of numbers, for there are tens of thousands.
    places = {
        name: np.array([values.index(row[name]) for row in rows], np.int8) for name, values in factors.items()
    }
    by_pair: dict[Pair, NDArray[np.int64]] = {}
    for one, other in itertools.combinations(factors, 2):
        for (at, first), (beside, second) in itertools.product(
            enumerate(factors[one]), enumerate(factors[other])
        ):
            holders = np.flatnonzero((places[one] == at) & (places[other] == beside))
            if len(holders):
                by_pair[(one, first), (other, second)] = holders
    open_pairs = set(by_pair)
    chosen: list[Row] = []
    for pair in sorted(by_pair, key=lambda pair: (len(by_pair[pair]), str(pair))):  # the rarest first
        if pair not in open_pairs:
            continue
        holders = by_pair[pair]
        tried = [
            _improved(rows[rng.choice(holders)], pair, factors, allowed, open_pairs, rng)
            for _ in range(CANDIDATES)
        ]
        best = max(tried, key=lambda row: _gain(row, open_pairs))
        chosen.append(best)
        open_pairs.difference_update(pairs_of(best))
    return chosen


def pairs_of(row: Row) -> list[Pair]:
    return list(itertools.combinations(row.items(), 2))


def _improved(
    row: Row,
    pair: Pair,
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    open_pairs: set[Pair],
    rng: random.Random,
) -> Row:
    """The row with every factor outside `pair` set, in random order, to the value that covers most."""
    free = [name for name in factors if name not in (pair[0][0], pair[1][0])]
    rng.shuffle(free)
    for name in free:
        options = [changed for value in factors[name] if allowed(changed := row | {name: value})]
        rng.shuffle(options)
        row = max(options, key=lambda option: _gain(option, open_pairs))
    return row


def _gain(row: Row, open_pairs: set[Pair]) -> int:
    return sum(pair in open_pairs for pair in pairs_of(row))
