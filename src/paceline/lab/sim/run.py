"""The run: arrivals, aborts and steps of all replicas in the order of virtual time.

Before a request is routed at time t, every replica with work has been advanced to t. Replicas are stepped in order of
the time their next step is due; ties go to the lowest number. The same configuration, workload and seed give the same
record.
"""

from __future__ import annotations

import heapq
import math
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.model_set import ModelShare
from paceline.core.recorder import StepRecorder
from paceline.core.request import BlockKey, Request, RequestId, sooner
from paceline.core.sampling import SamplingParams
from paceline.core.service_class import CLASSES, DEFAULT_CLASS, ServiceLevel
from paceline.core.stretch import MediaInput, MediaPart
from paceline.engine.conductor import Conductor, Seat, broken_rules
from paceline.engine.media import attach
from paceline.engine.slab_trade import SlabTrade, broken_slabs
from paceline.engine.trace import Watch
from paceline.errors import EngineFailed, InputError
from paceline.kv.slabs import Owner, SlabMarket
from paceline.lab.measure import Meter
from paceline.lab.report.run_record import RunRecord
from paceline.lab.sim.faults import draw_aborts, with_bursts
from paceline.lab.sim.replica import Arrivals, Replica, arrivals_by_name, draw_of_requests
from paceline.lab.sim.settings import SimConfig
from paceline.lab.sim.simulated_fleet import SimulatedFront
from paceline.lab.workload.workload import Workload
from paceline.scheduler.invariants import InvariantViolation

PRIORITY_FORMS = "none, tenant, class, random:LEVELS"
MAX_LEVELS = 1000
MOST_CLASSES = 16  # that figures are kept apart for


class RequestSource:
    """Makes request number `index` of a workload when it arrives; its id is its number.

    Prompts are zeros: every request looks at one and the same zero, so that nothing is stored. An output has exactly
    its recorded length, as in the benchmarks: nothing ends it early.
    """

    def __init__(self, workload: Workload, config: SimConfig) -> None:
        self.workload = workload
        self.priorities = draw_priorities(config.priorities, workload, config.seed)
        self._config = config
        self._classes = service_classes(config.priorities, workload)
        self._adapters = draw_of_requests(config.num_adapters, len(workload), config.seed)
        # A step of zero bytes from one entry to the next: as long as needed, and no memory.
        self._zeros = np.broadcast_to(np.int32(0), int(workload.prompt_len.max(initial=1)))
        self._sampling: dict[tuple[int | None, ...], SamplingParams] = {}

    def make(self, index: int) -> Request:
        workload = self.workload
        sampling, arrival_s = self._sampling_of(index), float(workload.arrival_s[index])
        tenant = int(workload.tenant[index])
        request = Request(
            RequestId(index),
            self._zeros[: workload.prompt_len[index]],
            sampling,
            arrival_s=arrival_s,
            tenant=workload.tenants[tenant],
            service_level=ServiceLevel(self._classes[tenant], int(self.priorities[index])),
            deadline_s=sooner(None, arrival_s, sampling.deadline_ms),
            keys=self.keys(index),
        )
        request.adapter = int(self._adapters[index])
        media = self.media(index)
        if media:
            attach(request, media, lambda content: struct.pack("<i", tenant) + content)
        return request

    def media(self, index: int) -> list[MediaPart]:
        """The pictures of a request: they stand before its text, one behind the other."""
        encoder = self._config.machine.model.encoder
        if self.workload.images is None or encoder is None:
            return []
        parts, start = [], 0
        for tokens, content in self.workload.images.of(index):
            given = MediaInput(
                content=struct.pack("<qi", content, tokens),
                units=tokens * encoder.units_per_token,
                outputs=tokens,
            )
            parts.append(MediaPart(start, given))
            start += tokens
        return parts

    def keys(self, index: int) -> list[BlockKey]:
        """The keys of the full blocks of a prompt, as far as the workload names their content."""
        prefix_ids = self.workload.prefix_ids
        if prefix_ids is None:
            return []
        ids, size, span = prefix_ids[index], self._config.engine.kv.block_size, self.workload.prefix_block
        tenant, adapter = int(self.workload.tenant[index]), int(self._adapters[index])
        known = min(int(self.workload.prompt_len[index]), len(ids) * span)
        keys: list[BlockKey] = []
        for start in range(0, known - size + 1, size):
            # A block is named by the ids it lies in and its place there. An id stands for all that is
            # before it too, so that equal keys mean equal beginnings.
            within = ids[start // span : (start + size - 1) // span + 1]
            name = struct.pack(f"<iq{len(within)}q", tenant, start % span, *within)
            if adapter:
                name += struct.pack("<i", adapter)
            keys.append(BlockKey(name, name, parent=keys[-1].key if keys else b""))
        return keys

    def arrivals(self) -> Arrivals:
        """When each block of the workload will be asked for."""
        times_s = self.workload.arrival_s.tolist()
        return arrivals_by_name((time_s, self.keys(index)) for index, time_s in enumerate(times_s))

    def _sampling_of(self, index: int) -> SamplingParams:
        """One for all requests that are alike."""
        output_len = int(self.workload.output_len[index])
        objectives = self._config.objectives(output_len)
        if self.workload.objectives is not None:  # what a trace says of a request goes before what all want
            own = self.workload.objectives[index].tolist()
            objectives = tuple(mine or other for mine, other in zip(own, objectives, strict=True))
        key = (output_len, *objectives)
        sampling = self._sampling.get(key)
        if sampling is None:
            deadline_ms, ttft_slo_ms, itl_slo_ms = objectives
            sampling = self._sampling[key] = SamplingParams(
                max_tokens=output_len,
                temperature=0.0,
                ignore_eos=True,
                deadline_ms=deadline_ms,
                ttft_slo_ms=ttft_slo_ms,
                itl_slo_ms=itl_slo_ms,
                on_infeasible=self._config.on_infeasible,
            )
        return sampling


def draw_priorities(form: str, workload: Workload, seed: int) -> NDArray[np.int32]:
    """A priority per request: `none` (as the workload has it, else all 0), `tenant` (the tenant's number), `class` (0:
    the class that a tenant is named after says it) or `random:LEVELS`."""
    if form == "none" and workload.priority is not None:
        return workload.priority
    if form in ("none", "class"):
        return np.zeros(len(workload), np.int32)
    if form == "tenant":
        return workload.tenant
    kind, _, levels = form.partition(":")
    if kind != "random" or not levels.isascii() or not levels.isdigit():
        raise InputError(f"unknown priorities '{form}'; the forms are {PRIORITY_FORMS}")
    if not 1 <= int(levels) <= MAX_LEVELS:
        raise InputError(f"priorities '{form}': LEVELS must lie between 1 and {MAX_LEVELS}")
    random = np.random.default_rng([seed, 0x7072696F])
    return random.integers(0, int(levels), len(workload), dtype=np.int32)


def service_classes(form: str, workload: Workload) -> list[str]:
    """The class of service of each tenant: with `class` the one it is named after."""
    if form != "class":
        return [DEFAULT_CLASS] * len(workload.tenants)
    return [name if name in CLASSES else DEFAULT_CLASS for name in workload.tenants]


def kinds_of(
    form: str, workload: Workload, priorities: NDArray[np.int32]
) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Names of what figures are kept apart for, classes or levels of priority, and which of them each request has;
    nothing where all are alike."""
    if form == "class":
        classes = service_classes(form, workload)
        names = sorted(set(classes), key=CLASSES.index)
        index = np.array([names.index(name) for name in classes])[workload.tenant]
    else:
        levels, index = np.unique(priorities, return_inverse=True)
        names = [f"priority {level}" for level in levels]
    if not 1 < len(names) <= MOST_CLASSES:
        return (), np.empty(0, np.int32)
    return tuple(names), index.astype(np.int32)


Progress = Callable[[int, int, float], None]  # requests ended, requests in all, virtual seconds
PROGRESS_STEPS = 256


def simulate(
    config: SimConfig,
    workload: Workload,
    *,
    label: str = "run",
    recorder: StepRecorder | None = None,
    watch: Watch | None = None,
    on_progress: Progress = lambda ended, total, now_s: None,
) -> RunRecord:
    """Run `workload` to its end. A recorder or watcher follows one engine, so there must be only one then."""
    if not len(workload):
        raise InputError(f"{workload.name}: there are no requests to simulate")
    if recorder is not None and config.num_replicas > 1:
        raise InputError("a run log records one engine; use one replica")
    if watch is not None and config.num_replicas > 1:
        raise InputError("one engine can be watched at a time; use one replica")
    kind: type[Simulation] = Simulation
    if config.models:
        kind = SharedDevice
    try:
        simulation = kind(config, workload, recorder=recorder, on_progress=on_progress)
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
        on_progress: Progress = lambda ended, total, now_s: None,
    ) -> None:
        self.now_s = 0.0
        self.workload = with_bursts(workload, config.faults.bursts, config.seed)
        self._config = config
        self._on_progress = on_progress
        self._source = RequestSource(self.workload, config)
        kinds = kinds_of(config.priorities, self.workload, self._source.priorities)
        self._meter = Meter(self.workload, kinds)
        self._aborts = draw_aborts(self.workload, config.faults.aborts, config.seed)
        arrivals = self._source.arrivals() if config.clairvoyant else None
        self.replicas = [
            Replica(
                number,
                self._config_of(number),
                self._meter,
                aborts=self._aborts,
                recorder=recorder,
                arrivals=arrivals,
            )
            for number in range(config.num_replicas)
        ]
        is_fleet = config.num_replicas > 1 and not config.models
        self.front = SimulatedFront(config, self.replicas) if is_fleet else None
        # When a replica's next step is due; an old entry may be wrong.
        self._due: list[tuple[float, int]] = []
        self._leaving: list[tuple[float, int, Replica]] = []  # aborts by time: when, request, replica
        self._until_progress = PROGRESS_STEPS

    def _config_of(self, number: int) -> SimConfig:
        return self._config

    def run(self) -> None:
        known_s = self.workload.arrival_s + self._config.request_s
        for index, now_s in enumerate(known_s.tolist()):
            if self.front is not None:
                self.front.hear(now_s, self._advance)
            self._advance(now_s)
            self._arrive(index, now_s)
        self._advance(math.inf)
        for replica in self.replicas:
            replica.close()
        self._on_progress(self._meter.num_ended, len(self.workload), self.now_s)

    def record(self, label: str) -> RunRecord:
        config = self._config
        kv = self.replicas[0].engine.scheduler.state.kv
        preempted: Counter[str] = Counter()
        for replica in self.replicas:
            preempted.update(replica.engine.scheduler.state.counters.preempted_by)
        described = config.described()
        if self.front is not None and self.front.scaler is not None:
            described["changes"] = self.front.scaler.changes
        return self._meter.record(
            label,
            described,
            max_num_seqs=config.engine.scheduler.max_num_seqs,
            num_replicas=config.num_replicas,
            kv_total_slots=kv.num_slots,
            preempted_by=preempted,
            replica_s=self._replica_s(),
        )

    def _replica_s(self) -> float | None:
        """Of those that were started and stopped, up to the last arrival."""
        scaler = None if self.front is None else self.front.scaler
        return None if scaler is None else scaler.seconds(float(self.workload.arrival_s.max()))

    def _arrive(self, index: int, now_s: float) -> None:
        self.now_s = now_s
        request = self._source.make(index)
        replica = self.replicas[self._replica_for(index, request)]
        replica.add(request, now_s, self._source.media(index))
        self._schedule(replica)
        if self._aborts is not None and self._aborts.at_s[index] < math.inf:
            heapq.heappush(self._leaving, (float(self._aborts.at_s[index]), index, replica))

    def _replica_for(self, index: int, request: Request) -> int:
        return 0 if self.front is None else self.front.choose(request, self.now_s)

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


SHARED_SLABS = 64  # that the KV of several models is cut into


class SharedDevice(Simulation):
    """One device and several models: a replica for each. Slabs of the KV cache go to the model that is short of blocks,
    as on a GPU; one too small for that is cut by the shares. The conductor of a server says whose step is next."""

    def __init__(self, config: SimConfig, *given: Any, **more: Any) -> None:
        super().__init__(config, *given, **more)
        seats = [Seat(config=ModelShare(name=name, share=share)) for name, share in config.models]
        self.conductor = Conductor(seats)
        self.trade = self._open_trade()
        self._free_s = 0.0  # when the device has done the step before

    def _config_of(self, number: int) -> SimConfig:
        """Steps are not planned ahead: the next one may be another model's."""
        engine, models = self._config.engine, self._config.models
        size = max(1, engine.kv.num_blocks // SHARED_SLABS)
        num_slabs = engine.kv.num_blocks // size
        longest = -(-engine.scheduler.max_model_len // engine.kv.block_size)
        floor = -(-(longest + 1) // size)
        is_plain = engine.scheduler.mode == "continuous" and not any(
            group.num_blocks for group in engine.kv.groups
        )
        if is_plain and floor * len(models) < num_slabs:
            kv = replace(
                engine.kv,
                num_blocks=num_slabs * size,
                slab_blocks=size,
                least_blocks=floor * size,
                most_slabs=num_slabs,
            )
        else:
            part = models[number][1] / sum(share for _, share in models)
            kv = replace(engine.kv, num_blocks=max(2, int(engine.kv.num_blocks * part)))
        return replace(self._config, engine=replace(engine, kv=kv, depth=0))

    def _replica_for(self, index: int, request: Request) -> int:
        """The model that a request is for: one for each tenant, else each in turn."""
        chosen = int(self.workload.tenant[index]) if len(self.workload.tenants) > 1 else index
        return chosen % len(self.replicas)

    def _open_trade(self) -> SlabTrade | None:
        engines = [replica.engine for replica in self.replicas]
        kv = engines[0].scheduler.state.kv
        if not kv.slabs.size:
            return None
        pool = kv.groups[0].pool
        num_slabs, floor = pool.num_blocks // kv.slabs.size, min(kv.slabs.least_usable) // kv.slabs.size
        owners = [
            Owner(name=name, share=share, floor=floor, ceiling=num_slabs)
            for name, share in self._config.models
        ]
        trade = SlabTrade(SlabMarket(num_slabs, owners), engines)
        trade.begin()
        return trade

    def _step_until(self, until_s: float) -> None:
        while True:
            ready = [replica.ready_s for replica in self.replicas]
            soonest_s = min((ready_s for ready_s in ready if ready_s is not None), default=until_s)
            now_s = max(self._free_s, soonest_s)
            if now_s >= until_s:
                return
            if self.trade is not None:
                self.trade.settle()
            chosen = self.conductor.next([ready_s is not None and ready_s <= now_s for ready_s in ready])
            assert chosen is not None, "the soonest is ready"
            replica = self.replicas[chosen]
            replica.ready_s = self.now_s = now_s
            replica.step()
            self._free_s = max(now_s, replica.clock.now())
            self.conductor.charge(chosen, self._free_s - now_s)
            if self._config.check:
                broken = broken_rules(self.conductor, [each.engine for each in self.replicas])
                broken += [] if self.trade is None else broken_slabs(self.trade)
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
            kv_total_slots=sum(kv.num_slots for kv in kvs)
            if self.trade is None
            else self._config.engine.kv.num_blocks * kvs[0].block_size,
        )
