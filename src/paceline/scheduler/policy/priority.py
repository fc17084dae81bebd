"""Priority with ageing: the lower number goes first, and waiting slowly counts for more.

Every `ageing_s` seconds of waiting are worth one level, so that the lowest priority is served in bounded time.
Since all requests age alike, the order of two requests never changes while they wait. A request of a lower number takes
the place of a running one until that one has nearly made up for its level by its age.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.policy import Policy, RequestView

MARGIN = 0.5  # levels between a request and one that takes its place


class PriorityWithAgeing(Policy):
    """Lower priority numbers first; every `--ageing-s` seconds of waiting are worth one level."""

    options = ("ageing_s",)
    needs = "priority"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._ageing_s = config.ageing_s

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
