"""For the slowest of a hundred: the request that has waited longest for the work it is known to need goes first.

Soft priorities without predictions: the work known of a request is its prompt and what was computed for it since.
The smaller that is, the more waiting counts, and a request that has become large is preempted for small ones that have
waited. Since waiting always counts, no request starves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.policy import Policy, RequestView

LEAST_WORK = 64  # tokens; smaller requests count as equally small
SOFTNESS = 0.5  # 0: the order of arrival; 1: waiting in units of work
TIMES_AHEAD = 2.0  # the score of a request is at least this multiple of that of the request it displaces


class SoftTail(Policy):
    """The request first that has waited longest for the work it is known to need."""

    def order(self, view: RequestView) -> NDArray[np.float64]:
        work = np.maximum(view.num_prompt, view.peak_computed) + LEAST_WORK
        scores: NDArray[np.float64] = (view.arrival_s - view.now_s) / work**SOFTNESS
        return scores

    def yields(self, running: RequestView, waiting: RequestView) -> NDArray[np.bool_]:
        given: NDArray[np.bool_] = self.order(waiting) < TIMES_AHEAD * self.order(running)
        return given
