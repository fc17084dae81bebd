"""Priority with ageing: the lower number goes first, and waiting slowly counts for more.

Every `ageing_s` seconds of waiting are worth one level, so that the lowest priority is served in bounded time.
Since all requests age alike, the order of two requests never changes while they wait. A request of a lower number takes
the place of a running one until that one has nearly made up for its level by its age.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import RequestView
from paceline.scheduler.policy.fcfs import FirstComeFirstServed

MARGIN = 0.5  # levels between a request and one that takes its place


class PriorityWithAgeing(FirstComeFirstServed):
    def __init__(self, long_prefill_share: float, ageing_s: float) -> None:
        super().__init__(long_prefill_share)
        self._ageing_s = ageing_s

    def order(self, view: RequestView) -> NDArray[np.float64]:
        waited_s = view.now_s - view.arrival_s
        scores: NDArray[np.float64] = view.priority - waited_s / self._ageing_s
        return scores

    def yields(self, running: RequestView, waiting: RequestView) -> NDArray[np.bool_]:
        behind = self.order(running) - self.order(waiting)
        given: NDArray[np.bool_] = (running.priority > waiting.priority) & (behind >= MARGIN)
        return given

    def holds_back(self, decoding: RequestView, prompt: RequestView) -> NDArray[np.bool_]:
        return self.yields(decoding, prompt)
