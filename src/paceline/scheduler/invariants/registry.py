"""The list of invariants and what a check gets to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.config import MODES
from paceline.core.events import Decision
from paceline.core.plan import StepPlan
from paceline.core.request import RequestId
from paceline.kv.group import LayerGroup
from paceline.scheduler.scheduler import Scheduler

# When an invariant is looked at. BLOCKS and CHANGES are after every half-step too, but skipped when what they
# speak of is byte for byte what it was at the last look, or when no request came, went or moved.
ALWAYS, BLOCKS, CHANGES, PLANNED = "always", "blocks", "changes", "planned"
CONTINUOUS_ONLY = ("continuous",)


class InvariantViolation(AssertionError):
    """Something that is always true is not. `name` is the invariant's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class Held:
    """The blocks in the tables of live rows of one group, flat: block, row and table index of each."""

    def __init__(self, group: LayerGroup, live: NDArray[np.int64]) -> None:
        held, first = group.held[live], group.first[live]
        columns = np.arange(int(held.max(initial=0)))
        mask = columns < held[:, None]
        if group.window is not None:
            mask &= columns >= first[:, None]
        at, self.index = mask.nonzero()
        self.row = live[at]
        self.block = group.table[self.row, self.index]
        self.holders = np.bincount(self.block, minlength=group.pool.num_blocks)  # rows per block


class Look:
    """The state at one moment, with what several checks need computed once, when the first asks."""

    def __init__(
        self, scheduler: Scheduler, plan: StepPlan | None, in_flight: list[NDArray[np.int64]]
    ) -> None:
        rows = scheduler.state.rows
        self.scheduler = scheduler
        self.live: NDArray[np.int64] = rows.live[: rows.high].nonzero()[0]
        self.plan = plan
        self.decisions: list[Decision] = []  # made by the schedule just done
        # Per earlier step and copy under way: the row that touches each block, those of the groups one after
        # another; -1 nobody, -2 several.
        self.in_flight = in_flight
        # Time and place in the order of arrival every live request had when it was first seen.
        self.arrived: dict[RequestId, tuple[float, int]] = {}

    @cached_property
    def held(self) -> list[Held]:
        return [Held(group, self.live) for group in self.scheduler.state.kv.groups]


Check = Callable[[Look], str | None]


@dataclass(frozen=True, slots=True)
class Invariant:
    name: str
    check: Check
    moment: str
    modes: tuple[str, ...]


INVARIANTS: list[Invariant] = []


def invariant(name: str, *, moment: str = ALWAYS, modes: tuple[str, ...] = MODES) -> Callable[[Check], Check]:
    """Register a check under its name; `modes` are the batching modes it holds for."""

    def register(check: Check) -> Check:
        INVARIANTS.append(Invariant(name, check, moment, modes))
        return check

    return register
