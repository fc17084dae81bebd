"""How long a step takes here and now, learnt from steps that have run.

Two lines hold what more tokens cost, one for plain decode and one for steps with prompts; one number holds how fast
the machine is at the moment. The lines remember long, the number follows a change of speed within some ten steps, and
a single stall moves neither far. Plain arithmetic, so that a repeated run learns the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class RunningLine:
    """y = fixed + slope * x, fitted by least squares with exponentially falling weights; x: tokens, y: seconds.

    Plain arithmetic on a few sums, the same on every machine, so that every run that repeats a run learns the same.
    Neither part is ever negative: more work never costs less.
    """

    __slots__ = ("_mean_x", "_mean_xx", "_mean_xy", "_mean_y", "_rate", "num_points")

    def __init__(self, memory: int) -> None:
        """`memory`: about the number of points that count."""
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


MEMORY = 400  # steps that count for what tokens cost
FEWEST = 8  # steps that must have run before anything is said
FEWEST_MIXED = 2  # of these with prompts: rows that decode say nothing about what more tokens cost
LEARNING = 0.12  # share of a surprise that the next step is thought to repeat
FURTHEST = 1.0  # most surprise that is taken in at once, as a logarithm: a stall says little about what comes
LEVELLING = 0.03  # weight of the last step in how far steps are above their usual length on average
OUTLIER = 3.0  # a step further off than this factor counts as this factor


class StepSpeed:
    """Asked for the seconds of a step by what it would carry."""

    __slots__ = ("_excess", "_mixed", "_plain", "_ratio")

    def __init__(self) -> None:
        self._plain, self._mixed = RunningLine(MEMORY), RunningLine(MEMORY)
        self._ratio = 1.0  # of what steps take now to what the lines say
        # Mean step time over the usual one: slow steps are further off than quick ones.
        self._excess = 1.0

    @property
    def is_known(self) -> bool:
        plain, mixed = self._plain.num_points, self._mixed.num_points
        return mixed >= FEWEST_MIXED and plain + mixed >= FEWEST

    def learn(self, decoding: int, prompt_tokens: int, took_s: float) -> None:
        """A step with these decoding rows and prompt tokens has run."""
        if took_s <= 0.0 or decoding + prompt_tokens < 1:
            return
        line = self._mixed if prompt_tokens else self._plain
        usual_s = line.at(decoding + prompt_tokens)
        if line.num_points >= FEWEST and usual_s > 0.0:
            expected_s = self._ratio * usual_s
            surprise = min(max(math.log(took_s / expected_s), -FURTHEST), FURTHEST)
            self._excess += LEVELLING * (min(took_s / expected_s, OUTLIER) - self._excess)
            self._ratio = min(max(self._ratio * math.exp(LEARNING * surprise), 1e-3), 1e3)
            took_s = min(max(took_s / self._ratio, usual_s / OUTLIER), usual_s * OUTLIER)
        line.learn(decoding + prompt_tokens, took_s)

    def seconds(self, decoding: float, prompt_tokens: float) -> float:
        """0 before anything was learnt."""
        return self.now()(decoding, prompt_tokens)

    def now(self) -> Callable[[float, float], float]:
        """The same as a function of decoding rows and tokens of prompts, for many questions at one moment."""
        scale = self._ratio * self._excess
        fixed, slope = (scale * part for part in self._mixed.parts())
        plain = self._plain if self._plain.num_points else self._mixed
        plain_fixed, plain_slope = (scale * part for part in plain.parts())

        def seconds(decoding: float, prompt_tokens: float) -> float:
            if prompt_tokens:
                return fixed + slope * (decoding + prompt_tokens)
            return plain_fixed + plain_slope * decoding

        return seconds
