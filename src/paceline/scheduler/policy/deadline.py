"""Least slack first: the time a request has left, less the time its rest will take.

Until a request has its first token, that token may be due sooner: within `first_token_s`, or by the request's own
target. A request that can no longer make its time goes last and is preempted first. A request without a deadline is
treated as if it had to start within `ageing_s`, unless its first token is due sooner and can still be in time; it is
never counted as late, so that it is served in bounded time.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.policy import Policy, RequestView

HOPELESS_S = 1e9  # more than any slack
STEPS_AHEAD = 2  # steps under way when a first token is due: they end before its own begins
PROMPT_S, OUTPUT_S = 1e-4, 0.02  # of a token, where the machine's step times are not known


class LeastSlack(Policy):
    """The least time to spare first; a request that can no longer make its deadline goes last."""

    options = ("first_token_s", "ageing_s")
    needs = "deadline"

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._first_s = math.inf if config.first_token_s is None else config.first_token_s
        self._prompt_s, self._output_s = token_seconds(config)
        self._patience_s = config.ageing_s

    def order(self, view: RequestView) -> NDArray[np.float64]:
        # What has to be computed again is left out: preemption must not change a request's place.
        prompt_s = self._prompt_s * (view.num_tokens - view.peak_computed)
        slack_s: NDArray[np.float64] = view.deadline_s - prompt_s
        slack_s -= self._output_s * (view.max_total - view.num_tokens)
        first_s = np.minimum(view.arrival_s + self._first_s, view.first_due_s)
        silent = view.num_output == 0
        slack_s[silent] = np.minimum(slack_s, first_s - prompt_s - STEPS_AHEAD * self._output_s)[silent]
        slack_s -= view.now_s
        patient = np.isinf(view.deadline_s)
        patient &= ~silent | np.isinf(view.first_due_s) | (slack_s < 0.0)  # late, but nothing will end it
        slack_s[patient] = view.arrival_s[patient] + self._patience_s - view.now_s
        late = (slack_s < 0.0) & ~patient
        slack_s[late] = HOPELESS_S + view.arrival_s[late]
        return slack_s


def token_seconds(config: SchedulerConfig) -> tuple[float, float]:
    """What a token of a prompt and a token of output take on this machine, when it is busy."""
    costs = config.step_costs
    if costs is None:
        return PROMPT_S, OUTPUT_S
    prompt_s = costs.seconds[-1] / costs.sizes[-1]
    if config.keeps_pace and config.step_target_ms is not None:
        return prompt_s, config.step_target_ms / 1e3
    index = min(bisect_left(costs.sizes, config.max_num_seqs), len(costs.sizes) - 1)
    return prompt_s, costs.seconds[index] + costs.row_s * config.max_num_seqs
