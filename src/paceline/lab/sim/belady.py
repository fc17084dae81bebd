"""The eviction order of a prophet: what is asked for last goes first. A bound for other orders, in simulations only.

Requests are thought to be served in the order they arrive: the next use of a block is the first arrival that has not
been served.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from paceline.core.request import BlockKey
from paceline.kv.block_pool import BlockPool, Blocks, EvictionOrder

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
