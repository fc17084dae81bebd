"""When a request would get its first token and its last one, as things stand.

Owns what finished steps have taught about their cost (`StepSpeed`) and how the steps to come (`StepProjection`) are
projected from the scheduler's state: prompts under way, then the waiting requests that go first, in the policy's order,
then the request itself. It changes nothing and never looks at a clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.core.events import Forecast
from paceline.core.plan import StepTimes, StepWork
from paceline.core.request import Request
from paceline.costs.step_speed import StepSpeed
from paceline.policy import RequestView
from paceline.routing.view import Gauges
from paceline.scheduler.modules import bodies_of
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.step import pinning
from paceline.scheduler.step.pace import ExpectedRoom, StepRoom
from paceline.scheduler.view_columns import waiting_values, with_one_more

# Seconds of a step, of its decoding rows, its prompt tokens and their pairs.
Cost = Callable[[float, float, float], float]
PART = 8192  # tokens of a prompt that have a budget in common


@dataclass(slots=True)
class PromptAhead:
    """A prompt that is being read."""

    left: int  # tokens
    at: int  # tokens before these
    decodes: tuple[float, float] | None  # steps, and blocks when it begins; None: nothing of it follows
    is_long: bool
    encoded: int = 0  # of them, those that its pictures take: they come first

    def read(self, tokens: int) -> float:
        """The pairs of its next tokens, which are read."""
        self.left -= tokens
        encoded = min(tokens, self.encoded)
        self.encoded -= encoded
        tokens -= encoded
        pairs = tokens * (self.at + 0.5 * tokens)
        self.at += tokens
        return pairs


class StepProjection:
    """Seconds pass as prompts are read. Blocks are counted in fractions: on average that is what rows fill.

    A step goes to the prompts in order, none of which takes more than its share while others could use it. Steps that
    are alike are counted together.
    """

    def __init__(
        self,
        cost: Cost,
        budget: ExpectedRoom,
        *,
        endings: Iterable[tuple[float, float]],
        free_rows: int,
        free_blocks: float,
        block_size: float,
        share: float = 1.0,
    ) -> None:
        """`endings`: of each decoding row, in how many steps it ends and how many blocks it holds then."""
        self.seconds = 0.0
        self._cost, self._budget, self._share = cost, budget, share
        self._ends = list(endings)
        heapq.heapify(self._ends)
        self.decoding = len(self._ends)
        self._rows, self._blocks = free_rows, free_blocks
        self._block_size = block_size
        self._step = 0.0
        self._reading: list[PromptAhead] = []
        # Tokens of the next step that these leave to others, and how many one prompt may take. None: to be counted.
        self._open: int | None = None
        self._most = 0

    def admit(self, blocks: float) -> None:
        """Wait until there is a row, `blocks` blocks and a step with tokens left, or until no request runs any more,
        and take them."""
        while self._reading and not self._has_room():
            self._read_on(others=True)
        while (self._rows < 1 or self._blocks < blocks) and (self._ends or self._reading):
            if self._reading:
                self._read_on(others=True)
            else:
                self._decode_on()
        self._rows -= 1
        self._blocks -= blocks

    def read(
        self, tokens: int, at: int = 0, decodes: tuple[float, float] | None = None, *, encoded: int = 0
    ) -> PromptAhead:
        """Compute tokens of a prompt, `at` of which are computed, in the steps that have room. `decodes`: how many
        tokens it generates from then on, and the blocks it holds. `encoded`: what its pictures take as well, in
        tokens."""
        prompt = PromptAhead(tokens + encoded, at, decodes, self._budget.is_long(at + tokens), encoded)
        tokens += encoded
        self._reading.append(prompt)
        if prompt.is_long:
            self._open = None
        elif self._open is not None:  # counted as it is added: hundreds may wait
            self._open -= min(tokens, self._open, self._most)
        return prompt

    def first_token_s(self, prompt: PromptAhead) -> float:
        """When a prompt gives its token: with the step it ends in."""
        while prompt.left > 0:
            self._read_on()
        return self.seconds

    def _room(self, others: bool) -> StepRoom:
        """Tokens of the next step for prompts. `others`: one more waits for them."""
        long = [prompt.at for prompt in self._reading if prompt.is_long]
        done = max(long) // PART * PART if long else -1
        room = self._budget(self.decoding, done, others=others or len(long) < len(self._reading))
        return StepRoom(max(1, room.tokens - self.decoding), room.for_long)

    def _has_room(self) -> bool:
        """Whether the next step has tokens for one more prompt."""
        if self._open is None:
            room = self._room(others=True)
            self._most = self._most_of(room)
            self._open = room.tokens - sum(self._taken(room, others=True))
        return self._open > 0

    def _most_of(self, room: StepRoom) -> int:
        """Tokens of a step that one prompt may take while others could use them."""
        return max(1, int(self._share * (room.tokens + self.decoding)))

    def _taken(self, room: StepRoom, *, others: bool) -> list[int]:
        """What the prompts take of a step, in order, each held to its share while others could use more."""
        taken: list[int] = []
        left, for_long = room.tokens, room.for_long
        most = self._most_of(room) if others or len(self._reading) > 1 else left
        for is_held in (True, False):
            for index, prompt in enumerate(self._reading):
                before = 0 if is_held else taken[index]
                more = min(prompt.left - before, left, most if is_held else left)
                more = min(more, for_long) if prompt.is_long else more
                if is_held:
                    taken.append(more)
                else:
                    taken[index] += more
                left -= more
                for_long -= more * prompt.is_long
            if others:
                break
        return taken

    def _read_on(self, *, others: bool = False) -> None:
        """The next step, and those after it that are like it."""
        taken = self._taken(self._room(others), others=False)
        under_way = [(prompt, tokens) for prompt, tokens in zip(self._reading, taken, strict=True) if tokens]
        steps = min(prompt.left // tokens for prompt, tokens in under_way)
        steps = min(steps, max(1, PART // max(taken)))
        if self._ends and self._ends[0][0] < self._step + steps:  # not alike beyond that
            steps = max(1, math.ceil(self._ends[0][0] - self._step))
        pairs = sum(prompt.read(steps * tokens) for prompt, tokens in zip(self._reading, taken, strict=False))
        self.seconds += steps * self._cost(self.decoding, sum(taken), pairs / steps)
        self._pass(steps)
        for prompt, _ in under_way:
            if not prompt.left and prompt.decodes is not None:
                tokens, blocks = prompt.decodes
                heapq.heappush(self._ends, (self._step + tokens, blocks + tokens / self._block_size))
                self.decoding += 1
        self._reading = [prompt for prompt in self._reading if prompt.left]

    def _decode_on(self) -> None:
        """Steps in which no prompt is read, until a row ends."""
        steps = max(1.0, self._ends[0][0] - self._step)
        self.seconds += steps * self._cost(self.decoding, 0, 0.0)
        self._pass(steps)

    def _pass(self, steps: float) -> None:
        self._step += steps
        self._open = None
        self._blocks -= steps * self.decoding / self._block_size
        while self._ends and self._ends[0][0] <= self._step:
            self._blocks += heapq.heappop(self._ends)[1]
            self._rows += 1
            self.decoding -= 1


MOST_WALKED = 256  # waiting requests that are looked at one by one; those behind them are like these
BETWEEN = 0.03  # weight of the last step in how long steps with decoding rows take

_WHOLE = 1 << 16  # of a step, of which shares are taken

Ints = NDArray[np.int64]


class Forecaster:
    """Learns from every step; asked about requests."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._speed = StepSpeed(*_attention_prices(state.config))
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
        self._speed.learn(work.decode_rows, work.prefill_tokens, took_s, self._pairs_of(work))
        if work.decode_rows:
            weight = BETWEEN if self._between_s else 1.0
            self._between_s += weight * (min(took_s, 3.0 * self._between_s or took_s) - self._between_s)

    def predict(self, request: Request, budget: ExpectedRoom) -> Forecast | None:
        """For a request that has not been added yet; None while too little is known. `budget`: see `StepProjection`."""
        if not self._speed.is_known:
            return None
        state, cost = self._state, self._cost_beside()
        view, ahead = _ahead(state, request)
        allowed = request.max_total - request.num_tokens
        tenant = np.array([state.known_tenant(request.tenant)])
        output = float(state.output_stats.outputs_left(tenant, np.array([allowed]))[0])
        cached = state.kv.match(request.keys, request.num_tokens).num_blocks * state.kv.block_size
        cached = min(cached, request.num_tokens - 1)
        own = max(1, request.num_tokens - cached - _placed(state, request, cached))
        encoded = state.encodings.tokens_left(request)
        pinned_us, most_pinned_us = pinning.price_of(state, request)
        under_way_s = self._under_way_s()
        projection = self._project(cost, budget)
        soonest_s = under_way_s + _reading_s(own, cached, encoded, projection.decoding, cost, budget)
        self._admit_ahead(projection, view, ahead)
        projection.admit(state.kv.blocks_for(request.num_tokens - cached))
        first_s = under_way_s + projection.first_token_s(projection.read(own, cached, encoded=encoded))
        alone_s = _reading_s(own, cached, encoded, 0, self._speed.now(), budget)
        reads = self._speed.pairs(0.0, request.num_tokens)  # of its own tokens, in each step it decodes in
        between_s = self._speed.seconds(1, 0, reads) / self._each
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
            pinned_block_us=pinned_us,
            most_pinned_block_us=most_pinned_us,
        )

    def gauges(self, budget: ExpectedRoom, before: Gauges) -> Gauges:
        """What a front chooses engines by. Speeds that are not known yet are those of `before`."""
        state, rows = self._state, self._state.rows
        live = _live(state)
        view = state.queue.view(state.now_s)
        fresh = np.where(view.started, 0.0, state.output_stats.cached_share(view.tenant))
        waiting = (view.num_tokens - view.num_computed) * (1.0 - fresh)
        reading = [request.row for request in state.prefilling.values()]
        unread = rows.num_known[reading] - rows.scheduled[reading]
        tokens = before._replace(
            waiting_tokens=int(waiting.sum()) + int(np.maximum(unread, 0).sum()),
            running_tokens=int(rows.scheduled[live].sum()),
            rows=len(live) + len(state.queue),
            free_blocks=state.kv.free_for(),
        )
        if not self._speed.is_known:
            return tokens
        cost, decoding = self._cost_beside(), int(np.count_nonzero(rows.decoding[: rows.high]))
        room = max(1, budget(decoding, others=True).tokens - decoding)
        own_s = cost(tokens.rows, 0, 0.0)  # when they all decode
        return tokens._replace(
            prefill_per_s=room / max(cost(decoding, room, 0.0), 1e-9),
            decode_s=own_s,
            row_s=max(0.0, cost(tokens.rows + 1, 0, 0.0) - own_s),
        )

    @property
    def speed(self) -> StepSpeed:
        """What steps have taken."""
        return self._speed

    def next_ending_s(self) -> float | None:
        """Until the first running request is thought to end; None while that is not known, or no request runs."""
        live = _live(self._state)
        if not self._speed.is_known or not len(live):
            return None
        left = self._left(live)
        step_s = self._cost_beside()(len(live), 0, 0.0)
        return float(left.min()) / self._each * max(self._between_s, step_s)

    # -- the state as numbers ------------------------------------------------------------------------------

    @property
    def _each(self) -> float:
        """Tokens of a decoding row in a step: one, and those of its drafts that are right."""
        return 1.0 if self._state.drafts is None else 1.0 + self._state.drafts.right

    def _under_way_s(self) -> float:
        """Until the steps that were submitted are done; the first of them has been running for a while."""
        seconds = [
            self._speed.seconds(
                flight.work.decode_rows, flight.work.prefill_tokens, self._pairs_of(flight.work)
            )
            for flight in self._state.flights
        ]
        if not seconds:
            return 0.0
        since_s = self._state.now_s - self._done_s
        gone_s = since_s if since_s < seconds[0] else 0.5 * seconds[0]
        return sum(seconds) - gone_s

    def _pairs_of(self, work: StepWork) -> float:
        return self._speed.pairs(work.prefill_context_products, work.decode_context)

    def _cost_beside(self) -> Cost:
        """What steps take now, each of whose rows reads as much as those that decode do on average."""
        rows = self._state.rows
        decoding = rows.decoding[: rows.high]
        running = int(np.count_nonzero(decoding))
        context = float(np.dot(rows.scheduled[: rows.high], decoding))
        each = self._speed.pairs(0.0, context / running) if running else 0.0
        seconds = self._speed.now()
        return lambda rows, tokens, pairs: seconds(rows, tokens, pairs + each * rows)

    def _left(self, live: Ints) -> NDArray[np.float64]:
        """Tokens that running requests are thought to generate still."""
        rows = self._state.rows
        return self._state.output_stats.outputs_left(
            rows.tenant[live], (rows.max_len - rows.num_tokens)[live]
        )

    def _project(self, cost: Cost, budget: ExpectedRoom) -> StepProjection:
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
            share=state.share(state.queue.view(state.now_s), _WHOLE) / _WHOLE,
        )
        first = rows.scheduled[live]
        tokens = rows.num_known[live] - first
        for index in np.flatnonzero(reading).tolist():
            decodes = float(left[index]) / self._each, float(held[index])
            encoded = self._encoded(rows.requests[live[index]])
            projection.read(int(tokens[index]), int(first[index]), decodes, encoded=encoded)
        return projection

    def _admit_ahead(self, projection: StepProjection, view: RequestView, ahead: Ints) -> None:
        """The waiting requests that go first are read; `ahead` are their places in the view, in order."""
        if not len(ahead):
            return
        stats, walked = self._state.output_stats, ahead[:MOST_WALKED]
        tenant = view.tenant[walked]
        fresh = np.where(view.started[walked], 0.0, stats.cached_share(tenant))
        computed, whole = view.num_computed[walked], view.num_tokens[walked]
        computed = np.minimum(computed + ((whole - computed) * fresh).astype(np.int64), whole - 1)
        left = stats.outputs_left(tenant, (view.max_total - view.num_tokens)[walked])
        before_s = projection.seconds
        for place, at, count, output in zip(
            walked.tolist(), computed.tolist(), (whole - computed).tolist(), left.tolist(), strict=True
        ):
            blocks = self._state.kv.blocks_for(count)
            projection.admit(blocks)
            encoded = self._encoded(self._state.queue.get(place))
            projection.read(count, at, (output / self._each, blocks), encoded=encoded)
        behind = len(ahead) - len(walked)
        projection.seconds += (projection.seconds - before_s) * behind / len(walked)

    def _encoded(self, request: Request | None) -> int:
        """What the pictures of a request take still, in tokens."""
        has_pictures = request is not None and bool(request.media)
        return self._state.encodings.tokens_left(request) if has_pictures and request is not None else 0


def _live(state: SchedulerState) -> Ints:
    rows = state.rows
    return np.flatnonzero(rows.live[: rows.high] & ~rows.done[: rows.high])


def _placed(state: SchedulerState, request: Request, cached: int) -> int:
    """Tokens of a request that are copied to their place, less those of modules that are to be computed first."""
    tokens = 0
    for body in bodies_of(request, cached) if request.modules else ():
        keys = request.modules[body.stretch.item].keys
        tokens += body.end - max(body.start, cached)
        tokens -= state.kv.block_size * (len(keys) - min(map(len, state.kv.sources.find(keys))))
    return tokens


def _reading_s(tokens: int, at: int, encoded: int, decoding: int, cost: Cost, budget: ExpectedRoom) -> float:
    """A prompt of which `at` tokens are computed, with no other prompt before it."""
    alone = StepProjection(
        cost,
        budget,
        endings=[(math.inf, 0.0)] * decoding,
        free_rows=1,
        free_blocks=math.inf,
        block_size=1.0,
    )
    return alone.first_token_s(alone.read(tokens, at, encoded=encoded))


def _attention_prices(config: SchedulerConfig) -> tuple[float, float]:
    """About what a pair of a prompt token and one before it takes, and a token of context of a decoding row; 0: that
    is not known."""
    costs, preemption, learned = config.step_costs, config.preemption_costs, config.learned_steps
    if costs is not None and costs.product_s:
        return costs.product_s, costs.context_s
    if learned is not None and learned.product_s:
        return learned.product_s, learned.product_s  # a processor multiplies for both alike
    return (0.0 if preemption is None else preemption.product_s), 0.0


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
