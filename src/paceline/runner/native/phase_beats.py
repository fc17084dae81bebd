"""Signs of life from inside a native step.

A step is one call, and the thread that makes it cannot beat meanwhile. A second thread looks at the counter of phases
now and then, and beats for it as long as the counter moves: a step that hangs gives no beat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from paceline.core.pulse import Pulse

LOOK_S = 0.5


class PhaseBeats:
    """Entered around the call that computes a step. Does nothing as long as nothing listens to the pulse."""

    def __init__(self, pulse: Pulse, phase: Callable[[], int], look_s: float = LOOK_S) -> None:
        self._pulse = pulse
        self._phase = phase
        self._look_s = look_s
        self._lock = (
            threading.Lock()
        )  # held while it beats: who listens is never called from two threads at once
        self._in_step = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None and self._pulse.on_beat is not None and not self._closed.is_set():
            self._thread = threading.Thread(target=self._watch, name="step-pulse", daemon=True)
            self._thread.start()
        self._in_step = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._in_step = False

    def close(self) -> None:
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        last = self._phase()
        while not self._closed.wait(self._look_s):
            phase = self._phase()
            if phase == last:
                continue
            last = phase
            with self._lock:
                if self._in_step:
                    self._pulse.beat()
