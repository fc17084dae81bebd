"""One engine on its own virtual clock, with its runner, its faults and its share of the measuring.

Owns when the engine's next step may happen. What a step does is the engine's business, which request comes here
that of the front.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.sized import Capacity
from paceline.core.clock import ManualClock
from paceline.core.events import Finished, StepEvents
from paceline.core.recorder import RunWatcher, StepRecorder
from paceline.core.request import BlockKey, NoHooks, Request, RequestId
from paceline.core.stretch import MediaPart
from paceline.costs.fit import TimeSpread
from paceline.engine.adapters import Adapters, Work
from paceline.engine.media import Media
from paceline.errors import (
    DeadlineImpossible,
    DeadlineInfeasible,
    EngineFailed,
    NeverFits,
    QueueFull,
)
from paceline.factory import build_engine
from paceline.kv.block_pool import BlockPool, Blocks, EvictionOrder
from paceline.lab.measure import Meter, StepMeter
from paceline.lab.sim.faults import Aborts, ReplicaFaults
from paceline.lab.sim.settings import SimConfig
from paceline.lab.sim.simulated_runner import Links, SimulatedDrafts, TimedRunner
from paceline.models.files.adapter_files import Adapter
from paceline.scheduler.invariants import InvariantChecker
from paceline.scheduler.scheduler import Scheduler

# The eviction order of a prophet: what is asked for last goes first. A bound for other orders, in simulations only.
#
# Requests are thought to be served in the order they arrive: the next use of a block is the first arrival that has
# not been served.


Arrivals = Mapping[bytes, Sequence[float]]  # by name of a block, when requests that begin with it arrive


def arrivals_by_name(requests: Iterable[tuple[float, Iterable[BlockKey]]]) -> Arrivals:
    """From requests in the order of their arrival."""
    found: dict[bytes, list[float]] = {}
    for arrival_s, keys in requests:
        for key in keys:
            found.setdefault(key.key, []).append(arrival_s)
    return found


def pools_with(arrivals: Arrivals) -> Callable[..., BlockPool]:
    """Makes pools whose order knows these arrivals."""
    return lambda num_blocks, **options: BlockPool(num_blocks, **{**options, "order": Belady(arrivals)})


class Belady(EvictionOrder):
    """The block whose next request arrives last goes first."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._names: dict[int, bytes] = {}
        self._served: dict[bytes, int] = {}  # requests that have used a block, by its name
        # Next arrival, negative, and a number; an entry holds while `_number` has it.
        self._heap: list[tuple[float, int, int]] = []
        self._number: dict[int, int] = {}
        self._last = 0

    def entered(
        self, blocks: Sequence[int], names: Sequence[bytes], uses: Sequence[int] | None = None
    ) -> None:
        self._names.update(zip(blocks, names, strict=True))
        self.used(blocks)

    def used(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            name = self._names[block]
            self._served[name] = self._served.get(name, 0) + 1

    def add(self, blocks: Sequence[int] | Blocks) -> None:
        for block in np.asarray(blocks).tolist():
            self._last += 1
            self._number[block] = self._last
            heapq.heappush(self._heap, (-self._next_s(block), self._last, block))

    def remove(self, blocks: Sequence[int] | Blocks) -> None:
        for block in np.asarray(blocks).tolist():
            del self._number[block]

    def pick(self, count: int) -> list[int]:
        picked: list[int] = []
        while len(picked) < count:
            _, number, block = heapq.heappop(self._heap)
            if self._number.get(block) == number:
                del self._number[block]
                picked.append(block)
        return picked

    def _next_s(self, block: int) -> float:
        name = self._names[block]
        times, served = self._arrivals.get(name, ()), self._served[name]
        return times[served] if served < len(times) else math.inf

    def __len__(self) -> int:
        return len(self._number)

    def __iter__(self) -> Iterator[int]:
        waiting = (entry for entry in sorted(self._heap) if self._number.get(entry[2]) == entry[1])
        return (block for _, _, block in waiting)


# Adapters of a simulated engine: which request has which, and how long a folder takes to read.
#
# The engine and the scheduler are the real ones; what an adapter adds to a step is not part of the cost model.


def draw_of_requests(num_adapters: int, num_requests: int, seed: int) -> NDArray[np.int64]:
    """The adapter of each request, from 1 on: the second is asked for half as often as the first, and so on (Zipf)."""
    if not num_adapters:
        return np.zeros(num_requests, np.int64)
    weights = 1.0 / np.arange(1, num_adapters + 1)
    random = np.random.default_rng([seed, 0x6C6F7261])
    return 1 + random.choice(num_adapters, num_requests, p=weights / weights.sum())


class TimedReads:
    """Reads one folder after the other, each in the same time."""

    def __init__(self, clock: ManualClock, read_s: float) -> None:
        self._clock = clock
        self._read_s = read_s
        self._free_s = 0.0
        self._under_way: list[tuple[float, int, Work]] = []

    def start(self, number: int, work: Work) -> None:
        self._free_s = max(self._free_s, self._clock.now()) + self._read_s
        self._under_way.append((self._free_s, number, work))

    def done(self) -> list[tuple[int, Work]]:
        now_s = self._clock.now()
        found = [(number, work) for due_s, number, work in self._under_way if due_s <= now_s]
        self._under_way = [each for each in self._under_way if each[0] > now_s]
        return found

    @property
    def next_s(self) -> float | None:
        """When the next one is read."""
        return self._under_way[0][0] if self._under_way else None


class _NoMemory:
    """A simulated device holds no matrices."""

    def put(self, number: int, adapter: Adapter) -> None: ...
    def drop(self, number: int) -> None: ...


def simulated_adapters(scheduler: Scheduler, reads: TimedReads) -> Adapters:
    def read(folder: Path) -> Adapter:
        return Adapter(identity=f"{int(folder.name):064x}", rank=16, parts={})

    return Adapters(scheduler, _NoMemory(), read, reads)


class StepSpread:
    """How steps of one shape differ: draws factors whose quantiles are those given. The same seed gives the same."""

    def __init__(self, spread: TimeSpread, seed: int, replica: int) -> None:
        self._spread = spread
        self._random = random.Random(f"spread:{seed}:{replica}")

    def stretch(self, reads_prompts: bool) -> float:
        """The factor of the next step; 1 where nothing is known of its kind."""
        quantiles = self._spread.prompts if reads_prompts else self._spread.decode
        if not quantiles:
            return 1.0
        at = self._random.random() * (len(quantiles) - 1)
        below = int(at)
        low, high = quantiles[below], quantiles[min(below + 1, len(quantiles) - 1)]
        return low + (high - low) * (at - below)


RETRY_S = 1e-3  # after a step that did nothing and that no clock will make possible
MAX_RETRIES = 100_000


class Replica:
    """Steps on call; says when it wants to step next."""

    def __init__(
        self,
        number: int,
        config: SimConfig,
        meter: Meter,
        *,
        aborts: Aborts | None = None,
        recorder: StepRecorder | None = None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.number = number
        self.clock = ManualClock()
        self.ready_s: float | None = None  # when the next step is due; None while there is nothing to do
        self.queued_s: float | None = None  # the last of these times that the simulation has on its list
        self._meter = meter
        self._asks = config.forecasts
        self._at_token = None if aborts is None else aborts.at_token
        self._live: dict[RequestId, Request] = {}
        self._retries = 0
        self.num_ended = self.ended_tokens = 0  # requests, and the tokens of their answers
        faults = ReplicaFaults(config.faults, config.seed, number)
        self._faults = faults if config.faults.any_per_step else None
        varied = StepSpread(config.spread, config.seed, number)
        self.runner = TimedRunner(
            config.machine.cost,
            self.clock,
            Capacity.of(config.engine).num_rows,
            block_bytes=config.block_bytes,
            host_step_s=config.host_step_s,
            stretch=lambda reads_prompts: varied.stretch(reads_prompts) * faults.stretch(),
            drafts=_drafts_of(config),
            seed=config.seed,
        )
        self.runner.links = _links_of(config)
        self.runner.host_row_s = config.host_row_s
        self._reads = TimedReads(self.clock, config.adapter_read_s)
        self.engine = build_engine(
            config.engine,
            self.runner,
            clock=self.clock,
            hooks=NoHooks(),
            recorder=recorder,
            make_pool=BlockPool if arrivals is None else pools_with(arrivals),
            make_checker=InvariantChecker if config.check else None,
            make_adapters=lambda scheduler: simulated_adapters(scheduler, self._reads),
        )
        self.engine.media = Media(self.engine.scheduler, self.runner)
        for adapter in range(1, config.num_adapters + 1):
            self.engine.adapters.load("", Path(str(adapter)))
        self.runner.observe = StepMeter(meter, number, self.engine.scheduler.state)
        self._watcher: RunWatcher | None = None
        self._step = self.engine.step_overlapped if self.engine.depth else self.engine.step

    def watch(self, watcher: RunWatcher) -> None:
        """Attach a watcher before the first step."""
        self._watcher = self.engine.watcher = watcher

    def add(self, request: Request, now_s: float, media: Sequence[MediaPart] = ()) -> None:
        """A request arrives, with its pictures; one that can never run, or finds the queue full, is refused."""
        self.clock.advance_to(now_s)
        if self._asks:
            forecast = self.engine.scheduler.forecast(request)
            if forecast is not None:
                self._meter.predicted(request.id, forecast.waited_s + forecast.first_token_s)
        try:
            self.engine.add_request(request)
        except (NeverFits, QueueFull, DeadlineInfeasible, DeadlineImpossible):
            self._meter.refused(request.id, now_s)
            return
        if media:
            self.engine.media.hold(request, media)
        self._live[request.id] = request
        self.wake(now_s)

    @property
    def is_busy(self) -> bool:
        """It has requests."""
        return bool(self._live)

    def forget_prefixes(self) -> None:
        """It was stopped and is started again."""
        for group in self.engine.scheduler.state.kv.groups:
            group.device.forget(np.flatnonzero(group.pool.cached))

    def abort(self, request_id: RequestId, now_s: float) -> None:
        """The client of a request has gone; one that has ended already is left alone."""
        if request_id not in self._live:
            return
        self.clock.advance_to(now_s)
        self.engine.abort(request_id)
        self._collect(self.engine.scheduler.take_events())
        self.wake(now_s)

    def wake(self, now_s: float) -> None:
        """Something came in: what the next step is waiting for may be here."""
        self.ready_s = max(now_s, self.clock.now())

    def step(self) -> None:
        """One step of the engine; sets when the next one is due."""
        assert self.ready_s is not None
        self.clock.advance_to(self.ready_s)
        runner = self.runner
        before = runner.num_submitted + runner.num_completed
        if self._faults is not None:
            self._faults.before_step(self.engine.scheduler)
        self._collect(self._step())
        if runner.num_submitted + runner.num_completed != before:
            self._retries = 0
            self.ready_s = self.clock.now()
        else:
            self.ready_s = self._next_chance_s()

    def close(self) -> None:
        self._collect(self.engine.drain())
        if self._watcher is not None:
            self._watcher.close(tuple(self.engine.scheduler.state.decisions), self.clock.now())
        self.engine.close()

    def _next_chance_s(self) -> float | None:
        """Nothing could be planned: when that may change."""
        if not self.engine.has_requests:
            return None
        now_s = self.clock.now()
        chances = (self.engine.scheduler.next_wakeup_s(), self._reads.next_s)
        if later := [each for each in chances if each is not None and each > now_s]:
            return min(later)
        # No clock will help: blocks were refused by a fault. A real engine would be asked again soon.
        self._retries += 1
        if self._retries > MAX_RETRIES:
            raise EngineFailed(
                f"replica {self.number} does not move on: {len(self._live)} requests are live and "
                f"{MAX_RETRIES} steps in a row did nothing"
            )
        return now_s + RETRY_S

    def _collect(self, events: StepEvents) -> None:
        if self._watcher is not None:
            self._watcher.on_events(events)
        for tokens in events.tokens:
            self._meter.tokens(tokens)
        for finished in events.finished:
            self._end(finished)
        if self._at_token is not None:
            for tokens in events.tokens:
                due = tokens.requests[tokens.index >= self._at_token[tokens.requests]]
                for request_id in due.tolist():
                    self.abort(request_id, tokens.time_s)

    def _end(self, finished: Finished) -> None:
        request = self._live.pop(finished.request)
        self.num_ended += 1
        self.ended_tokens += finished.num_output
        self._meter.ended(finished, request)


def _drafts_of(config: SimConfig) -> SimulatedDrafts | None:
    if config.acceptance is None:
        return None
    drafts = config.engine.scheduler.drafts
    return SimulatedDrafts(config.acceptance, () if drafts is None else drafts.sizes)


def _links_of(config: SimConfig) -> Links | None:
    """Links that copies run over beside steps, where prefixes are kept below the device."""
    costs = config.engine.scheduler.preemption_costs
    if costs is None or not config.engine.kv.cache_on_host:
        return None
    return Links(costs.block_s, costs.disk_block_s)
