"""For the slowest of a hundred: who has waited longest for the work it is known to need goes first.

Soft priorities without predictions: the work known of a request is its prompt and what was computed for it since.
Waiting counts for more the less that is, and a request that has become large gives way to small ones that have
waited; since waiting always counts, nobody is put off for good.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import RequestView
from paceline.scheduler.policy.fcfs import FirstComeFirstServed

LEAST_WORK = 64  # tokens; below, nobody is smaller than another
SOFTNESS = 0.5  # 0: the order of arrival; 1: waiting in units of work
TIMES_AHEAD = 2.0  # a request that takes the place of another has so many times its score


class SoftTail(FirstComeFirstServed):
    def order(self, view: RequestView) -> NDArray[np.float64]:
        work = np.maximum(view.num_prompt, view.peak_computed) + LEAST_WORK
        scores: NDArray[np.float64] = (view.arrival_s - view.now_s) / work**SOFTNESS
        return scores

    def yields(self, running: RequestView, waiting: RequestView) -> NDArray[np.bool_]:
        given: NDArray[np.bool_] = self.order(waiting) < TIMES_AHEAD * self.order(running)
        return given
