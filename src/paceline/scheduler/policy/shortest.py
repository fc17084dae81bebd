"""Shortest first, with a bound: each token asked for counts as if its request had come a little later.

When more comes than can be computed, a few long requests would make everybody wait; here most pass them, and a long
one waits at most `bound_s` more. Length is what is declared: the prompt, and the most tokens to generate. The order
of two requests never changes while they wait.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import RequestView
from paceline.scheduler.policy.fcfs import FirstComeFirstServed


class ShortestFirst(FirstComeFirstServed):
    def __init__(self, long_prefill_share: float, prompt_s: float, output_s: float, bound_s: float) -> None:
        super().__init__(long_prefill_share)
        self._prompt_s, self._output_s, self._bound_s = prompt_s, output_s, bound_s

    def order(self, view: RequestView) -> NDArray[np.float64]:
        length_s = self._prompt_s * view.num_prompt + self._output_s * (view.max_total - view.num_prompt)
        scores: NDArray[np.float64] = view.arrival_s + np.minimum(length_s, self._bound_s)
        return scores
