"""Batching modes: when requests may be admitted, what shape their batch has, and when finished ones may leave.

`continuous` admits whenever there is room and lets each row leave at once. `dynamic` and `static` are
request-level batching as it was before: a batch is formed while nothing runs, padded to its longest prompt, its
KV reserved for the padded rectangle, and all its rows leave together. The scheduler has no other notion of modes.
Decision: docs/decisions/0004-modes-are-request-level.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import SchedulerConfig
from paceline.core.request import Request
from paceline.policy import RequestView


@dataclass(frozen=True, slots=True)
class BatchShape:
    """A padded batch: its first `count` candidates, the length they are padded to, slots reserved for each."""

    count: int
    padded_len: int
    slots: int


class Mode(Protocol):
    """Admission gate and retire rule."""

    keeps_finished: bool  # finished rows stay in the batch, computing padding

    def admit_limit(self, view: RequestView, num_running: int) -> int:
        """How many waiting requests may be admitted now, resources aside."""
        ...

    def next_opening_s(self, view: RequestView, num_running: int) -> float | None:
        """When the gate opens if nothing else happens; None if it never does."""
        ...

    def rank(self, view: RequestView, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """The order of admission, given the policy's."""
        ...

    def shape(self, batch: Sequence[Request], fits: Callable[[int, int], bool]) -> BatchShape | None:
        """The rectangle for a batch, or None when rows are independent. `fits(count, slots)` asks the KV."""
        ...


class Continuous:
    """Every step is an opening."""

    keeps_finished = False

    def admit_limit(self, view: RequestView, num_running: int) -> int:
        return len(view)

    def next_opening_s(self, view: RequestView, num_running: int) -> float | None:
        return None

    def rank(self, view: RequestView, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return scores

    def shape(self, batch: Sequence[Request], fits: Callable[[int, int], bool]) -> BatchShape | None:
        return None


class Dynamic:
    """Opens when nothing runs and a full batch waits, or the oldest has waited `timeout_s`."""

    keeps_finished = True

    def __init__(self, batch_size: int, timeout_s: float) -> None:
        self._batch_size = batch_size
        self._timeout_s = timeout_s

    def admit_limit(self, view: RequestView, num_running: int) -> int:
        if num_running or not len(view):
            return 0
        if len(view) >= self._batch_size or view.now_s >= float(view.arrival_s.min()) + self._timeout_s:
            return self._batch_size
        return 0

    def next_opening_s(self, view: RequestView, num_running: int) -> float | None:
        if num_running or not len(view):
            return None
        return float(view.arrival_s.min()) + self._timeout_s

    def rank(self, view: RequestView, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return scores

    def shape(self, batch: Sequence[Request], fits: Callable[[int, int], bool]) -> BatchShape | None:
        """As many of the batch as their padded rectangle leaves KV for; one alone always fits."""
        for count in range(len(batch), 0, -1):
            padded_len = max(request.num_tokens for request in batch[:count])
            new_tokens = max(request.max_total - request.num_tokens for request in batch[:count])
            if fits(count, padded_len + new_tokens):
                return BatchShape(count, padded_len, padded_len + new_tokens)
        return BatchShape(0, 0, 0)


class Static(Dynamic):
    """Fixed batches: waits for a full one (a part-filled one only after a long wait), FIFO or sorted by length."""

    def __init__(self, batch_size: int, flush_s: float, *, by_length: bool) -> None:
        super().__init__(batch_size, flush_s)
        self._by_length = by_length

    def rank(self, view: RequestView, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        return view.num_tokens.astype(np.float64) if self._by_length else scores


def make_mode(config: SchedulerConfig) -> Mode:
    """The mode a config names; a batch is never larger than the row limit."""
    batch_size = min(config.batch_size, config.max_num_seqs)
    if config.mode == "dynamic":
        return Dynamic(batch_size, config.batch_timeout_s)
    if config.mode == "static":
        return Static(batch_size, config.static_flush_s, by_length=config.static_order == "sorted")
    return Continuous()
