"""Vectors of pooled rows on the device: what the hidden states of a step come to, and how that reaches the host.

A vector is a sum of states over a run of tokens, in float32: all tokens of a prompt for `mean`, chunk by chunk into a
sum that belongs to the row, and the last token alone for `last`. The sums of rows whose prompt is computed are copied
to pinned memory behind the step, and made into vectors when the step is waited for; nothing waits before. It knows rows
and numbers, and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.parameters import CHOICE, MAX_CHOICES, MEAN, PoolingParams
from paceline.core.plan import RowJoins, RowVector
from paceline.runner.gpu.device_queue import DeviceQueue
from paceline.runner.gpu.graphs import slot_bucket
from paceline.runner.gpu.host_rows import DeviceBatch, HostRows
from paceline.runner.gpu.kernels.span_sums import span_sums
from paceline.runner.pooling import finished, softmax

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
_ALIGNED = 4  # words: kernels are compiled for columns that begin at multiples of 16 bytes

# Logits [tokens, vocabulary] of the tokens that are numbered.
Logits = Callable[[Tensor, Tensor], Tensor]


class PooledRow(NamedTuple):
    """A row whose vector a step makes."""

    row: int
    wanted: PoolingParams
    num_tokens: int  # of its prompt

    def vector(self, values: F32) -> F32:
        """From a sum of states, or from logits of a choice."""
        wanted = self.wanted
        if wanted.kind == CHOICE:
            logits = values[: len(wanted.token_ids)]
            return logits.copy() if wanted.raw else softmax(logits)
        return finished(values / self.num_tokens if wanted.kind == MEAN else values, wanted)


@dataclass(slots=True, eq=False)
class StepVectors:
    """Vectors on their way to the host; to be read behind the mark of their step."""

    parts: list[tuple[Tensor, list[PooledRow]]] = field(default_factory=list)

    def read(self) -> tuple[tuple[RowVector, ...], list[int]]:
        """What rows came to, and the rows whose numbers are not usable."""
        found, bad = [], []
        for values, rows in self.parts:
            for pooled, one in zip(rows, values.numpy(), strict=True):
                if np.isfinite(one).all():
                    found.append(RowVector(pooled.row, pooled.vector(one)))
                else:
                    bad.append(pooled.row)
        return tuple(found), bad


class DevicePooler:
    """The pooled rows of a decoder. It is false where there are none, which is what most steps find."""

    def __init__(self, num_rows: int, width: int, max_slots: int, queue: DeviceQueue) -> None:
        self._queue, self._max_slots = queue, max_slots
        self._wanted: dict[int, PoolingParams] = {}
        self._begun: set[int] = set()  # rows with a sum
        self._made: StepVectors | None = None
        self._sums = torch.zeros(num_rows, width, device=queue.device)

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def warm_up(self, states: Tensor) -> None:
        self._add([(0, 0, 1, 0)], states[:1])
        self._sums.zero_()

    def join(self, joins: RowJoins) -> None:
        """Rows start; whatever their former owners left is forgotten."""
        for row, sampling in zip(joins.row.tolist(), joins.sampling, strict=True):
            self._wanted.pop(row, None)
            self._begun.discard(row)
            if sampling.pooling is not None:
                self._wanted[row] = sampling.pooling

    def leave(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._wanted.pop(row, None)
            self._begun.discard(row)

    def clear(self) -> None:
        self._wanted.clear()
        self._begun.clear()

    def take(self, batch: DeviceBatch, rows: HostRows, states: Tensor, logits: Logits) -> None:
        """Look at the states [tokens, width] of a step that `rows` know of."""
        runs: list[tuple[int, int, int, int]] = []
        made, chosen, last = StepVectors(), [], []
        ended: list[PooledRow] = []
        first = len(batch.decode) + np.cumsum(batch.count) - batch.count
        columns = (batch.spans.tolist(), first.tolist(), batch.count.tolist())
        for row, at, count in zip(*columns, strict=True):
            wanted = self._wanted.get(row)
            length = rows.num_tokens.item(row)
            is_whole = rows.computed.item(row) == length
            if wanted is None or not (is_whole or wanted.kind == MEAN):
                continue
            pooled = PooledRow(row, wanted, length)
            if wanted.kind == CHOICE:
                chosen.append(pooled)
                last.append(at + count - 1)
                continue
            if wanted.kind == MEAN:
                runs.append((row, at, count, int(row in self._begun)))
                self._begun.add(row)
            else:
                runs.append((row, at + count - 1, 1, 0))
            if is_whole:
                ended.append(pooled)
        if runs:
            self._add(runs, states)
        if ended:
            which = to_device(np.array([pooled.row for pooled in ended], np.int32), self._queue)
            made.parts.append((to_host(self._sums.index_select(0, which), self._queue), ended))
        if chosen:
            made.parts.append((self._choices(chosen, last, states, logits), chosen))
        self._made = made if made.parts else None

    def made(self) -> StepVectors | None:
        """Those of the step that was looked at; None: it has none, or was given out."""
        made, self._made = self._made, None
        return made

    def _add(self, runs: list[tuple[int, int, int, int]], states: Tensor) -> None:
        span_sums(self._sums, states, to_device(padded_runs(runs), self._queue))

    def _choices(self, chosen: list[PooledRow], last: list[int], states: Tensor, logits: Logits) -> Tensor:
        """Logits of their token ids [rows, MAX_CHOICES]."""
        ids = np.zeros((len(chosen), MAX_CHOICES), np.int32)
        for place, pooled in enumerate(chosen):
            ids[place, : len(pooled.wanted.token_ids)] = pooled.wanted.token_ids
        # In a bucket, as draws are: a product of a size that has not been seen loads its kernel then.
        which = np.zeros(slot_bucket(len(last), self._max_slots), np.int32)
        which[: len(last)] = last
        found = logits(states, to_device(which, self._queue))[: len(chosen)]
        return to_host(found.gather(1, to_device(ids, self._queue).long()).float(), self._queue)


def padded_runs(runs: Sequence[tuple[int, int, int, int]]) -> I32:
    """Runs as `span_sums` takes them, with empty ones behind them."""
    columns = np.zeros((4, -(-len(runs) // _ALIGNED) * _ALIGNED), np.int32)
    columns[:, : len(runs)] = np.array(runs, np.int32).T
    return columns


def to_device(values: I32, queue: DeviceQueue) -> Tensor:
    """Behind what is queued, without waiting: torch keeps the pinned memory until the copy is done."""
    pinned = torch.empty(values.shape, dtype=torch.int32, pin_memory=queue.is_gpu)
    pinned.numpy()[...] = values
    return pinned.to(queue.device, non_blocking=True)


def to_host(values: Tensor, queue: DeviceQueue) -> Tensor:
    """There when the queue's next mark is reached."""
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=queue.is_gpu)
    return pinned.copy_(values, non_blocking=True)
