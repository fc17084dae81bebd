"""How steps of one shape differ: factors drawn from those that were seen.

Owns the draw alone; where the quantiles come from is the cost model's business. The same seed gives the same factors.
"""

from __future__ import annotations

import random

from paceline.costs.fit import Spread


class StepSpread:
    """Draws factors whose quantiles are those given."""

    def __init__(self, spread: Spread, seed: int, replica: int) -> None:
        self._spread = spread
        self._random = random.Random(f"spread:{seed}:{replica}")

    def stretch(self, reads_prompts: bool) -> float:
        """The factor of the next step; 1 where nothing is known of its kind."""
        quantiles = self._spread.prompts if reads_prompts else self._spread.decode
        if not quantiles:
            return 1.0
        at = self._random.random() * (len(quantiles) - 1)
        below = int(at)
        low, high = quantiles[below], quantiles[min(below + 1, len(quantiles) - 1)]
        return low + (high - low) * (at - below)
