"""When a request would get its first token and its last one, as things stand.

Owns what steps and endings have taught (`StepSpeed`, `Habits`) and how a walk over the steps to come (`Outlook`) is
made of the scheduler's state: prompts under way, then who waits and goes before, in the policy's own order, then the
request itself. It changes nothing and never looks at a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import StepTimes, StepWork
from paceline.core.policy import RequestView
from paceline.core.request import NO_ROW, FinishReason, Request
from paceline.costs.step_speed import FEWEST, StepSpeed
from paceline.scheduler.habits import Habits
from paceline.scheduler.outlook import Budget, Cost, Outlook

if TYPE_CHECKING:
    from paceline.scheduler.state import SchedulerState

__all__ = ["FEWEST", "Forecast", "Forecaster"]

MOST_WALKED = 256  # waiting requests that are looked at one by one; those behind them are like these
BETWEEN = 0.03  # weight of the last step in how long steps with decoding rows take

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds from now on."""

    first_token_s: float
    finish_s: float
    ahead: int  # requests that wait and go before it
    waited_s: float  # since its arrival
    soonest_first_s: float  # if it went before everybody
    soonest_finish_s: float
    alone_first_s: float  # if nobody else were here
    alone_finish_s: float
    between_s: float  # two of its tokens, if nobody else were here
    num_cached: int  # tokens of its prompt that are in the cache now
    num_output: float  # tokens it is thought to generate


class Forecaster:
    """Learns from every step and ending; asked about requests."""

    def __init__(self) -> None:
        self._speed = StepSpeed()
        self._habits = Habits()
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
        if took_s <= 0.0 or work.swap_blocks:
            return
        self._speed.learn(work.decode_rows, work.prefill_tokens, took_s)
        if work.decode_rows:
            weight = BETWEEN if self._between_s else 1.0
            self._between_s += weight * (min(took_s, 3.0 * self._between_s or took_s) - self._between_s)

    def ended(self, tenant: int, request: Request, num_output: int, reason: FinishReason) -> None:
        """A request has generated so many of the tokens it was allowed."""
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._habits.ended(
                tenant,
                num_prompt=request.num_prompt,
                num_output=num_output,
                num_cached=request.num_cached,
                stopped=reason is FinishReason.STOP,
            )

    def predict(self, state: SchedulerState, request: Request, budget: Budget) -> Forecast | None:
        """For a request that has not been added yet; None while too little is known. `budget`: see `Outlook`."""
        if not self._speed.is_known:
            return None
        cost = self._speed.now()
        view, ahead = _ahead(state, request)
        allowed = request.max_total - request.num_tokens
        tenant = np.array([state.known_tenant(request.tenant)])
        output = float(self._habits.outputs_left(tenant, np.array([allowed]))[0])
        cached = state.kv.match(request.keys, request.num_tokens).num_blocks * state.kv.block_size
        own = max(1, request.num_tokens - cached)
        under_way_s = self._under_way_s(state)
        outlook = self._outlook(state, cost, budget)
        soonest_s = under_way_s + _reading_s(own, outlook.decoding, cost, budget)
        self._let_in(outlook, state, view, ahead)
        outlook.admit(state.kv.blocks_for(own))
        outlook.read(own)
        first_s = under_way_s + outlook.first_token_s()
        alone_s, between_s = _reading_s(own, 0, cost, budget), cost(1, 0)
        beside_s = max(self._between_s, between_s) if outlook.decoding else between_s
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

    def next_ending_s(self, state: SchedulerState) -> float | None:
        """Until the first of the running requests is thought to end; None while nothing is known, or nobody runs."""
        live = _live(state)
        if not self._speed.is_known or not len(live):
            return None
        left = self._left(state, live)
        return float(left.min()) * max(self._between_s, self._speed.seconds(len(live), 0))

    # -- the state as numbers ------------------------------------------------------------------------------

    def _under_way_s(self, state: SchedulerState) -> float:
        """Until the steps that were submitted are done; the first of them has been running for a while."""
        seconds = [
            self._speed.seconds(flight.work.decode_rows, flight.work.prefill_tokens)
            for flight in state.flights
        ]
        if not seconds:
            return 0.0
        since_s = state.now_s - self._done_s
        gone_s = since_s if since_s < seconds[0] else 0.5 * seconds[0]
        return sum(seconds) - gone_s

    def _left(self, state: SchedulerState, live: Ints) -> NDArray[np.float64]:
        """Tokens that running requests are thought to generate still."""
        rows = state.rows
        return self._habits.outputs_left(rows.tenant[live], (rows.limit - rows.num_tokens)[live])

    def _outlook(self, state: SchedulerState, cost: Cost, budget: Budget) -> Outlook:
        """The steps to come with those that run now; the prompts under way are read first."""
        rows, kv = state.rows, state.kv
        live = _live(state)
        left, held = self._left(state, live), kv.groups[0].held[live]
        reads = np.zeros(rows.high, np.bool_)
        reads[[request.row for request in state.prefilling.values()]] = True
        reading = reads[live]
        at_end = held + left / kv.block_size
        outlook = Outlook(
            cost,
            budget,
            endings=zip(left[~reading].tolist(), at_end[~reading].tolist(), strict=True),
            free_rows=state.most_rows - len(live),
            free_blocks=kv.room(),
            block_size=kv.block_size,
        )
        tokens = (rows.known - rows.upper)[live]
        for index in np.flatnonzero(reading).tolist():
            outlook.read(int(tokens[index]))
            outlook.decode(float(left[index]), float(held[index]))
        return outlook

    def _let_in(self, outlook: Outlook, state: SchedulerState, view: RequestView, ahead: Ints) -> None:
        """Those that wait and go before are read; `ahead` are their places in the view, in order."""
        if not len(ahead):
            return
        walked = ahead[:MOST_WALKED]
        tenant = view.tenant[walked]
        fresh = np.where(view.started[walked], 0.0, self._habits.cached_share(tenant))
        tokens = (view.num_tokens - view.num_computed)[walked] * (1.0 - fresh)
        left = self._habits.outputs_left(tenant, (view.max_total - view.num_tokens)[walked])
        before_s = outlook.seconds
        for count, output in zip(
            np.maximum(tokens, 1.0).astype(np.int64).tolist(), left.tolist(), strict=True
        ):
            blocks = state.kv.blocks_for(count)
            outlook.admit(blocks)
            outlook.read(count)
            outlook.decode(output, blocks)
        behind = len(ahead) - len(walked)
        outlook.seconds += (outlook.seconds - before_s) * behind / len(walked)


def _live(state: SchedulerState) -> Ints:
    rows = state.rows
    return np.flatnonzero(rows.live[: rows.high] & ~rows.done[: rows.high])


def _reading_s(tokens: int, decoding: int, cost: Cost, budget: Budget) -> float:
    """A prompt that nobody else's stands before."""
    room = max(1, budget(decoding) - decoding)
    whole, rest = divmod(tokens, room)
    return whole * cost(decoding, room) + (cost(decoding, rest) if rest else 0.0)


def _ahead(state: SchedulerState, request: Request) -> tuple[RequestView, Ints]:
    """Who waits, and the places of those the policy has go before this request, in order."""
    view = state.queue.view(state.now_s)
    if not len(state.queue):
        return view, np.zeros(0, np.int64)
    scores = state.policy.order(_with(view, state, request))
    before = np.flatnonzero(scores[:-1] <= scores[-1])
    ordered: Ints = before[np.lexsort((view.order[before], scores[before]))]
    return view, ordered


def _with(view: RequestView, state: SchedulerState, request: Request) -> RequestView:
    """The waiting requests and one more behind them."""

    def more(column: Ints, value: int) -> Ints:
        return np.append(column, value)

    arrival_s = request.arrival_s if math.isfinite(request.arrival_s) else state.now_s
    return RequestView(
        now_s=state.now_s,
        row=more(view.row, NO_ROW),
        order=more(view.order, int(view.order.max()) + 1),
        arrival_s=np.append(view.arrival_s, arrival_s),
        priority=more(view.priority, request.priority),
        tenant=more(view.tenant, state.known_tenant(request.tenant)),
        num_prompt=more(view.num_prompt, request.num_prompt),
        num_tokens=more(view.num_tokens, request.num_tokens),
        max_total=more(view.max_total, request.max_total),
        preemptions=more(view.preemptions, 0),
        deadline_s=np.append(view.deadline_s, request.due_s),
        first_due_s=np.append(view.first_due_s, request.first_due_s),
        num_computed=more(view.num_computed, 0),
        attained=more(view.attained, 0),
        started=more(view.started, 0),
    )
