"""Ctrl-C between two steps, never inside one: an engine that is stopped halfway through its books is of no use.

Acts only in the main thread and only where Python's own handler is in place; whoever has set another one is
asked by nobody. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """While entered, an interrupt is noted; `check` raises it."""

    def __init__(self) -> None:
        self._asked = False
        self._is_installed = False

    def __enter__(self) -> Interrupts:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            self._is_installed = False
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise an interrupt that has come meanwhile."""
        if self._asked:
            self._asked = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
