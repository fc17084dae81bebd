"""The run: arrivals, aborts and steps of all replicas in the order of virtual time.

Before a request is routed at time t, every replica with work has been advanced to t, so that a router sees
what it would see. Replicas are stepped in order of the time their next step is due; ties go to the lowest
number. The same configuration, workload and seed give the same record.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from paceline.core.recorder import StepRecorder
from paceline.core.request import RequestId
from paceline.errors import EngineFailed, InputError
from paceline.report.record import RunRecord
from paceline.scheduler.invariants import InvariantViolation
from paceline.sim.faults import draw_aborts, with_bursts
from paceline.sim.replica import Replica
from paceline.sim.requests import RequestSource, Wants, draw_priorities, kinds_of, service_classes
from paceline.sim.router import ROUTERS
from paceline.sim.settings import SimConfig
from paceline.watch.film import Watch
from paceline.watch.measure import Meter
from paceline.workload.model import Workload

Progress = Callable[[int, int, float], None]  # requests ended, requests in all, virtual seconds
PROGRESS_STEPS = 256


def _silent(ended: int, total: int, now_s: float) -> None:
    return None


def simulate(
    config: SimConfig,
    workload: Workload,
    *,
    label: str = "run",
    recorder: StepRecorder | None = None,
    watch: Watch | None = None,
    on_progress: Progress = _silent,
) -> RunRecord:
    """Run `workload` to its end. Who records or watches does so to one engine, of which there must then be one."""
    if not len(workload):
        raise InputError(f"{workload.name}: there are no requests to simulate")
    if recorder is not None and config.num_replicas > 1:
        raise InputError("a run log records one engine; use one replica")
    if watch is not None and config.num_replicas > 1:
        raise InputError("one engine can be watched at a time; use one replica")
    try:
        simulation = Simulation(config, workload, recorder=recorder, on_progress=on_progress)
    except MemoryError as error:
        raise InputError(
            "the simulated engines do not fit into this machine's memory; lower --replicas, --max-num-seqs, "
            "--max-model-len or --num-blocks"
        ) from error
    if watch is not None:
        (replica,) = simulation.replicas
        replica.watch(watch(replica.engine.scheduler.state))
    try:
        simulation.run()
    except InvariantViolation as violation:
        raise EngineFailed(
            f"invariant broken with seed {config.seed} at {simulation.now_s:.6f} s: {violation}"
        ) from violation
    return simulation.record(label)


class Simulation:
    """All replicas of one run."""

    def __init__(
        self,
        config: SimConfig,
        workload: Workload,
        *,
        recorder: StepRecorder | None = None,
        on_progress: Progress = _silent,
    ) -> None:
        self.now_s = 0.0
        self.workload = with_bursts(workload, config.faults.bursts, config.seed)
        self._config = config
        self._on_progress = on_progress
        priorities = draw_priorities(config.priorities, self.workload, config.seed)
        self._meter = Meter(self.workload, kinds_of(config.priorities, self.workload, priorities))
        self._loads = np.zeros(config.num_replicas, np.int64)
        self._router = ROUTERS[config.router]()
        self._aborts = draw_aborts(self.workload, config.faults.aborts, config.seed)
        self._source = RequestSource(
            self.workload,
            config.engine.kv.block_size,
            priorities=priorities,
            classes=service_classes(config.priorities, self.workload),
            wants=Wants(
                deadline_s=config.deadline_s,
                ttft_slo_ms=config.ttft_slo_ms,
                itl_slo_ms=config.itl_slo_ms,
                on_infeasible=config.on_infeasible,
            ),
        )
        self.replicas = [
            Replica(number, config, self._meter, self._loads, aborts=self._aborts, recorder=recorder)
            for number in range(config.num_replicas)
        ]
        self._due: list[
            tuple[float, int]
        ] = []  # when a replica's next step is due; an old entry may be wrong
        self._leaving: list[tuple[float, int, Replica]] = []  # aborts by time: when, whom, where
        self._until_progress = PROGRESS_STEPS

    def run(self) -> None:
        known_s = self.workload.arrival_s + self._config.request_s
        for index, now_s in enumerate(known_s.tolist()):
            self._advance(now_s)
            self._arrive(index, now_s)
        self._advance(math.inf)
        for replica in self.replicas:
            replica.close()
        self._on_progress(self._meter.num_ended, len(self.workload), self.now_s)

    def record(self, label: str) -> RunRecord:
        config = self._config
        kv = self.replicas[0].engine.scheduler.state.kv
        gave_way: Counter[str] = Counter()
        for replica in self.replicas:
            gave_way.update(replica.engine.scheduler.state.counters.preempted_by)
        return self._meter.record(
            label,
            config.described(),
            max_num_seqs=config.engine.scheduler.max_num_seqs,
            num_replicas=config.num_replicas,
            kv_total_slots=kv.groups[0].pool.usable * kv.block_size,
            preempted_by=gave_way,
        )

    def _arrive(self, index: int, now_s: float) -> None:
        self.now_s = now_s
        prefix_ids = self.workload.prefix_ids
        number = self._router.choose(
            self._loads,
            int(self.workload.tenant[index]),
            () if prefix_ids is None else prefix_ids[index],
        )
        replica = self.replicas[number]
        replica.add(self._source.make(index), now_s)
        self._schedule(replica)
        if self._aborts is not None and self._aborts.at_s[index] < math.inf:
            heapq.heappush(self._leaving, (float(self._aborts.at_s[index]), index, replica))

    def _advance(self, until_s: float) -> None:
        """Let everything happen that comes before `until_s`."""
        while self._leaving and self._leaving[0][0] < until_s:
            leave_s, index, replica = heapq.heappop(self._leaving)
            self._step_until(leave_s)
            replica.abort(RequestId(index), leave_s)
            self._schedule(replica)
        self._step_until(until_s)

    def _step_until(self, until_s: float) -> None:
        """Step every replica whose next step is due before `until_s`, in order of time."""
        due, replicas = self._due, self.replicas
        while due and due[0][0] < until_s:
            ready_s, number = heapq.heappop(due)
            replica = replicas[number]
            if replica.ready_s != ready_s:
                continue  # it was woken earlier, or has nothing to do any more
            replica.queued_s = None
            self.now_s = ready_s
            replica.step()
            self._schedule(replica)
            self._until_progress -= 1
            if not self._until_progress:
                self._until_progress = PROGRESS_STEPS
                self._on_progress(self._meter.num_ended, len(self.workload), ready_s)

    def _schedule(self, replica: Replica) -> None:
        if replica.ready_s is not None and replica.ready_s != replica.queued_s:
            replica.queued_s = replica.ready_s
            heapq.heappush(self._due, (replica.ready_s, replica.number))
