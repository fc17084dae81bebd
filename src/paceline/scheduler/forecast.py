"""When a request would get its first token and its last one, as things stand.

Owns what steps and endings have taught: how long a step takes by its number of tokens, how far it is from that now,
and how much of what requests declare they generate. It counts what is ahead in the policy's own order, the rows and
blocks that must come free, and the prompts that must be read. It changes nothing and never looks at a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import StepTimes, StepWork
from paceline.core.policy import RequestView
from paceline.core.request import NO_ROW, Request
from paceline.costs.running_line import RunningLine

if TYPE_CHECKING:
    from paceline.scheduler.state import SchedulerState

MEMORY = 400  # steps that count for how long one takes
FEWEST = 8  # steps that must have run before anything is said
LEARNING = 0.1  # weight of the last step, or of the last ending, in what is thought of those to come
LEAST_LEFT = 0.1  # share of what it may still generate, of a row that has outlived what was expected


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds from now on."""

    first_token_s: float
    finish_s: float
    ahead: int  # requests that wait and go before it


class Forecaster:
    """Learns from every step and ending; asked about requests."""

    def __init__(self) -> None:
        self._line = RunningLine(MEMORY)
        self._ratio = 1.0  # of what steps took lately to what the line says
        self._mean_s = 0.0  # of all steps lately
        self._share = 1.0  # of the tokens they may generate that requests do generate
        self._life = 0.0  # tokens that requests generate
        self._size = 0.0  # tokens they hold at their end
        self._num_ended = 0
        self._last_end_s = 0.0  # of the runner's clock

    def learn(self, work: StepWork, times: StepTimes) -> None:
        """A step has run."""
        started_s = max(times.start_s, self._last_end_s)  # it waited for the one before it
        took_s = times.end_s - started_s
        self._last_end_s = max(self._last_end_s, times.end_s)
        tokens = work.decode_rows + work.prefill_tokens
        if took_s <= 0.0 or not tokens or work.swap_blocks:
            return
        expected_s = self._line.at(tokens)
        if self._line.num_points >= FEWEST and expected_s > 0.0:
            seen = min(max(took_s / expected_s, 0.5), 2.0)
            self._ratio += LEARNING * (seen - self._ratio)
        self._line.learn(tokens, took_s)
        self._mean_s += max(LEARNING, 1.0 / self._line.num_points) * (took_s - self._mean_s)

    def ended(self, num_prompt: int, num_output: int, declared: int) -> None:
        """A request has generated so many of the tokens it was allowed."""
        self._num_ended += 1
        rate = max(0.2 * LEARNING, 1.0 / self._num_ended)
        self._life += rate * (num_output - self._life)
        self._size += rate * (num_prompt + num_output - self._size)
        self._share += rate * (min(num_output / max(declared, 1), 1.0) - self._share)

    def step_seconds(self, tokens: float) -> float:
        return self._ratio * self._line.at(tokens)

    def predict(self, state: SchedulerState, request: Request, budget: int) -> Forecast | None:
        """For a request that has not been added yet; None while too little is known. `budget`: tokens of a step."""
        if self._line.num_points < FEWEST:
            return None
        rows = state.rows
        live = np.flatnonzero(rows.live[: rows.high] & ~rows.done[: rows.high])
        ahead, waiting_tokens = _ahead(state, request)
        computed = state.kv.match(request.keys, request.num_tokens).num_blocks * state.kv.block_size
        own = max(1, request.num_tokens - computed)
        reading = sum(
            rows.known.item(other.row) - rows.upper.item(other.row) for other in state.prefilling.values()
        )
        under_way_s = sum(
            self.step_seconds(flight.work.decode_rows + flight.work.prefill_tokens)
            for flight in state.flights
        )
        decoding = max(0, len(live) - len(state.prefilling))
        prompts_s = self._prompt_seconds(reading + waiting_tokens + own, decoding, budget)
        room_s = self._room_seconds(state, live, ahead, waiting_tokens + request.num_tokens)
        if room_s > 0.0:
            own_s = self._prompt_seconds(own, decoding, budget)
            prompts_s = max(prompts_s, room_s + own_s)
        first_s = under_way_s + prompts_s
        generated = max(0.0, self._share * (request.max_total - request.num_prompt) - 1.0)
        between_s = max(self._mean_s, self.step_seconds(decoding + 1))
        return Forecast(first_token_s=first_s, finish_s=first_s + generated * between_s, ahead=ahead)

    def _prompt_seconds(self, tokens: int, decoding: int, budget: int) -> float:
        """Steps that read so many prompt tokens beside the rows that decode."""
        per_step = max(1, budget - decoding)
        whole, rest = divmod(tokens, per_step)
        seconds = whole * self.step_seconds(decoding + per_step)
        return seconds + (self.step_seconds(decoding + rest) if rest else 0.0)

    def _room_seconds(
        self, state: SchedulerState, live: NDArray[np.int64], ahead: int, num_tokens: int
    ) -> float:
        """Until enough rows have left for those ahead and this one to have theirs, and their blocks."""
        if not len(live):
            return 0.0
        rows, kv = state.rows, state.kv
        allowed = (rows.limit - rows.num_prompt)[live]
        produced = (rows.num_tokens - rows.num_prompt)[live]
        left = np.maximum(
            self._share * allowed - produced, np.maximum(1.0, LEAST_LEFT * (allowed - produced))
        )
        order = np.argsort(left, kind="stable")
        steps, held = left[order], kv.groups[0].held[live][order]
        short_of_rows = len(live) + ahead + 1 - state.most_rows
        short_of_blocks = kv.blocks_for(num_tokens) + ahead - kv.room()
        waited = max(
            self._steps_until(steps, np.ones_like(held), short_of_rows, 1.0),
            self._steps_until(steps, held, short_of_blocks, max(1.0, self._size / kv.block_size)),
        )
        return waited * max(self._mean_s, self.step_seconds(len(live)))

    def _steps_until(
        self, steps: NDArray[np.float64], freed: NDArray[np.int64], short: int, per_ending: float
    ) -> float:
        """Rows end after `steps`, ascending, each freeing something: when `short` of it are free.

        Those that come after them may end before the last of them does: then it is the rate of endings that counts.
        """
        if short <= 0:
            return 0.0
        life = self._life if self._num_ended >= FEWEST else float(np.mean(steps))
        by_rate = short / per_ending * life / len(steps)
        total = np.cumsum(freed)
        if short > total[-1]:
            return by_rate
        return min(by_rate, float(steps[np.searchsorted(total, short)]))


def _ahead(state: SchedulerState, request: Request) -> tuple[int, int]:
    """How many waiting requests the policy has go before this one, and their tokens."""
    queue = state.queue
    if not len(queue):
        return 0, 0
    view = queue.view(state.now_s)
    scores = state.policy.order(_with(view, state, request))
    before = scores[:-1] <= scores[-1]
    return int(np.count_nonzero(before)), int(view.num_tokens[before].sum())


def _with(view: RequestView, state: SchedulerState, request: Request) -> RequestView:
    """The waiting requests and one more behind them."""

    def more(column: NDArray[np.int64], value: int) -> NDArray[np.int64]:
        return np.append(column, value)

    arrival_s = request.arrival_s if math.isfinite(request.arrival_s) else state.now_s
    return RequestView(
        now_s=state.now_s,
        row=more(view.row, NO_ROW),
        order=more(view.order, int(view.order.max()) + 1),
        arrival_s=np.append(view.arrival_s, arrival_s),
        priority=more(view.priority, request.priority),
        tenant=more(view.tenant, state.tenant_index(request.tenant)),
        num_prompt=more(view.num_prompt, request.num_prompt),
        num_tokens=more(view.num_tokens, request.num_tokens),
        max_total=more(view.max_total, request.max_total),
        preemptions=more(view.preemptions, 0),
        deadline_s=np.append(view.deadline_s, request.due_s),
        num_computed=more(view.num_computed, 0),
        attained=more(view.attained, 0),
        started=more(view.started, 0),
    )
