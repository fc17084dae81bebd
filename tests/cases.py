"""Which cases of a test run in `make test`, and which only in `make campaign`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """Cases as parameters of a test; all but the first `number` are left to the campaign."""
    return [
        case if index < number else pytest.param(case, marks=pytest.mark.campaign)
        for index, case in enumerate(cases)
    ]


def diagonal(ones: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """All pairs as parameters of a test; but for a few in which every case occurs, they are left to the campaign."""
    longest = range(max(len(ones), len(others)))
    here = {(number % len(ones), number % len(others)) for number in longest}
    pairs = itertools.product(enumerate(ones), enumerate(others))
    return [
        pytest.param(one, other, marks=() if (at, beside) in here else pytest.mark.campaign)
        for (at, one), (beside, other) in pairs
    ]
