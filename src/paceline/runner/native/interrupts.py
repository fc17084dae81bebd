"""Ctrl-C while a step computes.

A step is one call, and Python handles signals when it has returned. Most steps end soon enough; one that still
computes when `PATIENCE_S` have passed is told to, by a thread that the system's own handler wakes. Only where this
process handles the signal in Python and nothing else listens in this way: the engine process of a server ignores it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from typing import Protocol

PATIENCE_S = 0.2


class Interruptible(Protocol):
    """Computes steps, one at a time."""

    def running_step(self) -> int | None:
        """The number of the step that is under way."""
        ...

    def interrupt(self, step: int) -> None:
        """End that step soon, if it is still under way."""
        ...


class StepInterrupted(RuntimeError):
    """A step that was ended before it was complete: what it has stored is of no use."""


_watched: weakref.WeakSet[Interruptible] = weakref.WeakSet()
_installed = threading.Event()


def watch(team: Interruptible) -> None:
    """From here on an interrupt ends the steps of a team, where this process can know of it."""
    _watched.add(team)
    in_main = threading.current_thread() is threading.main_thread()
    if _installed.is_set() or not in_main or not callable(signal.getsignal(signal.SIGINT)):
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    other = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    if other != -1:  # an event loop's, which handles signals itself
        signal.set_wakeup_fd(other)
        os.close(read)
        os.close(write)
        return
    _installed.set()
    threading.Thread(target=_listen, args=(read,), name="interrupts", daemon=True).start()


def _listen(read: int) -> None:
    while True:
        if signal.SIGINT not in os.read(read, 64):
            continue
        under_way = [(team, step) for team in list(_watched) if (step := team.running_step()) is not None]
        if under_way:
            time.sleep(PATIENCE_S)
        for team, step in under_way:
            team.interrupt(step)


def _after_fork() -> None:
    """A child writes to the same pipe, and has no thread that reads it."""
    if _installed.is_set():
        _installed.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_after_fork)
