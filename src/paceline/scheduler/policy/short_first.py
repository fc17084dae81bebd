"""Short prompts first, with ageing: each prompt token counts as if its request had come a little later.

When more comes than can be computed, a few long prompts would make everybody wait; here most requests pass them, and
a long one waits a bounded time more. The order of two requests never changes while they wait.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import RequestView
from paceline.scheduler.policy.fcfs import FirstComeFirstServed

LONGEST_COUNTED = 8192  # tokens of a prompt beyond these put nobody back any further


class ShortPromptsFirst(FirstComeFirstServed):
    def __init__(self, long_prefill_share: float, token_s: float) -> None:
        super().__init__(long_prefill_share)
        self._token_s = token_s

    def order(self, view: RequestView) -> NDArray[np.float64]:
        scores: NDArray[np.float64] = view.arrival_s + self._token_s * np.minimum(
            view.num_prompt, LONGEST_COUNTED
        )
        return scores
