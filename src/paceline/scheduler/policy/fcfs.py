"""First come, first served: arrival is the only order, and the youngest gives way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.policy import RequestView, Victim


class FirstComeFirstServed:
    def __init__(self, long_prefill_share: float) -> None:
        self._share = long_prefill_share

    def order(self, view: RequestView) -> NDArray[np.float64]:
        return view.arrival_s

    def victim(self, view: RequestView, need: int) -> Victim:
        scores = self.order(view)
        return Victim(int(np.lexsort((view.order, scores))[-1]))

    def share(self, view: RequestView, budget: int) -> int:
        return max(1, int(budget * self._share))
