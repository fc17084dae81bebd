"""Whole decode steps, captured once for a ladder of batch sizes and replayed with one launch each.

A batch of another size takes the next larger rung; the slots it does not use belong to nobody. Capturing ends early,
with a notice, when memory runs out: larger batches are then launched kernel by kernel.
"""

from __future__ import annotations

import gc
import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import torch

RUNGS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
    1280, 1536, 1792, 2048,
)  # fmt: skip

_logger = logging.getLogger("paceline")


def ladder(max_slots: int) -> list[int]:
    """The batch sizes to capture: the largest is the most rows there can be."""
    return [rung for rung in RUNGS if rung < max_slots] + [max_slots]


def rung_of(num_rows: int, max_slots: int) -> int:
    """The rung a batch is computed on, from a graph or not: its products then have the same size, and bits."""
    rungs = ladder(max_slots)
    return rungs[bisect_left(rungs, num_rows)]


class DecodeKind(NamedTuple):
    """What a decode step does beyond the plain one."""

    rich: bool = False  # some rows want more than a temperature
    shared: bool = False  # the beginning many rows share is computed apart


KINDS = (DecodeKind(), DecodeKind(rich=True), DecodeKind(shared=True))
Step = Callable[[int, DecodeKind], None]


class DecodeGraphs:
    """Graphs by number of slots and kind."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[int, DecodeKind], torch.cuda.CUDAGraph] = {}
        self._rungs: list[int] = []

    def capture(self, rungs: list[int], step: Step, stream: torch.cuda.Stream) -> None:
        """Capture `step` for each of `rungs`, in `stream`, after one run of each outside of a graph."""
        for slots in rungs:
            step(slots, KINDS[0])  # loads what it launches: that must not happen inside a capture
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()
        gc.disable()  # a kernel that is collected during a capture would end it
        try:
            pool = None
            # The largest first: the others fit into its memory.
            for slots, kind in itertools.product(reversed(rungs), KINDS):
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        step(slots, kind)
                except torch.OutOfMemoryError:
                    _logger.warning(
                        "no memory for a graph of %d rows: such steps are launched one by one", slots
                    )
                    continue
                pool = pool or graph.pool()
                self._graphs[slots, kind] = graph
        finally:
            gc.enable()
        self._rungs = sorted({slots for slots, _ in self._graphs})

    def replay(self, num_rows: int, kind: DecodeKind) -> bool:
        """Run the smallest graph that has room; False if none has."""
        at = bisect_left(self._rungs, num_rows)
        graph = self._graphs.get((self._rungs[at], kind)) if at < len(self._rungs) else None
        if graph is None:
            return False
        graph.replay()
        return True
