"""How many tokens a step may carry, so that it takes about as long as decoding rows can wait for it.

A step's seconds follow from its size, the context its rows read and how far its prompts are; the table of these is
part of the config. Steps that have run correct it: what the runner says they took is in the run log, so that a replay
learns the same. Asked once a step, it does a fixed number of operations. It never looks at a clock.
Decision: docs/decisions/0016-steps-keep-a-pace.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig, StepCosts
from paceline.core.fast import count_set
from paceline.core.plan import StepTimes, StepWork
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step.admission import StepDraft

LEARNING = 0.05  # weight of one step among those that were measured before it
SLOWEST, FASTEST = 1.5, 0.7  # bounds of what is learnt: a stall says nothing about the steps after it
# Of the target, for long prompts: rows beside them would see the longest steps for many seconds.
LONG_TARGET = 0.5
_WHOLE = 1 << 16  # of a step, of which shares are taken


class LongPrompts(NamedTuple):
    """The long prompts under way, as if they were one: prompts that take longer than a request is patient."""

    done: int  # tokens that are computed, of the one that is furthest
    others: int = 0  # tokens that other prompts could take
    share: float = 1.0  # of a step's seconds, while there are others


class StepRoom(NamedTuple):
    """What a step may carry."""

    tokens: int
    for_long: int  # of these, for long prompts


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

    def beside_long(
        self,
        rows: int,
        context: int,
        long: LongPrompts,
        waited_s: float,
        held_s: float | None = None,
        most_s: float = math.inf,
    ) -> StepRoom:
        """The same where long prompts are under way, a token of which can take as long as ten of another prompt.

        They get a share of the step's seconds, not of its tokens, and where rows decode no more than half of the
        target: a prompt of 131,072 tokens takes 15 seconds or more, all of which the rows beside it would spend in the
        longest steps. Nor is the target stretched for them (`_longest_wait`).
        """
        costs = self._costs
        sizes, seconds = costs.sizes, costs.seconds
        target_s = min(self.target_s(waited_s) if held_s is None else held_s, most_s) / self.ratio
        taken_s = costs.context_s * context + costs.row_s * rows
        token_s = costs.seconds[-1] / costs.sizes[-1] + costs.product_s * long.done
        long_s = target_s * (LONG_TARGET if rows and held_s is None else 1.0) - taken_s - seconds[0]
        first = int(long_s * (long.share if long.others else 1.0) / token_s)
        first = max(min(first, self._most - rows), min(costs.LONG, sizes[0]))
        left_s = target_s - taken_s - costs.product_s * first * (long.done + 0.5 * first)
        index = max(bisect_right(seconds, left_s) - 1, min(bisect_left(sizes, rows + first), len(sizes) - 1))
        tokens = min(max(sizes[index], rows + first), rows + first + long.others, self._most)
        return StepRoom(tokens, first)

    def is_long(self, num_tokens: int) -> bool:
        """Whether a prompt of this length takes longer than a request is patient, with nothing beside it."""
        costs = self._costs
        token_s = costs.seconds[-1] / costs.sizes[-1]
        return (token_s + 0.5 * costs.product_s * num_tokens) * num_tokens > self._patience_s

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
    """Tokens of the step being composed, by its decoding rows and those that compute prompts, in order."""
    return step_room(state, pace, mask, prompts).tokens


def step_room(
    state: SchedulerState, pace: Pace | None, mask: NDArray[np.bool_], prompts: list[int]
) -> StepRoom:
    """The same, and how many of them long prompts may take."""
    rows, limits = state.rows, state.dial.limits
    if not state.keeps_pace:
        # Rows that stand still for this step wait for it all the same.
        decoding = count_set(mask) or count_set(rows.decoding[: rows.high])
        done = rows.scheduled.item(prompts[0]) if prompts else 0
        return _all(state.sizes.tokens(decoding, done))
    if pace is None:  # a dial, and nothing is known of what steps cost
        assert limits is not None
        return _all(
            limits.step_tokens(count_set(mask), state.dial.fewest, state.config.max_num_batched_tokens)
        )
    context = int(np.dot(rows.scheduled[: len(mask)], mask))
    held_s = None if limits is None else limits.target_s
    waited_s, most_s = _longest_wait(state, pace), _least_gap(state, mask)
    long = _long_prompts(state, pace, prompts)
    if long is not None:
        return pace.beside_long(count_set(mask), context, long, waited_s, held_s, most_s)
    done = rest = 0
    if prompts:
        done = rows.scheduled.item(prompts[0])
        rest = rows.num_known.item(prompts[0]) - done
    return _all(pace.budget(count_set(mask), context, (done, rest), waited_s, held_s, most_s))


def is_long(state: SchedulerState, pace: Pace | None, row: int) -> bool:
    """Whether a row computes a prompt that is long to the pace; see `Pace.beside_long`."""
    return pace is not None and pace.is_long(state.rows.num_known.item(row))


def long_limit(state: SchedulerState, pace: Pace | None, draft: StepDraft, row: int, limit: int) -> int:
    """Of `limit` tokens, those that a row may take: fewer where its prompt is long. One that joins in this step may be
    the first in order, which always goes on."""
    if limit < 2 or draft.for_long >= draft.budget or not is_long(state, pace, row):
        return limit
    taken = sum(count for other, count in draft.spans.items() if is_long(state, pace, other))
    return min(limit, max(draft.for_long - taken, 1))


def _all(tokens: int) -> StepRoom:
    return StepRoom(tokens, tokens)


def _long_prompts(state: SchedulerState, pace: Pace, prompts: list[int]) -> LongPrompts | None:
    """Of the rows that compute their prompts."""
    rows = state.rows
    long = [row for row in prompts if is_long(state, pace, row)]
    if not long:
        return None
    others = sum(rows.num_known.item(row) - rows.scheduled.item(row) for row in prompts if row not in long)
    view = state.queue.view(state.now_s)
    if len(state.queue) and rows.num_live < state.most_rows:
        others += int((view.num_tokens - view.num_computed).sum())
    share = len(long) * state.share(view, _WHOLE) / _WHOLE
    return LongPrompts(max(rows.scheduled.item(row) for row in long), others, min(1.0, share))


class ExpectedRoom:
    """What steps to come may carry, by their decoding rows, which read as much as those do that run now."""

    def __init__(self, state: SchedulerState, pace: Pace | None) -> None:
        self._state, self._pace = state, pace
        self._limits, self._most = state.dial.limits, state.config.max_num_batched_tokens
        self._known: dict[tuple[int, int, bool], StepRoom] = {}
        if pace is None:
            return
        rows, view = state.rows, state.queue.view(state.now_s)
        decoding = rows.decoding[: rows.high]
        context, running = int(np.dot(rows.scheduled[: rows.high], decoding)), count_set(decoding)
        self._each = context / running if running else 0.0
        self._held_s = None if self._limits is None else self._limits.target_s
        self._most_s = _least_gap(state, decoding)
        self._waited_s = _longest_wait(state, pace)
        self._share = state.share(view, _WHOLE) / _WHOLE

    def is_long(self, num_tokens: int) -> bool:
        return self._pace is not None and self._pace.is_long(num_tokens)

    def __call__(self, decoding: int, done: int = -1, *, others: bool = False) -> StepRoom:
        """`done`: of the long prompt that is furthest, -1 where there is none; `others`: whether there are others."""
        pace, limits, key = self._pace, self._limits, (decoding, done, others)
        if pace is None and limits is None:
            return _all(self._state.sizes.tokens(decoding))
        if pace is None:
            assert limits is not None
            return _all(limits.step_tokens(decoding, self._state.dial.fewest, self._most))
        if key not in self._known:
            context, waited_s = int(self._each * decoding), self._waited_s
            if done < 0:
                room = _all(pace.budget(decoding, context, (0, 0), waited_s, self._held_s, self._most_s))
            else:
                long = LongPrompts(done, self._most if others else 0, self._share)
                room = pace.beside_long(decoding, context, long, waited_s, self._held_s, self._most_s)
            self._known[key] = room
        return self._known[key]


def _least_gap(state: SchedulerState, mask: NDArray[np.bool_]) -> float:
    """The least seconds between two tokens that any of these rows wants; infinity if none says so."""
    rows = state.rows
    return float(np.min(rows.itl_s[: len(mask)], where=mask, initial=np.inf)) if rows.num_itl else math.inf


def _longest_wait(state: SchedulerState, pace: Pace) -> float:
    """Seconds since the arrival of the first of those that wait or compute their prompts. A long prompt under way is
    none of these: larger steps would not end its wait, and all rows would see them until it is computed."""
    arrivals = [
        request.arrival_s for request in state.prefilling.values() if not pace.is_long(request.num_tokens)
    ]
    if len(state.queue):
        arrivals.append(float(state.queue.view(state.now_s).arrival_s.min()))
    return state.now_s - min(arrivals, default=state.now_s)
