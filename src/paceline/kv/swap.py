"""The tickets of copies under way between two levels: device and host, or host and disk.

A copy is asynchronous: the blocks and places it touches stay taken until its ticket comes back, whatever happens
to the request in between. Blocks are given back on completion, never on issue.
Decisions: docs/decisions/0020-preemption.md, docs/decisions/0045-levels.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import BlockKey
from paceline.kv.block_time import BlockTime

Blocks = NDArray[np.int64]  # block numbers; 64 bit because they are used as indices


NO_OWNER = -1


@dataclass(slots=True)
class Ticket:
    """One copy under way: what it keeps taken until it completes."""

    blocks: tuple[Blocks, ...]  # of the upper level, per group; the ticket holds a reference to each
    places: tuple[Blocks, ...]  # of the lower level, per group
    owner: int  # the request it belongs to, if any
    incoming: bool  # upwards: host to device, or disk to host
    free_places: bool  # the places are the ticket's: give them back on completion
    level: int = 0  # the upper level
    # Of cached prefixes: per group, what is copied and what is left of its uses. None: a swapped request's.
    keys: tuple[Sequence[BlockKey], ...] | None = None
    uses: tuple[Sequence[int], ...] = ()
    stays: bool = False  # downwards: what is copied stays above too
    issued_us: int = 0
    compute_s: float = 0.0  # of a load: what computing would take

    @property
    def num_blocks(self) -> int:
        return sum(len(blocks) for blocks in self.blocks)


class Tickets:
    """Copies under way, by number."""

    def __init__(self, time: BlockTime) -> None:
        self.open: dict[int, Ticket] = {}
        self._time = time
        self._next = 1

    def issue(self, ticket: Ticket) -> int:
        number = self._next
        self._next += 1
        ticket.issued_us = self._time.now_us
        self.open[number] = ticket
        return number
