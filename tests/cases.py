"""Which cases of a test run in `make test`, and which only in `make campaign`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(number: int, cases: Iterable[Any]) -> list[Any]:
    """Cases as parameters of a test; all but the first `number` are left to the campaign."""
    return [
        case if index < number else pytest.param(case, marks=pytest.mark.campaign)
        for index, case in enumerate(cases)
    ]
