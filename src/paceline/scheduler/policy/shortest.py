"""Shortest first, with a bound: each token asked for counts as if its request had come a little later.

When more comes than can be computed, a few long requests would make everybody wait; here most pass them, and a long
one waits at most `bound_s` more. Length is what is declared: the prompt, and the most tokens to generate. The order
of two requests never changes while they wait. A request takes the place of a running one that has several times as much
left to do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import RequestView
from paceline.scheduler.policy.fcfs import FirstComeFirstServed

# What is left of a request that gives its place, as a multiple of the one that takes it. At twice as much, what had to
# be computed again cost more than short ones gained.
TIMES_LONGER = 8.0


class ShortestFirst(FirstComeFirstServed):
    def __init__(self, long_prefill_share: float, prompt_s: float, output_s: float, bound_s: float) -> None:
        super().__init__(long_prefill_share)
        self._prompt_s, self._output_s, self._bound_s = prompt_s, output_s, bound_s

    def order(self, view: RequestView) -> NDArray[np.float64]:
        scores: NDArray[np.float64] = view.arrival_s + np.minimum(self._length_s(view), self._bound_s)
        return scores

    def yields(self, running: RequestView, waiting: RequestView) -> NDArray[np.bool_]:
        done = np.minimum(running.peak_computed, running.num_prompt)
        left_s = self._length_s(running) - self._prompt_s * done - self._output_s * running.num_output
        longer = left_s > TIMES_LONGER * self._length_s(waiting)
        given: NDArray[np.bool_] = longer & (self.order(running) > self.order(waiting))
        return given

    def _length_s(self, view: RequestView) -> NDArray[np.float64]:
        asked = view.max_total - view.num_prompt
        length_s: NDArray[np.float64] = self._prompt_s * view.num_prompt + self._output_s * asked
        return length_s
