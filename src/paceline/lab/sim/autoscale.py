"""Replicas that start and stop while a simulation runs.

Who says how many: `wanted`, which is the rule of `routing.scale`, or `keda`, the usual rule of an autoscaler: as many
as hold 30 queued requests each and 60 % of their KV cache, up at once, down to the most that was asked for within five
minutes. Both are asked every 15 seconds. A replica that is to stop gets nothing new and ends when what it has is done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from paceline.costs.cost_model import CostModel, StepShape
from paceline.lab.sim.replica import Replica
from paceline.lab.sim.settings import Scaling
from paceline.routing.scale import Bounds, Demand, Figures, Limits, Mix, capacity, wanted
from paceline.routing.view import EngineState, FleetView, Gauges

ASKED_S = 15.0
QUEUED, KV_SHARE, TOLERANCE, HELD_S = 30, 0.6, 0.1, 300.0  # of the usual rule
LEARNING = 0.02  # weight of one request in what requests are like


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
