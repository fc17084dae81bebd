"""How far flows are off: the same load, burst and dead rack in the exact simulator and as flows, before a world is run.

Owns the scenario and the simulation in which a rack dies: its requests go on elsewhere behind the output that is known,
as behind a fleet's front.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import NoHooks, Request
from paceline.engine.resumed import take_up
from paceline.lab.report.run_record import FINISHED, RunRecord
from paceline.lab.sim.run import Simulation
from paceline.lab.world.curve import ReplicaCurve, ReplicaMix
from paceline.lab.world.flow import Flow
from paceline.routing.view import EngineState

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What both go through."""

    replicas: int = 64
    dead: int = 8  # of them, from `dies_s` on
    load: float = 0.75  # of what a replica serves at most
    burst: float = 1.5  # times that, for a while
    burst_s: tuple[float, float] = (40.0, 55.0)
    dies_s: float = 75.0
    seconds: float = 100.0
    ttft_slo_s: float = 1.0
    token_slo_s: float = 0.05
    seed: int = 1

    def rates(self, curve: ReplicaCurve) -> Floats:
        """Requests in each second, of all replicas."""
        at = np.arange(int(self.seconds))
        burst = (at >= self.burst_s[0]) & (at < self.burst_s[1])
        found: Floats = self.replicas * curve.rate * self.load * np.where(burst, self.burst, 1.0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigures:
    """What both are compared by."""

    goodput_per_s: float  # first token and tokens within their bounds
    ttft_p50_s: float
    ttft_p99_s: float
    most_at_once: float


def compare_with_exact(
    mix: ReplicaMix, curve: ReplicaCurve, scenario: Scenario | None = None
) -> dict[str, dict[str, float]]:
    """The figures of both and the relative error of flows, by name."""
    scenario = scenario or Scenario()
    seen, flows = asdict(of_exact(mix, curve, scenario)), asdict(of_flows(curve, scenario))
    error = {name: flows[name] / seen[name] - 1.0 for name in seen}
    return {"exact": seen, "flows": flows, "error": error}


def of_flows(curve: ReplicaCurve, scenario: Scenario) -> ComparedFigures:
    alive = np.ones((1, scenario.replicas), np.bool_)
    flow = Flow(curve, alive, token_slo_s=scenario.token_slo_s)
    most = 0.0
    for second, rate in enumerate(scenario.rates(curve).tolist()):
        if second == int(scenario.dies_s):
            dead = np.zeros_like(alive)
            dead[0, : scenario.dead] = True
            flow.take_over(*flow.die(dead), by=alive)
        flow.step(np.array([rate]))
        most = max(most, flow.at_once)
    (counts,) = flow.first_tokens.taken()
    p50_s, p99_s = flow.first_tokens.quantiles(counts, (0.5, 0.99))
    good = flow.first_tokens.good(counts, scenario.ttft_slo_s)
    return ComparedFigures(
        goodput_per_s=good / scenario.seconds, ttft_p50_s=p50_s, ttft_p99_s=p99_s, most_at_once=most
    )


def of_exact(mix: ReplicaMix, curve: ReplicaCurve, scenario: Scenario) -> ComparedFigures:
    random = np.random.default_rng([scenario.seed, mix.seed])
    counts = random.poisson(scenario.rates(curve))
    times_s = np.sort(np.repeat(np.arange(len(counts)), counts) + random.random(int(counts.sum())))
    workload = replace(mix.load(len(times_s), 1.0), arrival_s=times_s)
    simulation = RackDies(mix.config(workload, scenario.replicas), workload, scenario=scenario)
    simulation.run()
    record = simulation.record("exact")
    ttft_s = record.first_token_s - record.arrival_s
    token_s = (record.finished_s - record.first_token_s) / np.maximum(record.output_len - 1, 1)
    good = (record.outcome == FINISHED) & (ttft_s <= scenario.ttft_slo_s) & (token_s <= scenario.token_slo_s)
    p50_s, p99_s = np.quantile(ttft_s[np.isfinite(ttft_s)], (0.5, 0.99))
    return ComparedFigures(
        goodput_per_s=float(good.sum()) / scenario.seconds,
        ttft_p50_s=float(p50_s),
        ttft_p99_s=float(p99_s),
        most_at_once=_most_at_once(record),
    )


def _most_at_once(record: RunRecord) -> float:
    ended_s = record.finished_s[np.isfinite(record.finished_s)]
    times_s = np.concatenate((record.arrival_s, ended_s))
    change = np.concatenate((np.ones(len(record.arrival_s)), -np.ones(len(ended_s))))
    return float(np.cumsum(change[np.argsort(times_s, kind="stable")]).max())


class RackDies(Simulation):
    """The first replicas die at one moment; what they had begun goes on elsewhere."""

    def __init__(self, *given: Any, scenario: Scenario, **more: Any) -> None:
        super().__init__(*given, **more)
        self._scenario: Scenario | None = scenario

    def _arrive(self, index: int, now_s: float) -> None:
        scenario = self._scenario
        if scenario is not None and now_s >= scenario.dies_s:
            self._scenario = None
            self._die(scenario.dead, now_s)
        super()._arrive(index, now_s)

    def _die(self, count: int, now_s: float) -> None:
        lost: list[Request] = []
        for replica in self.replicas[:count]:
            if self.front is not None:
                self.front.view.set_state(replica.number, EngineState.LOST)
            for request in list(replica._live.values()):
                lost.append(request)
                replica.abort(request.id, now_s)
            replica.ready_s = None
        for old in sorted(lost, key=lambda request: request.arrival_s):
            new = self._source.make(int(old.id))
            take_up([new], [old.tokens[old.num_prompt :].tolist()], NoHooks())
            new.admitted_s, new.first_token_s = old.admitted_s, old.first_token_s
            replica = self.replicas[self._replica_for(int(old.id), new)]
            replica.add(new, now_s)
            self._schedule(replica)
