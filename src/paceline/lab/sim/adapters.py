"""Adapters of a simulated engine: which request has which, and how long a folder takes to read.

The engine and the scheduler are the real ones; what an adapter adds to a step is not part of the cost model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.clock import ManualClock
from paceline.engine.adapters import Adapters, Work
from paceline.models.files.adapter import Adapter
from paceline.scheduler.scheduler import Scheduler


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
