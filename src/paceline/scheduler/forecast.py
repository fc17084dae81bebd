"""When a request would get its first token and its last one, as things stand.

Owns what finished steps have taught about their cost (`StepSpeed`) and how the steps to come (`StepProjection`) are
projected from the scheduler's state: prompts under way, then the waiting requests that go first, in the policy's order,
then the request itself. It changes nothing and never looks at a clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Forecast
from paceline.core.plan import StepTimes, StepWork
from paceline.core.request import Request
from paceline.costs.step_speed import StepSpeed
from paceline.policy import RequestView
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.view_columns import waiting_values, with_one_more

Cost = Callable[[float, float], float]  # seconds of a step, of its decoding rows and its tokens of prompts
Budget = Callable[[int], int]  # tokens of a step with prompts, of its decoding rows


class StepProjection:
    """Seconds pass as prompts are read. Blocks are counted in fractions: on average that is what rows fill."""

    def __init__(
        self,
        cost: Cost,
        budget: Budget,
        *,
        endings: Iterable[tuple[float, float]],
        free_rows: int,
        free_blocks: float,
        block_size: float,
    ) -> None:
        """`endings`: of each decoding row, in how many steps it ends and how many blocks it holds then."""
        self.seconds = 0.0
        self._cost, self._budget = cost, budget
        self._ends = list(endings)
        heapq.heapify(self._ends)
        self.decoding = len(self._ends)
        self._rows, self._blocks = free_rows, free_blocks
        self._block_size = block_size
        self._step = 0.0
        self._filled = 0  # tokens of prompts in the step that is being filled

    def admit(self, blocks: float) -> None:
        """Wait until there is a row and `blocks` blocks, or until no request runs any more, and take them."""
        while (self._rows < 1 or self._blocks < blocks) and self._ends:
            self._advance(max(1.0, self._ends[0][0] - self._step))
        self._rows -= 1
        self._blocks -= blocks

    def read(self, tokens: int) -> None:
        """Compute tokens of a prompt, in the step that has room and those after it."""
        self._filled += tokens
        while True:
            free = max(1, self._budget(self.decoding) - self.decoding)
            steps = self._filled // free
            if not steps:
                return
            if self._ends and self._ends[0][0] < self._step + steps:  # not alike beyond that
                steps = min(steps, max(1, math.ceil(self._ends[0][0] - self._step)))
            self._filled -= steps * free
            self.seconds += steps * self._cost(self.decoding, free)
            self._pass(steps)

    def decode(self, num_tokens: float, blocks: float) -> None:
        """The request whose prompt was just read, holding `blocks`, generates `num_tokens` from the next step on."""
        heapq.heappush(self._ends, (self._step + num_tokens, blocks + num_tokens / self._block_size))
        self.decoding += 1

    def first_token_s(self) -> float:
        """When the prompt that was read last gives its token: with the step it ends in."""
        return self.seconds + (self._cost(self.decoding, self._filled) if self._filled else 0.0)

    def _advance(self, steps: float) -> None:
        """Steps in which no further prompt is read."""
        if self._filled:
            self.seconds += self._cost(self.decoding, self._filled)
            self._filled = 0
            self._pass(1.0)
            steps -= 1.0
        if steps > 0.0:
            self.seconds += steps * self._cost(self.decoding, 0)
            self._pass(steps)

    def _pass(self, steps: float) -> None:
        self._step += steps
        self._blocks -= steps * self.decoding / self._block_size
        while self._ends and self._ends[0][0] <= self._step:
            self._blocks += heapq.heappop(self._ends)[1]
            self._rows += 1
            self.decoding -= 1


MOST_WALKED = 256  # waiting requests that are looked at one by one; those behind them are like these
BETWEEN = 0.03  # weight of the last step in how long steps with decoding rows take

Ints = NDArray[np.int64]


class Forecaster:
    """Learns from every step; asked about requests."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._speed = StepSpeed()
        self._between_s = 0.0  # of steps with decoding rows, lately
        self._runner_s = 0.0  # end of the last step, of the runner's clock
        self._done_s = -math.inf  # when that was known, of the scheduler's
        self._is_busy = False  # something was left to do then

    def learn(self, work: StepWork, times: StepTimes, now_s: float, *, is_busy: bool) -> None:
        """A step has run. `is_busy`: another one follows, so that what lies between them belongs to it."""
        started_s = self._runner_s if self._is_busy else max(times.start_s, self._runner_s)
        took_s = times.end_s - started_s
        self._runner_s, self._done_s = max(self._runner_s, times.end_s), now_s
        self._is_busy = is_busy
        if took_s <= 0.0 or work.has_more:
            return
        self._speed.learn(work.decode_rows, work.prefill_tokens, took_s)
        if work.decode_rows:
            weight = BETWEEN if self._between_s else 1.0
            self._between_s += weight * (min(took_s, 3.0 * self._between_s or took_s) - self._between_s)

    def predict(self, request: Request, budget: Budget) -> Forecast | None:
        """For a request that has not been added yet; None while too little is known. `budget`: see `StepProjection`."""
        if not self._speed.is_known:
            return None
        state, cost = self._state, self._speed.now()
        view, ahead = _ahead(state, request)
        allowed = request.max_total - request.num_tokens
        tenant = np.array([state.known_tenant(request.tenant)])
        output = float(state.output_stats.outputs_left(tenant, np.array([allowed]))[0])
        cached = state.kv.match(request.keys, request.num_tokens).num_blocks * state.kv.block_size
        own = max(1, request.num_tokens - cached)
        under_way_s = self._under_way_s()
        projection = self._project(cost, budget)
        soonest_s = under_way_s + _reading_s(own, projection.decoding, cost, budget)
        self._admit_ahead(projection, view, ahead)
        projection.admit(state.kv.blocks_for(own))
        projection.read(own)
        first_s = under_way_s + projection.first_token_s()
        alone_s, between_s = _reading_s(own, 0, cost, budget), cost(1, 0) / self._each
        beside_s = max(self._between_s / self._each, between_s) if projection.decoding else between_s
        return Forecast(
            first_token_s=first_s,
            finish_s=first_s + (output - 1.0) * beside_s,
            ahead=len(ahead),
            waited_s=max(0.0, state.now_s - request.arrival_s),
            soonest_first_s=min(soonest_s, first_s),
            soonest_finish_s=min(soonest_s, first_s) + (output - 1.0) * between_s,
            alone_first_s=alone_s,
            alone_finish_s=alone_s + (output - 1.0) * between_s,
            between_s=between_s,
            num_cached=cached,
            num_output=output,
        )

    def next_ending_s(self) -> float | None:
        """Until the first running request is thought to end; None while that is not known, or no request runs."""
        live = _live(self._state)
        if not self._speed.is_known or not len(live):
            return None
        left = self._left(live)
        return float(left.min()) / self._each * max(self._between_s, self._speed.seconds(len(live), 0))

    # -- the state as numbers ------------------------------------------------------------------------------

    @property
    def _each(self) -> float:
        """Tokens of a decoding row in a step: one, and those of its drafts that are right."""
        return 1.0 if self._state.drafts is None else 1.0 + self._state.drafts.right

    def _under_way_s(self) -> float:
        """Until the steps that were submitted are done; the first of them has been running for a while."""
        seconds = [
            self._speed.seconds(flight.work.decode_rows, flight.work.prefill_tokens)
            for flight in self._state.flights
        ]
        if not seconds:
            return 0.0
        since_s = self._state.now_s - self._done_s
        gone_s = since_s if since_s < seconds[0] else 0.5 * seconds[0]
        return sum(seconds) - gone_s

    def _left(self, live: Ints) -> NDArray[np.float64]:
        """Tokens that running requests are thought to generate still."""
        rows = self._state.rows
        return self._state.output_stats.outputs_left(
            rows.tenant[live], (rows.max_len - rows.num_tokens)[live]
        )

    def _project(self, cost: Cost, budget: Budget) -> StepProjection:
        """The steps to come with those that run now; the prompts under way are read first."""
        state = self._state
        rows, kv = state.rows, state.kv
        live = _live(state)
        left, held = self._left(live), kv.table_len[live]
        reads = np.zeros(rows.high, np.bool_)
        reads[[request.row for request in state.prefilling.values()]] = True
        reading = reads[live]
        at_end = held + left / kv.block_size
        projection = StepProjection(
            cost,
            budget,
            endings=zip((left[~reading] / self._each).tolist(), at_end[~reading].tolist(), strict=True),
            free_rows=state.most_rows - len(live),
            free_blocks=kv.free_for(),
            block_size=kv.block_size / self._each,
        )
        tokens = (rows.num_known - rows.scheduled)[live]
        for index in np.flatnonzero(reading).tolist():
            projection.read(int(tokens[index]))
            projection.decode(float(left[index]) / self._each, float(held[index]))
        return projection

    def _admit_ahead(self, projection: StepProjection, view: RequestView, ahead: Ints) -> None:
        """The waiting requests that go first are read; `ahead` are their places in the view, in order."""
        if not len(ahead):
            return
        stats, walked = self._state.output_stats, ahead[:MOST_WALKED]
        tenant = view.tenant[walked]
        fresh = np.where(view.started[walked], 0.0, stats.cached_share(tenant))
        tokens = (view.num_tokens - view.num_computed)[walked] * (1.0 - fresh)
        left = stats.outputs_left(tenant, (view.max_total - view.num_tokens)[walked])
        before_s = projection.seconds
        for count, output in zip(
            np.maximum(tokens, 1.0).astype(np.int64).tolist(), left.tolist(), strict=True
        ):
            blocks = self._state.kv.blocks_for(count)
            projection.admit(blocks)
            projection.read(count)
            projection.decode(output / self._each, blocks)
        behind = len(ahead) - len(walked)
        projection.seconds += (projection.seconds - before_s) * behind / len(walked)


def _live(state: SchedulerState) -> Ints:
    rows = state.rows
    return np.flatnonzero(rows.live[: rows.high] & ~rows.done[: rows.high])


def _reading_s(tokens: int, decoding: int, cost: Cost, budget: Budget) -> float:
    """A prompt with no other prompt before it."""
    free = max(1, budget(decoding) - decoding)
    whole, rest = divmod(tokens, free)
    return whole * cost(decoding, free) + (cost(decoding, rest) if rest else 0.0)


def _ahead(state: SchedulerState, request: Request) -> tuple[RequestView, Ints]:
    """The waiting requests, and the places of those that the policy puts before this request, in order."""
    view = state.queue.view(state.now_s)
    if not len(state.queue):
        return view, np.zeros(0, np.int64)
    values = waiting_values(request, int(view.order.max()) + 1, state.known_tenant(request.tenant))
    if not math.isfinite(request.arrival_s):
        values["arrival_s"] = state.now_s
    scores = state.policy.order(with_one_more(view, values))
    before = np.flatnonzero(scores[:-1] <= scores[-1])
    ordered: Ints = before[np.lexsort((view.order[before], scores[before]))]
    return view, ordered
