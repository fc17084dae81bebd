"""The engine's own thread: takes commands, steps while there is work, sleeps while there is none.

Commands are functions that run between two steps, in order; everything that touches the engine goes through them.
A failure of the engine reaches whoever waits, and every later command.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from paceline.core.events import StepEvents
from paceline.engine.engine import Engine
from paceline.errors import EngineFailed

Command = Callable[[], object]
LONGEST_NAP_S = 0.5


class EngineLoop:
    """Runs one engine in a thread."""

    def __init__(
        self, engine: Engine, on_events: Callable[[StepEvents], None], on_failure: Callable[[Exception], None]
    ) -> None:
        self._engine = engine
        self._on_events = on_events
        self._on_failure = on_failure
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._stuck = False  # the last step found nothing to do although there are requests
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)
        self._thread.start()

    def do(self, command: Command) -> None:
        """Have the engine's thread run a command before its next step."""
        with self._wake:
            if self.failure is not None or self._stopping:
                raise EngineFailed("the engine has stopped") from self.failure
            self._commands.append(command)
            self._wake.notify()

    def stop(self) -> None:
        """End the thread; what is under way is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive() and self.failure is None

    def _run(self) -> None:
        try:
            while self._wait():
                self._do_all()
                before = self._engine.num_submitted
                step = self._engine.step_overlapped if self._engine.depth else self._engine.step
                self._on_events(step())
                # Who reads the events may have found a stop string: that request's ending is there already, and
                # no further step may come to bring it.
                self._on_events(self._engine.scheduler.take_events())
                self._stuck = self._engine.num_submitted == before and self._engine.is_idle
        except Exception as error:
            with self._wake:
                self.failure = error
            with suppress(Exception):  # whatever is broken, everybody hears of it
                self._on_events(self._engine.scheduler.take_events())  # endings written when it gave up
            self._on_failure(error)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the thread should end."""
        with self._wake:
            while not (self._commands or self._stopping):
                if self._stuck:  # everybody waits for something outside, or for a moment in time
                    self._wake.wait(self._seconds_to_wakeup())
                    self._stuck = False
                elif self._engine.has_requests or not self._engine.is_idle:
                    break
                else:
                    self._wake.wait()
            return not self._stopping

    def _seconds_to_wakeup(self) -> float:
        scheduler = self._engine.scheduler
        wakeup_s = scheduler.next_wakeup_s()
        return (
            LONGEST_NAP_S
            if wakeup_s is None
            else min(max(wakeup_s - scheduler.state.now_s, 0), LONGEST_NAP_S)
        )

    def _do_all(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
