"""Whole decode steps, captured once for a ladder of batch sizes and replayed with one launch each.

A batch of another size takes the next larger rung; the slots it does not use belong to nobody. Capturing ends early,
with a notice, when memory runs out: larger batches are then launched kernel by kernel.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_left
from collections.abc import Callable

import torch

RUNGS = (
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
    1280, 1536, 1792, 2048,
)  # fmt: skip

_logger = logging.getLogger("paceline")


def ladder(max_slots: int) -> list[int]:
    """The batch sizes to capture: the largest is the most rows there can be."""
    return [rung for rung in RUNGS if rung < max_slots] + [max_slots]


class DecodeGraphs:
    """Graphs by number of slots."""

    def __init__(self) -> None:
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._rungs: list[int] = []

    def capture(self, rungs: list[int], step: Callable[[int], None], stream: torch.cuda.Stream) -> None:
        """Capture `step(slots)` for each of `rungs`, in `stream`, after one run of each outside of a graph."""
        for slots in rungs:
            step(slots)  # compiles and loads what it launches: neither may happen inside a capture
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()
        gc.disable()  # a kernel that is collected during a capture would end it
        try:
            pool = None
            for slots in reversed(rungs):  # the largest first: the others fit into its memory
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph, pool=pool, stream=stream):
                        step(slots)
                except torch.OutOfMemoryError:
                    _logger.warning(
                        "no memory for a graph of %d rows: such steps are launched one by one", slots
                    )
                    continue
                pool = pool or graph.pool()
                self._graphs[slots] = graph
        finally:
            gc.enable()
        self._rungs = sorted(self._graphs)

    def replay(self, num_rows: int) -> bool:
        """Run the smallest graph that has room; False if none has."""
        at = bisect_left(self._rungs, num_rows)
        if at == len(self._rungs):
            return False
        self._graphs[self._rungs[at]].replay()
        return True
