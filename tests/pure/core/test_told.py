from __future__ import annotations

import pytest

from paceline.core.dial import told_time


@pytest.mark.parametrize(
    "seconds, told",
    [
        (0.0, "0 ms"),
        (0.0005, "0.5 ms"),
        (0.25, "250 ms"),
        (0.9996, "1.0 s"),
        (32.24, "32.2 s"),
        (1e4, "10000.0 s"),
    ],
)
def test_a_time_is_told_with_few_digits_and_no_exponent(seconds: float, told: str) -> None:
    assert told_time(seconds) == told
