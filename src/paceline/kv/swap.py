"""Host places for swapped-out blocks, and the tickets of copies under way.

A copy is asynchronous: the blocks and places it touches stay taken until its ticket comes back, whatever happens
to the request in between. Blocks are given back on completion, never on issue.
Decision: docs/decisions/0020-preemption.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.int64]  # block numbers; 64 bit because they are used as indices


class HostPlacePool:
    """Numbered places in host memory, one block each."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> Blocks:
        return np.array([self._free.pop() for _ in range(count)], np.int64)

    def give_back(self, places: Blocks) -> None:
        self._free.extend(places.tolist())

    def free_places(self) -> list[int]:
        return list(self._free)


@dataclass(slots=True)
class Ticket:
    """One swap under way: what it keeps taken until it completes."""

    blocks: tuple[Blocks, ...]  # per group; the ticket holds a reference to each
    places: tuple[Blocks, ...]  # per group
    owner: int  # the request it belongs to
    incoming: bool  # host to device
    free_places: bool  # give the places back on completion


class Tickets:
    """Swaps under way, by number."""

    def __init__(self) -> None:
        self.open: dict[int, Ticket] = {}
        self._next = 1

    def issue(self, ticket: Ticket) -> int:
        number = self._next
        self._next += 1
        self.open[number] = ticket
        return number
