"""The front of a simulated fleet: what it knows of its replicas, and when.

Replicas report their figures and the prefixes they hold every quarter of a second, as engines do over a link, so that a
router sees loads that are old but for what it has chosen itself. Who is chosen is the business of `routing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from paceline.core.request import Request
from paceline.costs.cost_model import StepShape
from paceline.engine.reports import gauges_of, prefix_news_of
from paceline.lab.sim.autoscale import Autoscaler
from paceline.lab.sim.replica import Replica
from paceline.lab.sim.settings import SimConfig
from paceline.routing.routers import make_router, route
from paceline.routing.view import Ask, FleetView, Gauges

REPORT_S = 0.25
IDLE_TOKENS = 2048  # of a step that tells how fast prompts are read before there were any


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
            prefix_news_of(replica.engine.scheduler)  # they keep note from now on
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
            news = prefix_news_of(scheduler)
            self.view.prefixes.stored(number, news.stored)
            self.view.prefixes.evicted(number, news.evicted)
