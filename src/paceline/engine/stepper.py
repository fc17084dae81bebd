"""Stepping an engine for as long as there is something to do, and knowing how long there is nothing.

The owner of the engine's thread (`llm.async_llm`, `process.engine_service`) brings commands and its own way to
sleep; what a step is, when events are delivered, and when a step may help at all is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from paceline.core.events import StepEvents
from paceline.engine.engine import Engine

LONGEST_NAP_S = 0.5
COMPILING_NAP_S = 0.001  # while a structure is compiled, or an adapter is read


class Stepper:
    """Steps one engine and hands its events on."""

    def __init__(self, engine: Engine, on_events: Callable[[StepEvents], None]) -> None:
        self._engine = engine
        self._on_events = on_events
        self._stuck = False  # the last step found nothing to do although there are requests

    def step(self) -> None:
        """One step, after whatever came in."""
        before, was_idle = self._engine.num_submitted, self._engine.is_idle
        step = self._engine.step_overlapped if self._engine.depth else self._engine.step
        self._on_events(step())
        # The reader of the events may have found a stop string: that request's ending is there already, and
        # no further step may come to bring it.
        self._on_events(self._engine.scheduler.take_events())
        # What was under way before may have ended something, and made room for what waits: the next step looks.
        self._stuck = was_idle and self._engine.num_submitted == before and self._engine.is_idle

    def wait_s(self) -> float | None:
        """How long to sleep unless something comes in: 0 to step now, None for as long as nothing comes."""
        if self._engine.adapters.is_reading and not self._engine.has_requests and self._engine.is_idle:
            return COMPILING_NAP_S
        if self._stuck and self._engine.has_requests:
            # Every request waits for something outside, or for a moment in time.
            return self._seconds_to_wakeup()
        return 0.0 if self._engine.has_requests or not self._engine.is_idle else None

    def wake(self) -> None:
        """A sleep is over: the next step may find something again."""
        self._stuck = False

    def deliver_rest(self) -> None:
        """After a failure: hand on the endings that were written when the engine gave up."""
        with suppress(Exception):  # whatever is broken, the caller has to answer every request
            self._on_events(self._engine.scheduler.take_events())

    def _seconds_to_wakeup(self) -> float:
        if self._engine.guides.is_compiling or self._engine.adapters.is_reading:
            return COMPILING_NAP_S
        scheduler = self._engine.scheduler
        wakeup_s = scheduler.next_wakeup_s()
        return (
            LONGEST_NAP_S
            if wakeup_s is None
            else min(max(wakeup_s - scheduler.state.now_s, 0), LONGEST_NAP_S)
        )
