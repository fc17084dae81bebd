"""A straight line through points that keep coming: seconds of a step by its number of tokens.

Older points count less and less. Plain arithmetic on a few sums, the same on every machine, so that whoever repeats a
run learns the same. Neither part is ever negative: more work never costs less.
"""

from __future__ import annotations


class RunningLine:
    """y = fixed + slope * x, fitted by least squares with exponentially falling weights."""

    __slots__ = ("_mean_x", "_mean_xx", "_mean_xy", "_mean_y", "_rate", "num_points")

    def __init__(self, memory: int) -> None:
        """`memory`: about so many points count."""
        self._rate = 1.0 / memory
        self.num_points = 0
        self._mean_x = self._mean_y = self._mean_xx = self._mean_xy = 0.0

    def learn(self, x: float, y: float) -> None:
        self.num_points += 1
        rate = max(self._rate, 1.0 / self.num_points)  # the first ones count alike
        self._mean_x += rate * (x - self._mean_x)
        self._mean_y += rate * (y - self._mean_y)
        self._mean_xx += rate * (x * x - self._mean_xx)
        self._mean_xy += rate * (x * y - self._mean_xy)

    def slope(self) -> float:
        spread = self._mean_xx - self._mean_x * self._mean_x
        if spread <= 1e-6 * self._mean_xx or self._mean_x <= 0.0:
            return 0.0
        slope = (self._mean_xy - self._mean_x * self._mean_y) / spread
        return min(max(slope, 0.0), self._mean_y / self._mean_x)

    def at(self, x: float) -> float:
        """The line at `x`; 0 before anything was learnt."""
        fixed, slope = self.parts()
        return fixed + slope * x

    def parts(self) -> tuple[float, float]:
        """What nothing costs, and what each further x does."""
        slope = self.slope()
        return self._mean_y - slope * self._mean_x, slope
