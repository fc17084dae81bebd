"""A piecewise linear function of one number, made once and asked often.

Plain floats and a bisection, because it is evaluated for every simulated step. Left of the first knot the
function is constant; right of the last it goes on with a slope of its own.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


class PiecewiseLinear:
    """Straight lines through (knot, value); constant before the first knot, `tail_slope` after the last."""

    __slots__ = ("_knots", "_slopes", "_values")

    def __init__(self, knots: Sequence[float], values: Sequence[float], tail_slope: float) -> None:
        assert len(knots) == len(values) >= 1
        assert all(left < right for left, right in pairwise(knots))
        between = [(values[i + 1] - values[i]) / (knots[i + 1] - knots[i]) for i in range(len(knots) - 1)]
        # One entry per interval, the first being the constant part, so that a bisection is the index.
        self._knots = tuple(float(knot) for knot in knots)
        self._values = (float(values[0]), *(float(value) for value in values))
        self._slopes = (0.0, *between, tail_slope)

    def __call__(self, x: float) -> float:
        index = bisect_right(self._knots, x)
        origin = self._knots[index - 1] if index else x
        return self._values[index] + self._slopes[index] * (x - origin)
