"""The runner of a model on a CPU over its sleeps: dropped with its KV, made again when the model wakes.

At the first level the weights stay where they are: on a CPU, host memory is the device. Their file is not read again,
and a wake takes milliseconds. At the second level the weights go too, and a wake reads the file as the start did.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from paceline.core.counters import CPUWork
from paceline.core.standing import WEIGHTS_DROPPED
from paceline.models.files.adapter import Adapter
from paceline.runner.cpu import CPURunner

Weights = TypeVar("Weights")


class CPUSleeper(Generic[Weights]):
    """`load` reads the weights, `make` puts a runner around them."""

    on_gpu = False

    def __init__(
        self, load: Callable[[], Weights], make: Callable[[Weights], CPURunner], first: Weights
    ) -> None:
        self._load = load
        self._make = make
        self._weights: Weights | None = first
        self._runner: CPURunner | None = None
        self._last = CPUWork()

    def open(self) -> CPURunner:
        weights = self._weights
        if weights is None:
            weights = self._weights = self._load()
        runner = self._runner = self._make(weights)
        return runner

    def let_go(self, level: int) -> None:
        if self._runner is not None:
            self._last = self._runner.work()
            self._runner.close()
            self._runner = None
        if level >= WEIGHTS_DROPPED:
            self._weights = None
            gc.collect()
            with suppress(AttributeError):  # of glibc: what reading weights took goes back to the system
                ctypes.CDLL(None).malloc_trim(0)

    # As the memory of adapters, whichever runner there is. A model that sleeps has none of them.

    def put(self, number: int, adapter: Adapter) -> None:
        self._adapters.put(number, adapter)

    def drop(self, number: int) -> None:
        self._adapters.drop(number)

    def prepare(self, adapter: Adapter) -> Adapter:
        return getattr(self._adapters, "prepare", lambda same: same)(adapter)  # type: ignore[no-any-return]

    @property
    def _adapters(self) -> Any:
        return getattr(None if self._runner is None else self._runner.compute, "adapters", None)

    def work(self) -> CPUWork:
        """What the threads have done; of a model that sleeps, before it did."""
        runner = self._runner
        return self._last if runner is None else runner.work()
