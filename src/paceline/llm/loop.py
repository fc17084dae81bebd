"""The engine's own thread: takes commands, steps while there is work, sleeps while there is none.

Commands are functions that run between two steps, in order; everything that touches the engine goes through them.
A failure of the engine reaches whoever waits, and every later command.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from paceline.core.events import StepEvents
from paceline.engine.engine import Engine
from paceline.engine.stepper import Stepper
from paceline.errors import EngineFailed

Command = Callable[[], object]


class EngineLoop:
    """Runs one engine in a thread."""

    def __init__(
        self, engine: Engine, on_events: Callable[[StepEvents], None], on_failure: Callable[[Exception], None]
    ) -> None:
        self._stepper = Stepper(engine, on_events)
        self._on_failure = on_failure
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
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
                self._stepper.step()
        except Exception as error:
            with self._wake:
                self.failure = error
            self._stepper.tell_rest()
            self._on_failure(error)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when the thread should end."""
        with self._wake:
            while not (self._commands or self._stopping):
                nap_s = self._stepper.wait_s()
                if nap_s == 0:
                    break
                self._wake.wait(nap_s)
                self._stepper.wake()
            return not self._stopping

    def _do_all(self) -> None:
        with self._wake:
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
