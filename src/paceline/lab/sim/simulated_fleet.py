"""The front of a simulated fleet: what it knows of its replicas, and when.

Replicas report their figures and the prefixes they hold every quarter of a second, as engines do over a link, so that a
router sees loads that are old but for what it has chosen itself. Who is chosen is the business of `routing`.

Replicas may start and stop while a simulation runs. Who says how many: `wanted`, which is the rule of `routing.scale`,
or `keda`, the usual rule of an autoscaler: as many as hold 30 queued requests each and 60 % of their KV cache, up at
once, down to the most that was asked for within five minutes. Both are asked every 15 seconds. A replica that is to
stop gets nothing new and ends when what it has is done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from paceline.core.request import Request
from paceline.costs.cost_model import CostModel, StepShape
from paceline.engine.reports import gauges_of, told_cache_of
from paceline.lab.sim.replica import Replica
from paceline.lab.sim.settings import Scaling, SimConfig
from paceline.routing.routers import make_router, route
from paceline.routing.scale import Bounds, Demand, Figures, Limits, Mix, capacity, wanted
from paceline.routing.view import Ask, EngineState, FleetView, Gauges

REPORT_S = 0.25
IDLE_TOKENS = 2048  # of a step that tells how fast prompts are read before there were any
ASKED_S = 15.0
QUEUED, KV_SHARE, TOLERANCE, HELD_S = 30, 0.6, 0.1, 300.0  # of the usual rule
LEARNING = 0.02  # weight of one request in what requests are like


def idle_gauges(config: SimConfig) -> Gauges:
    """Of a replica that has never had a request, by the cost model."""
    cost = config.machine.cost
    tokens = min(IDLE_TOKENS, config.engine.scheduler.max_num_batched_tokens)
    prompt_s = cost.step_seconds(StepShape(prefill_tokens=tokens, logit_rows=1))
    one_s, two_s = (cost.step_seconds(StepShape(decode_rows=rows, logit_rows=rows)) for rows in (1, 2))
    return Gauges(
        free_blocks=config.engine.kv.num_blocks - 1,
        prefill_per_s=tokens / max(prompt_s, 1e-9),
        decode_s=one_s,
        row_s=max(0.0, two_s - one_s),
    )


class SimulatedFront:
    """Chooses a replica for each request, in order of arrival."""

    def __init__(self, config: SimConfig, replicas: Sequence[Replica]) -> None:
        self.view = FleetView(config.engine.kv.block_size)
        self._replicas = replicas
        self._router = make_router(config.router)
        self._longest = config.engine.scheduler.max_model_len
        idle = idle_gauges(config)
        self._gauges = [idle for _ in replicas]
        self._reported_s = -math.inf
        for replica in replicas:
            told_cache_of(replica.engine.scheduler).take_news()  # they keep note from now on
        self.scaler: Autoscaler | None = None
        if config.scaling is not None:
            self.scaler = Autoscaler(config.scaling, self.view, replicas, idle, config.machine.cost)
        else:
            for _ in replicas:
                self.view.attach(gauges=idle)

    def choose(self, request: Request, now_s: float) -> int:
        """The number of the replica that gets it. A client does not say how long the answer will be."""
        ask = Ask(
            now_s,
            request.num_prompt,
            max_tokens=max(1, self._longest - request.num_prompt),
            keys=tuple(key.key for key in request.keys),
            tenant=request.tenant,
        )
        choice = route(self.view, self._router, ask)
        assert choice is not None, "a simulated replica is always there"
        if self.scaler is not None:
            self.scaler.comes(now_s, request.num_prompt - choice.cached_tokens)
        return choice.engine

    def hear(self, until_s: float, advance: Callable[[float], None]) -> None:
        """Take in the last report before `until_s`, and start and stop replicas; `advance` brings all of them to the
        time of it."""
        while self.scaler is not None and self.scaler.next_s <= until_s:
            self._hear(self.scaler.next_s, advance)
            self.scaler.ask()
        self._hear(until_s, advance)
        if self.scaler is not None:
            self.scaler.pass_time(until_s)

    def _hear(self, until_s: float, advance: Callable[[float], None]) -> None:
        due_s = math.floor(until_s / REPORT_S) * REPORT_S
        if due_s <= self._reported_s:
            return
        self._reported_s = due_s
        advance(due_s)
        for number in self.view.state.nonzero()[0].tolist():
            scheduler = self._replicas[number].engine.scheduler
            gauges = self._gauges[number] = gauges_of(scheduler, self._gauges[number])
            self.view.report(number, gauges, known=self.view.num_sent[number])
            news = told_cache_of(scheduler).take_news()
            self.view.prefixes.stored(number, news.stored)
            self.view.prefixes.evicted(number, news.evicted)


class Autoscaler:
    """Starts and stops replicas of a front."""

    def __init__(
        self, scaling: Scaling, view: FleetView, replicas: Sequence[Replica], idle: Gauges, cost: CostModel
    ) -> None:
        self.scaling = scaling
        self._view, self._replicas, self._idle, self._cost = view, replicas, idle, cost
        self._demand = Demand(max(scaling.start_s, HELD_S))
        self._prompt, self._answer = 0.0, 0.0
        self._ended = (0, 0)
        self._starting: list[tuple[float, int]] = []
        self._since: dict[int, float] = {}  # when each that is there was started
        self._asked_for: deque[tuple[float, int]] = deque()  # by the usual rule
        self._next_s = ASKED_S
        self._changed_s = -math.inf
        self.replica_s = 0.0  # of those that are gone
        self.changes: list[tuple[float, int, str]] = []
        for _ in range(scaling.least):
            self._since[view.attach(gauges=idle)] = 0.0

    # -- what happens ----------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When it is asked next."""
        return self._next_s

    def comes(self, now_s: float, prompt_tokens: int) -> None:
        """A request, with what of its prompt is to be computed."""
        self._demand.comes(now_s)
        weight = LEARNING if self._prompt else 1.0
        self._prompt += weight * (prompt_tokens - self._prompt)

    def pass_time(self, now_s: float) -> None:
        """Replicas whose start is over are ready, and those with nothing left to do are gone."""
        while self._starting and self._starting[0][0] <= now_s:
            self._view.set_state(self._starting.pop(0)[1], EngineState.READY)
        for number in np.flatnonzero(self._view.state == EngineState.DRAINING).tolist():
            if not self._replicas[number].is_busy:
                self._view.detach(number)
                self.replica_s += now_s - self._since.pop(number)

    def ask(self) -> None:
        """Start or stop as many as are wanted now. What replicas report has just been heard."""
        now_s = self._next_s
        self._next_s += ASKED_S
        self.pass_time(now_s)
        there = np.flatnonzero(np.isin(self._view.state, (EngineState.READY, EngineState.STARTING)))
        count, why = (
            self._usual(now_s, len(there)) if self.scaling.rule == "keda" else self._wanted(now_s, len(there))
        )
        count = min(max(count, self.scaling.least), len(self._replicas))
        if count == len(there):
            return
        self._changed_s = now_s
        self.changes.append((now_s, count, why))
        for _ in range(count - len(there)):
            self._start(now_s)
        for _ in range(len(there) - count):
            self._stop()

    def seconds(self, until_s: float) -> float:
        """Of all replicas, from their start to their end."""
        return self.replica_s + sum(until_s - since_s for since_s in self._since.values())

    # -- who says how many -----------------------------------------------------------------------------------

    def _ready(self) -> list[int]:
        return np.flatnonzero(self._view.state == EngineState.READY).tolist()

    def _wanted(self, now_s: float, there: int) -> tuple[int, str]:
        view, ready, scaling = self._view, self._ready(), self.scaling
        lately, peak, growth = self._demand.at(now_s)
        ended, tokens = (
            sum(each) for each in zip(*((r.num_ended, r.ended_tokens) for r in self._replicas), strict=True)
        )
        self._answer = tokens / ended if ended else self._answer or 100.0
        config = self._replicas[0].engine.scheduler.state
        mix = Mix(self._prompt, self._answer, self._prompt + 0.5 * self._answer)
        kv_tokens = config.kv.groups[0].pool.usable * config.kv.block_size
        limits = Limits(scaling.itl_s, config.config.max_num_seqs, kv_tokens)
        found = wanted(
            Figures(
                engines=there,
                ready=len(ready),
                demand=lately,
                peak=peak,
                growth=growth,
                waiting_s=float((view.waiting_tokens[ready] / view.prefill_per_s[ready]).sum()),
                capacity=capacity(self._step_s, mix, limits),
                patience_s=scaling.ttft_s,
                kv_use=self._kv_use(ready),
                steady_s=now_s - self._changed_s,
            ),
            Bounds(scaling.least, len(self._replicas)),
            scaling.start_s,
        )
        return found.count, found.why

    def _usual(self, now_s: float, there: int) -> tuple[int, str]:
        ready = self._ready()
        queued = sum(len(self._replicas[number].engine.scheduler.state.queue) for number in ready)
        ratio = self._kv_use(ready) / KV_SHARE
        by_kv = there if abs(ratio - 1.0) <= TOLERANCE else math.ceil(len(ready) * ratio)
        asked = max(math.ceil(queued / QUEUED), by_kv)
        self._asked_for.append((now_s, asked))
        while self._asked_for[0][0] < now_s - HELD_S:
            self._asked_for.popleft()
        return max(asked, min(there, max(each for _, each in self._asked_for))), "usual"

    def _kv_use(self, ready: Sequence[int]) -> float:
        pools = [self._replicas[number].engine.scheduler.state.kv.groups[0].pool for number in ready]
        return sum(1.0 - pool.num_free / pool.usable for pool in pools) / max(1, len(pools))

    def _step_s(self, rows: int, context: float, prompt_tokens: float) -> float:
        shape = StepShape(
            decode_rows=rows,
            decode_context=int(context),
            prefill_tokens=int(prompt_tokens),
            prefill_context_products=int(prompt_tokens * 0.5 * self._prompt),
            logit_rows=rows,
        )
        return self._cost.step_seconds(shape)

    # -- doing it --------------------------------------------------------------------------------------------

    def _start(self, now_s: float) -> None:
        number = self._view.attach(state=EngineState.STARTING, gauges=self._idle)
        self._replicas[number].forget_prefixes()
        self._since[number] = now_s
        self._starting.append((now_s + self.scaling.start_s, number))

    def _stop(self) -> None:
        """One that has not started yet, else the one with the least to do."""
        if self._starting:
            number = self._starting.pop()[1]
        else:
            ready = self._ready()
            number = min(reversed(ready), key=self._view.rows.item)
        self._view.set_state(number, EngineState.DRAINING)
