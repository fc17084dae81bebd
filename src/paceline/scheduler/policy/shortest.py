"""Shortest first, with a bound: each requested token counts as if its request had arrived a little later.

Under overload a few long requests would make all others wait; here most pass them, and a long request waits at most
`ageing_s` more. Length is what is declared: the prompt, and the most tokens to generate. The order of two requests
never changes while they wait. A request takes the place of a running one that has several times as much left to do.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.policy import Policy, RequestView

# What is left of a request that is displaced, as a multiple of the one that takes its place. At twice as much, what had
# to be computed again cost more than short requests gained.
TIMES_LONGER = 8.0


class ShortestFirst(Policy):
    """In the order of arrival, each requested token counting as some waiting, up to `--ageing-s`."""

    options = ("prompt_handicap_ms", "output_handicap_ms", "ageing_s")

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._prompt_s, self._output_s = config.prompt_handicap_ms / 1e3, config.output_handicap_ms / 1e3
        self._bound_s = config.ageing_s

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
        output_len = view.max_total - view.num_prompt
        length_s: NDArray[np.float64] = self._prompt_s * view.num_prompt + self._output_s * output_len
        return length_s
