"""How steps of one shape differ: factors drawn from those that were seen.

Owns the draw alone; where the quantiles come from is the cost model's business. The same seed gives the same factors.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


class StepSpread:
    """Draws factors whose quantiles are those given, evenly spaced from the least to the largest."""

    def __init__(self, quantiles: Sequence[float], seed: int, replica: int) -> None:
        assert quantiles
        self._quantiles = tuple(quantiles)
        self._random = random.Random(f"spread:{seed}:{replica}")

    def stretch(self) -> float:
        """The factor of the next step."""
        at = self._random.random() * (len(self._quantiles) - 1)
        below = int(at)
        low = self._quantiles[below]
        high = self._quantiles[min(below + 1, len(self._quantiles) - 1)]
        return low + (high - low) * (at - below)
