"""The ranks of a model as threads of one process: what their parts come to, without followers and sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.engine import EngineConfig
from paceline.core.counters import CPUWork
from paceline.models.decoder import Decoder
from paceline.models.files.stored import TensorSource
from paceline.models.layers import LEAST_DENSE_ROWS
from paceline.models.load import DenseStorage, build_decoder
from paceline.models.together import Exchange
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.parallel.shards import ShardedSource
from paceline.runner.torch_step import TorchStep

Index = NDArray[np.int64]
WAIT_S = 60.0


class Meeting:
    """Where the threads of all ranks show each other a tensor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=WAIT_S)
        self.slots: list[Tensor] = [torch.zeros(0)] * size
        self.sums = 0


class AtMeeting(Exchange):
    """One rank at the meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def everyone(self, mine: Tensor) -> Sequence[Tensor]:
        meeting = self._meeting
        meeting.slots[self._rank] = mine
        meeting.barrier.wait()
        found = list(meeting.slots)
        meeting.barrier.wait()
        meeting.sums += self._rank == 0
        return found


class Ranks:
    """The decoders of all ranks of a model, and how they meet."""

    def __init__(self, source: TensorSource, size: int, max_positions: int) -> None:
        self.meeting = Meeting(size)
        self.decoders = [
            build_decoder(
                ShardedSource(source, rank, size),
                max_positions,
                DenseStorage(LEAST_DENSE_ROWS),
                together=AtMeeting(self.meeting, rank),
            )
            for rank in range(size)
        ]
        self._threads = ThreadPoolExecutor(size, initializer=partial(torch.set_num_threads, 1))

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """One for each rank, beside each other."""
        futures = [self._threads.submit(work) for work in works]
        return [future.result() for future in futures]

    def step(self, config: EngineConfig) -> RankedStep:
        return RankedStep(self, config)

    @property
    def whole(self) -> Decoder:
        return self.decoders[0]


class RankedStep:
    """Computes the steps of a model on all ranks (`cpu.StepCompute`). Their results must be the same."""

    def __init__(self, ranks: Ranks, config: EngineConfig) -> None:
        self._ranks = ranks
        self.steps = [TorchStep(decoder, config.kv) for decoder in ranks.decoders]
        self.spec = self.steps[0].spec
        self.kv: Any = _Everywhere([step.kv for step in self.steps])

    def forward(self, rows: DeviceRows, batch: FlatBatch, due: Index) -> NDArray[np.bool_]:
        goods = self._ranks.run([partial(step.forward, rows, batch, due) for step in self.steps])
        states = [step.seen()[1].numpy().tobytes() for step in self.steps]
        assert states == states[:1] * len(states), "the residual differs between ranks"
        good: NDArray[np.bool_] = goods[0]
        return good

    def logits(self, tokens: Index) -> NDArray[np.float32]:
        found: list[NDArray[np.float32]] = self._ranks.run(
            [partial(step.logits, tokens) for step in self.steps]
        )
        assert all(np.array_equal(found[0], each, equal_nan=True) for each in found)
        return found[0]

    def work(self) -> CPUWork:
        return CPUWork()


class _Everywhere:
    """The KV of all ranks, as if it were one."""

    def __init__(self, stores: Sequence[Any]) -> None:
        self._stores = stores
        self.block_size = stores[0].block_size

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            for store in self._stores:
                getattr(store, name)(*arguments)

        return call
