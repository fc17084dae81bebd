"""How many tokens a step may carry, so that it takes about as long as decoding rows can wait for it.

A step's seconds follow from its size, the context its rows read and how far its prompts are; the table of these is
part of the config. Steps that have run correct it: what the runner says they took is in the run log, so that a replay
learns the same. Asked once a step, it does a fixed number of operations. It never looks at a clock.
Decision: docs/decisions/0016-steps-keep-a-pace.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig, StepCosts
from paceline.core.fast import count_set
from paceline.core.plan import StepTimes, StepWork
from paceline.scheduler.state import SchedulerState

LEARNING = 0.05  # weight of one step among those that were measured before it
SLOWEST, FASTEST = 1.5, 0.7  # bounds of what is learnt: a stall says nothing about the steps after it


class Pace:
    """The duration steps aim at, and the size that keeps it."""

    def __init__(self, config: SchedulerConfig, costs: StepCosts) -> None:
        self._target_s = (config.step_target_ms or 0.0) / 1e3
        self._stretch, self._patience_s = config.step_stretch, config.step_patience_s
        self._most = config.max_num_batched_tokens
        self._costs = costs
        self.ratio = 1.0  # of what steps took to what the table says
        self._last_end_s = 0.0  # of the runner's clock

    def target_s(self, waited_s: float) -> float:
        """How long the next step should take, a request having waited this long for a first token."""
        pressure = min(max(waited_s / self._patience_s - 1.0, 0.0), 1.0)
        return self._target_s * (1.0 + (self._stretch - 1.0) * pressure)

    def budget(
        self,
        rows: int,
        context: int,
        prompt: tuple[int, int],
        waited_s: float,
        held_s: float | None = None,
        most_s: float = math.inf,
    ) -> int:
        """Tokens the next step may carry with `rows` decoding rows that read `context` tokens.

        `prompt` says of the first prompt under way how many of its tokens are computed and how many are not. `held_s`
        is what a dial asks for: it takes the place of the target and is never stretched. `most_s` is the least that
        any row wants between two of its tokens; prompts go on all the same.
        """
        costs = self._costs
        sizes, seconds = costs.sizes, costs.seconds
        target_s = min(self.target_s(waited_s) if held_s is None else held_s, most_s)
        left_s = target_s / self.ratio - costs.context_s * context - costs.row_s * rows
        least = bisect_left(sizes, rows + sizes[0])  # prompts go on, however much the others read
        if least == len(sizes):
            return min(rows + sizes[0], self._most)
        done, rest = prompt
        index = bisect_right(seconds, left_s) - 1
        while index > least:
            tokens = sizes[index] - rows
            first = min(tokens, rest)
            products = first * done + 0.5 * (first * first + (tokens - first) ** 2)
            if seconds[index] + costs.product_s * products <= left_s:
                break
            index -= 1
        return min(sizes[max(index, least)], self._most)

    def expected_s(self, work: StepWork) -> float:
        """What a step takes by the table alone."""
        costs = self._costs
        index = min(bisect_left(costs.sizes, work.decode_rows + work.prefill_tokens), len(costs.sizes) - 1)
        more = costs.context_s * work.decode_context + costs.product_s * work.prefill_context_products
        return costs.seconds[index] + more + costs.row_s * work.decode_rows

    def learn(self, work: StepWork, times: StepTimes) -> None:
        """A step has run. Short ones tell nothing: the host may have looked late."""
        started_s = max(times.start_s, self._last_end_s)  # it waited for the one before it
        self._last_end_s = times.end_s
        tokens, sizes = work.decode_rows + work.prefill_tokens, self._costs.sizes
        if not work.prefill_tokens or work.has_more or not sizes[0] <= tokens <= sizes[-1]:
            return
        expected_s = self.expected_s(work)
        if times.end_s > started_s and expected_s > 0.0:
            seen = min(max((times.end_s - started_s) / expected_s, FASTEST), SLOWEST)
            self.ratio += LEARNING * (seen - self.ratio)


def make_pace(config: SchedulerConfig, *, dialled: bool = False) -> Pace | None:
    """None: nothing makes the tokens of a step follow from its duration."""
    if config.step_costs is None or not (config.keeps_pace or config.has_dial or dialled):
        return None
    return Pace(config, config.step_costs)


def step_budget(state: SchedulerState, pace: Pace | None, mask: NDArray[np.bool_], prompts: list[int]) -> int:
    """The budget of the step being composed, of its decoding rows and those that compute prompts, in order."""
    rows, limits = state.rows, state.dial.limits
    if not state.keeps_pace:
        # Rows that stand still for this step wait for it all the same.
        decoding = count_set(mask) or count_set(rows.decoding[: rows.high])
        return state.sizes.tokens(decoding)
    if pace is None:  # a dial, and nothing is known of what steps cost
        assert limits is not None
        return limits.step_tokens(count_set(mask), state.dial.fewest, state.config.max_num_batched_tokens)
    context = int(np.dot(rows.scheduled[: len(mask)], mask))
    done = rest = 0
    if prompts:
        done = rows.scheduled.item(prompts[0])
        rest = rows.num_known.item(prompts[0]) - done
    held_s = None if limits is None else limits.target_s
    most_s = _least_gap(state, mask)
    return pace.budget(count_set(mask), context, (done, rest), _longest_wait(state), held_s, most_s)


def expected_budget(state: SchedulerState, pace: Pace | None) -> Callable[[int], int]:
    """The budget steps to come would have, by their decoding rows, which read as much as those do that run now."""
    most, limits = state.config.max_num_batched_tokens, state.dial.limits
    if pace is None:
        if limits is None:
            return state.sizes.tokens
        return lambda decoding: limits.step_tokens(decoding, state.dial.fewest, most)
    rows = state.rows
    context = int(np.dot(rows.scheduled[: rows.high], rows.decoding[: rows.high]))
    running = count_set(rows.decoding[: rows.high])
    each = context / running if running else 0.0
    held_s = None if limits is None else limits.target_s
    most_s = _least_gap(state, rows.decoding[: rows.high])
    waited_s = _longest_wait(state)

    @cache
    def budget(decoding: int) -> int:
        return pace.budget(decoding, int(each * decoding), (0, 0), waited_s, held_s, most_s)

    return budget


def _least_gap(state: SchedulerState, mask: NDArray[np.bool_]) -> float:
    """The least seconds between two tokens that any of these rows wants; infinity if none says so."""
    rows = state.rows
    return float(np.min(rows.itl_s[: len(mask)], where=mask, initial=np.inf)) if rows.num_itl else math.inf


def _longest_wait(state: SchedulerState) -> float:
    """Seconds since the arrival of the first of those that wait or compute their prompts."""
    arrivals = [request.arrival_s for request in state.prefilling.values()]
    if len(state.queue):
        arrivals.append(float(state.queue.view(state.now_s).arrival_s.min()))
    return state.now_s - min(arrivals, default=state.now_s)
