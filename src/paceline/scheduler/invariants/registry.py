"""The list of invariants and what a check gets to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import MODES
from paceline.core.events import Decision
from paceline.core.plan import StepPlan
from paceline.core.request import RequestId
from paceline.scheduler.invariants.half_steps import BlocksInUse, Frames, Planned, take_frame, take_owners
from paceline.scheduler.scheduler import Scheduler

# When an invariant is looked at: after every half-step, or after every schedule. BLOCKS, CHANGES and HOST are after
# every half-step, but skipped when what they speak of is byte for byte what it was at the last context: blocks; where
# every request is; and with that, the host places.
ALWAYS, BLOCKS, CHANGES, HOST, PLANNED = "always", "blocks", "changes", "host", "planned"
CONTINUOUS_ONLY = ("continuous",)


class InvariantViolation(AssertionError):
    """Something that is always true is not. `name` is the invariant's."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class CheckContext:
    """The state at one moment, with what several checks need computed once, when the first asks."""

    def __init__(
        self, scheduler: Scheduler, plan: StepPlan | None, in_flight: Sequence[BlocksInUse | Planned] = ()
    ) -> None:
        self.scheduler = scheduler
        self.plan = plan
        self.decisions: list[Decision] = []  # made by the schedule just done
        self._in_flight = in_flight
        # Time and place in the order of arrival every live request had when it was first seen.
        self.arrived: dict[RequestId, tuple[float, int]] = {}
        self.displaced: dict[RequestId, int] = {}  # how far those were that gave their places
        # Blocks written to the disk by all plans, and when the first was made.
        self.stored, self.since_s = (
            0,
            0.0,
        )
        self.backlog: dict[int, float] = {}  # counters of the tenants that waited at the last look

    @cached_property
    def live(self) -> NDArray[np.int64]:
        """Rows in use."""
        rows = self.scheduler.state.rows
        return rows.live[: rows.high].nonzero()[0]

    @cached_property
    def frames(self) -> Frames:
        """This moment alone, as the sweeps see it."""
        state = self.scheduler.state
        planned = None
        if self.plan is not None:
            planned = Planned(self.plan, state.flights[-1], self._in_flight)
        frame = take_frame(state, None, after_schedule=True, planned=planned)
        frame.owners = take_owners(state)
        return Frames(state, [frame])


Check = Callable[[CheckContext], str | None]
Findings = Iterator[tuple[int, str]]  # places among the frames where something is wrong, and what
Sweep = Callable[[Frames], Findings]


@dataclass(frozen=True, slots=True)
class Invariant:
    name: str
    check: Check
    moment: str
    modes: tuple[str, ...]
    sweep: Sweep | None = None  # the same check over many half-steps


INVARIANTS: list[Invariant] = []


def invariant(name: str, *, moment: str = ALWAYS, modes: tuple[str, ...] = MODES) -> Callable[[Check], Check]:
    """Register a check of the present state under its name; `modes` are the batching modes it holds for."""

    def register(check: Check) -> Check:
        INVARIANTS.append(Invariant(name, check, moment, modes))
        return check

    return register


def sweep(name: str, *, moment: str = ALWAYS, modes: tuple[str, ...] = MODES) -> Callable[[Sweep], Sweep]:
    """Register a check of arrays, which looks at the pictures of many half-steps at once."""

    def register(check: Sweep) -> Sweep:
        @wraps(check)
        def now(context: CheckContext) -> str | None:
            return next((message for _, message in check(context.frames)), None)

        INVARIANTS.append(Invariant(name, now, moment, modes, check))
        return check

    return register
