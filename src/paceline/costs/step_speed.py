"""How long a step takes here and now, learnt from steps that have run.

Two lines hold what more tokens cost, one for plain decode and one for steps with prompts; one number holds how fast
the machine is at the moment. The lines remember long, the number follows a change of speed within some ten steps, and
a single stall moves neither far. What tokens attend to is the second part of a line: a prompt of 131,072 tokens takes
five times as long as its tokens alone would. Plain arithmetic, so that a repeated run learns the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class RunningLine:
    """y = fixed + slope * x + further * z, fitted by least squares with exponentially falling weights; x: tokens, z:
    what they attend to, y: seconds.

    `further` is known before there are points, about; they move it once what z explains of them is not small beside
    them. Plain arithmetic on a few sums, the same on every machine, so that every run that repeats a run learns the
    same. No part is ever negative: more work never costs less.
    """

    __slots__ = (
        *("_further", "_rate", "num_points"),
        *("_mean_x", "_mean_xx", "_mean_xy", "_mean_xz", "_mean_y", "_mean_yz", "_mean_z", "_mean_zz"),
    )

    def __init__(self, memory: int, further: float = 0.0) -> None:
        """`memory`: about the number of points that count; `further`: 0, and z counts for nothing."""
        self._rate = 1.0 / memory
        self._further = further
        self.num_points = 0
        self._mean_x = self._mean_y = self._mean_xx = self._mean_xy = 0.0
        self._mean_z = self._mean_xz = self._mean_yz = self._mean_zz = 0.0

    def learn(self, x: float, y: float, z: float = 0.0) -> None:
        self.num_points += 1
        rate = max(self._rate, 1.0 / self.num_points)  # the first ones count alike
        self._mean_x += rate * (x - self._mean_x)
        self._mean_y += rate * (y - self._mean_y)
        self._mean_xx += rate * (x * x - self._mean_xx)
        self._mean_xy += rate * (x * y - self._mean_xy)
        if self._further:
            self._mean_z += rate * (z - self._mean_z)
            self._mean_xz += rate * (x * z - self._mean_xz)
            self._mean_yz += rate * (y * z - self._mean_yz)
            self._mean_zz += rate * (z * z - self._mean_zz)

    def further(self) -> float:
        """What each z costs: the guess, as far as points with other z do not say otherwise."""
        guess = self._further
        if not guess or not self.num_points:
            return guess
        spread = self._spread()
        share = (self._mean_xz - self._mean_x * self._mean_z) / spread if spread else 0.0
        # Of z and of y with z, what x does not explain.
        own = self._mean_zz - self._mean_z * self._mean_z
        own -= share * (self._mean_xz - self._mean_x * self._mean_z)
        with_y = self._mean_yz - self._mean_y * self._mean_z
        with_y -= share * (self._mean_xy - self._mean_x * self._mean_y)
        doubt = (DOUBT * self._mean_y / guess) ** 2
        found = (with_y + doubt * guess) / (max(own, 0.0) + doubt) if doubt else guess
        most = self._mean_y / self._mean_z if self._mean_z > 0.0 else math.inf
        return min(max(found, 0.0), most)

    def slope(self) -> float:
        return self._slope(self.further())

    def at(self, x: float, z: float = 0.0) -> float:
        """The line at `x`; 0 before anything was learnt."""
        fixed, slope, further = self.parts()
        return fixed + slope * x + further * z

    def parts(self) -> tuple[float, float, float]:
        """What nothing costs, and what each further x and each further z do."""
        if not self.num_points:
            return 0.0, 0.0, 0.0
        further = self.further()
        slope = self._slope(further)
        return self._mean_y - further * self._mean_z - slope * self._mean_x, slope, further

    def _slope(self, further: float) -> float:
        spread, rest = self._spread(), self._mean_y - further * self._mean_z
        if not spread:
            return 0.0
        with_x = self._mean_xy - self._mean_x * self._mean_y
        with_x -= further * (self._mean_xz - self._mean_x * self._mean_z)
        return min(max(with_x / spread, 0.0), rest / self._mean_x)

    def _spread(self) -> float:
        """Of x; 0 where all are alike."""
        spread = self._mean_xx - self._mean_x * self._mean_x
        return 0.0 if spread <= 1e-6 * self._mean_xx or self._mean_x <= 0.0 else spread


MEMORY = 400  # steps that count for what tokens cost
FEWEST = 8  # steps that must have run before anything is said
FEWEST_MIXED = 2  # of these with prompts: rows that decode say nothing about what more tokens cost
LEARNING = 0.12  # share of a surprise that the next step is thought to repeat
FURTHEST = 1.0  # most surprise that is taken in at once, as a logarithm: a stall says little about what comes
LEVELLING = 0.03  # weight of the last step in how far steps are above their usual length on average
OUTLIER = 3.0  # a step further off than this factor counts as this factor
DOUBT = 0.3  # of the seconds of a step: what attention must move for its price to be taken from steps


class StepSpeed:
    """Asked for the seconds of a step by what it would carry."""

    __slots__ = ("_context_share", "_excess", "_mixed", "_plain", "_ratio")

    def __init__(self, product_s: float = 0.0, context_s: float = 0.0) -> None:
        """`product_s`: about what a pair of a prompt token and one before it takes, `context_s` a token of context that
        a decoding row reads; 0: not known, and taken for nothing."""
        self._plain, self._mixed = RunningLine(MEMORY, product_s), RunningLine(MEMORY, product_s)
        self._context_share = context_s / product_s if product_s else 0.0
        self._ratio = 1.0  # of what steps take now to what the lines say
        # Mean step time over the usual one: slow steps are further off than quick ones.
        self._excess = 1.0

    @property
    def is_known(self) -> bool:
        plain, mixed = self._plain.num_points, self._mixed.num_points
        return mixed >= FEWEST_MIXED and plain + mixed >= FEWEST

    def pairs(self, products: float, context: float) -> float:
        """What the tokens of a step attend to, in products of prompts."""
        return products + self._context_share * context

    def learn(self, decoding: int, prompt_tokens: int, took_s: float, pairs: float = 0.0) -> None:
        """A step with these decoding rows and prompt tokens has run; `pairs`: see there."""
        if took_s <= 0.0 or decoding + prompt_tokens < 1:
            return
        line = self._mixed if prompt_tokens else self._plain
        usual_s = line.at(decoding + prompt_tokens, pairs)
        if line.num_points >= FEWEST and usual_s > 0.0:
            expected_s = self._ratio * usual_s
            surprise = min(max(math.log(took_s / expected_s), -FURTHEST), FURTHEST)
            self._excess += LEVELLING * (min(took_s / expected_s, OUTLIER) - self._excess)
            self._ratio = min(max(self._ratio * math.exp(LEARNING * surprise), 1e-3), 1e3)
            took_s = min(max(took_s / self._ratio, usual_s / OUTLIER), usual_s * OUTLIER)
        line.learn(decoding + prompt_tokens, took_s, pairs)

    def seconds(self, decoding: float, prompt_tokens: float, pairs: float = 0.0) -> float:
        """0 before anything was learnt."""
        return self.now()(decoding, prompt_tokens, pairs)

    def now(self) -> Callable[[float, float, float], float]:
        """The same as a function of decoding rows, tokens of prompts and pairs, for many questions at one moment."""
        scale = self._ratio * self._excess
        fixed, slope, further = (scale * part for part in self._mixed.parts())
        plain = self._plain if self._plain.num_points else self._mixed
        plain_fixed, plain_slope, plain_further = (scale * part for part in plain.parts())

        def seconds(decoding: float, prompt_tokens: float, pairs: float) -> float:
            if prompt_tokens:
                return fixed + slope * (decoding + prompt_tokens) + further * pairs
            return plain_fixed + plain_slope * decoding + plain_further * pairs

        return seconds
