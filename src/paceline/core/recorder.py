"""The seam between the engine and the run log: one record per completed step.

A record holds every input of the scheduler before the step (`inputs`), its decisions and the result.
The engine fills it in; where and how it is written is the recorder's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.events import Decision, StepEvents
from paceline.core.fast import value
from paceline.core.inputs import Input
from paceline.core.plan import StepPlan, StepResult

Inputs = Sequence[tuple[float, Input]]  # each with the time it came


@value
class StepRecord:
    """One step, from the first input before it to its result."""

    t_plan: float
    t_done: float
    inputs: Inputs
    plan: StepPlan
    result: StepResult | None  # None: the step failed
    decisions: Sequence[Decision]


class StepRecorder(Protocol):
    """Takes records in the order steps complete."""

    def step(self, record: StepRecord) -> None: ...

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        """The run is over; `inputs` came after the last plan."""
        ...


class StepWatcher(Protocol):
    """Observes the steps of an engine; see `engine.trace`."""

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None: ...

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None: ...


class RunWatcher(StepWatcher, Protocol):
    """Observes a run from its first step to its last, live or replayed."""

    def on_events(self, events: StepEvents) -> None:
        """Events of the step, as callers get them."""
        ...

    def close(self, decisions: Sequence[Decision], time_s: float) -> None:
        """The run is over; `decisions` came after the last plan."""
        ...


class BothRecorders:
    """Hands records to two recorders."""

    def __init__(self, one: StepRecorder, other: StepRecorder) -> None:
        self._one, self._other = one, other

    def step(self, record: StepRecord) -> None:
        self._one.step(record)
        self._other.step(record)

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        try:
            self._one.close(inputs, decisions)
        finally:
            self._other.close(inputs, decisions)


class NoRecorder:
    """Keeps nothing."""

    def step(self, record: StepRecord) -> None:
        return None

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        return None
