"""Several models on one simulated device: the conductor of a server decides whose step is next.

Each model is a replica with its part of the KV cache; the device does one step of one of them at a time. A tenant's
requests go to one model, those of a workload without tenants to each in turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.config.models import ModelShare
from paceline.engine.conductor import Conductor, Seat, broken_rules
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim.router import Loads, PrefixIds
from paceline.lab.sim.run import Simulation
from paceline.lab.sim.settings import SimConfig
from paceline.scheduler.invariants import InvariantViolation


class ByModel:
    """The model that a request is for."""

    def __init__(self, num_tenants: int) -> None:
        self._has_tenants = num_tenants > 1
        self._next = 0

    def choose(self, loads: Loads, tenant: int, prefix_ids: PrefixIds) -> int:
        self._next += 1
        return (tenant if self._has_tenants else self._next - 1) % len(loads)


class SharedDevice(Simulation):
    """One device, and a replica for each model."""

    def __init__(self, config: SimConfig, *given: Any, **more: Any) -> None:
        super().__init__(config, *given, **more)
        seats = [Seat(config=ModelShare(name=name, share=share)) for name, share in config.models]
        self.conductor = Conductor(seats)
        self._router = ByModel(len(self.workload.tenants))
        self._free_s = 0.0  # when the device has done the step before

    def _config_of(self, number: int) -> SimConfig:
        """Steps are not planned ahead: the next one may be another model's."""
        engine, total = self._config.engine, sum(share for _, share in self._config.models)
        blocks = max(2, int(engine.kv.num_blocks * self._config.models[number][1] / total))
        kv = replace(engine.kv, num_blocks=blocks)
        return replace(self._config, engine=replace(engine, kv=kv, depth=0))

    def _step_until(self, until_s: float) -> None:
        while True:
            ready = [replica.ready_s for replica in self.replicas]
            soonest_s = min((ready_s for ready_s in ready if ready_s is not None), default=until_s)
            now_s = max(self._free_s, soonest_s)
            if now_s >= until_s:
                return
            chosen = self.conductor.next([ready_s is not None and ready_s <= now_s for ready_s in ready])
            assert chosen is not None, "the soonest is ready"
            replica = self.replicas[chosen]
            replica.ready_s = self.now_s = now_s
            replica.step()
            self._free_s = max(now_s, replica.clock.now())
            self.conductor.charge(chosen, self._free_s - now_s)
            if self._config.check:
                broken = broken_rules(self.conductor, [each.engine for each in self.replicas])
                if broken:
                    name, _, message = broken[0].partition(": ")
                    raise InvariantViolation(name, message)

    def record(self, label: str) -> RunRecord:
        found = super().record(label)
        kvs = [replica.engine.scheduler.state.kv for replica in self.replicas]
        spent = {seat.config.name: round(seat.device_s, 6) for seat in self.conductor.seats}
        return replace(
            found,
            config={**found.config, "device_s": spent},
            num_replicas=1,
            max_num_seqs=found.max_num_seqs * len(kvs),
            kv_total_slots=sum(kv.num_slots for kv in kvs),
        )
