"""The threads that compute steps: they stay as long as the runner, and sleep between steps."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from paceline.runner.native.checks import Checks, MemoryViolation, Range, aligned, guards_hold
from paceline.runner.native.code import Code
from paceline.runner.native.layout import (
    LAP_BYTES,
    LINE,
    MOST_THREADS,
    NO_PIECES,
    PHASES,
    SEMAPHORE,
    STEP,
    SYNC_BYTES,
    Y_ASLEEP,
    Y_FIRST_PIECE,
    Y_PIECE,
)

Column = NDArray[np.int64]

JOIN_S = 1.0
START_S = 5.0

# What threads look at between steps, and what a step reads and never writes.
_WAITING = ("sync", "sleeping", "semaphores")
_READ_ONLY = frozenset(
    {
        "tokens",
        "positions",
        "tiles",
        "layers",
        "sampled",
        "adapted",
        "adapted_tokens",
        "adapted_blocks",
        "seen",
        "patches",
        "chosen_units",
    }
)

_logger = logging.getLogger("paceline")


class Parameters:
    """The column of sizes and addresses that a step reads; arrays it points to are kept alive."""

    def __init__(self) -> None:
        self.column = aligned(8 * len(STEP)).view(np.int64)
        self.address = self.column.ctypes.data
        self.kept: dict[str, NDArray[np.generic]] = {}

    def point(self, name: str, values: NDArray[np.generic]) -> None:
        assert values.flags.c_contiguous, name
        self.kept[name] = values
        self.column[STEP[name]] = values.ctypes.data

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self.column[STEP[name]] = value

    def set_floats(self, **values: float) -> None:
        """Numbers of float32, by their bits."""
        for name, value in values.items():
            self.column[STEP[name]] = int(np.float32(value).view(np.uint32))

    def get(self, name: str) -> int:
        return int(self.column[STEP[name]])

    def ranges(self) -> list[Range]:
        """The column and all that it points to."""
        kept = {"parameters": self.column, **self.kept}
        return [Range.of(name, values, writable=name not in _READ_ONLY) for name, values in kept.items()]

    def check_guards(self) -> None:
        for name, values in self.kept.items():
            if not guards_hold(values):
                raise MemoryViolation(f"the bytes around {name} have changed")


class Team:
    """Runs steps on `threads` threads, the caller's among them."""

    def __init__(self, code: Code, parameters: Parameters, threads: int) -> None:
        self._code = code
        self._parameters = parameters
        self._libc = ctypes.CDLL(None)
        self._sync = aligned(SYNC_BYTES).view(np.int64)
        self._laps = aligned(LAP_BYTES).view(np.int64)
        for line in range(Y_ASLEEP, SYNC_BYTES, LINE):
            self._libc.sem_init(ctypes.c_void_p(self._sync.ctypes.data + line + SEMAPHORE), 0, 0)
        parameters.point("sync", self._sync)
        self._threads: list[threading.Thread] = []
        self.checks = Checks() if code.is_checked else None
        self._is_forked = False
        self._is_running = False
        _teams.add(self)
        watch_for_interrupts(self)
        # A team that is let go of ends its threads: they read memory that goes with it.
        weakref.finalize(self, _end, self._threads, parameters, self._libc).atexit = False
        self.start(threads)

    @property
    def size(self) -> int:
        return len(self._threads) + 1

    def start(self, threads: int) -> None:
        """As many threads as asked for, or fewer where the system gives no more."""
        lines = aligned(threads * LINE).view(np.int64)
        semaphores = aligned(threads * LINE)
        self._sleeping, self._semaphores = lines, semaphores
        self._laps = aligned(threads * LAP_BYTES).view(np.int64)
        parameters = self._parameters
        parameters.point("sleeping", lines)
        parameters.point("semaphores", semaphores)
        parameters.set(stop=0, threads=1)
        if self.checks is not None:
            laps = Range.of("laps", self._laps, writable=True)
            control = ("parameters", *_WAITING)
            self.checks.waiting = [laps, *(entry for entry in parameters.ranges() if entry.name in control)]
            self._code.allow(self.checks.table([]))
        for number in range(1, threads):
            self._libc.sem_init(ctypes.c_void_p(self._semaphore(number)), 0, 0)
            thread = threading.Thread(
                target=self._code.enter, args=(number, parameters.address), name=f"step-{number}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                _logger.warning("steps run on %d threads instead of %d: %s", number, threads, error)
                break
            self._threads.append(thread)
        deadline_s = time.monotonic() + START_S
        while not all(self._is_here(number) for number in range(1, self.size)):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the threads of a step did not start")
            time.sleep(0.0005)

    def run(self, threads: int, timed: bool = False, others: list[Range] | None = None) -> None:
        """Compute the step that the parameters describe, with the first `threads` of the team.

        `others`: what a step may touch beside the parameters and what they point to; for the checking form.
        """
        if self._is_forked:
            raise RuntimeError(
                "the threads that compute steps are in another process: load the model after the fork"
            )
        laps = self._laps.ctypes.data if timed else 0
        self._parameters.set(laps=laps, threads=min(threads, self.size))
        if self.checks is not None:
            self._code.allow(self.checks.table([*self._parameters.ranges(), *(others or ())]))
        self._is_running = True
        try:
            self._code.enter(0, self._parameters.address)
        finally:
            self._is_running = False
            is_interrupted = bool(self._sync[Y_FIRST_PIECE // 8])
            if is_interrupted:
                self._sync[Y_FIRST_PIECE // 8] = self._sync[Y_PIECE // 8] = 0
        if self.checks is not None:
            self.checks.verify()
            self._parameters.check_guards()
        if is_interrupted:
            raise StepInterrupted("a step was interrupted")

    def running_step(self) -> int | None:
        """The number of the step that is under way."""
        return self._parameters.get("step") if self._is_running else None

    def interrupt(self, step: int) -> None:
        """End a step before it is complete, if it is still under way: there are no pieces any more."""
        if self.running_step() == step:
            self._sync[Y_FIRST_PIECE // 8] = self._sync[Y_PIECE // 8] = NO_PIECES

    def laps(self) -> dict[str, int]:
        """Nanoseconds by phase, of all threads, over the steps that were timed."""
        per_thread = self._laps.reshape(-1, LAP_BYTES // 8)[: self.size]
        return {name: int(per_thread[:, index].sum()) for index, name in enumerate(PHASES)}

    def close(self) -> None:
        """End the threads."""
        _end(self._threads, self._parameters, self._libc)

    def _semaphore(self, number: int) -> int:
        return int(self._semaphores.ctypes.data) + LINE * number

    def _is_here(self, number: int) -> bool:
        return bool(self._sleeping[LINE // 8 * number + 1])


_teams: weakref.WeakSet[Team] = weakref.WeakSet()


def _after_fork() -> None:
    """Threads stay in the process that was forked: a step of its child would wait for them for ever."""
    for team in list(_teams):
        team._is_forked = True
        team._threads.clear()


os.register_at_fork(after_in_child=_after_fork)


def _end(threads: list[threading.Thread], parameters: Parameters, libc: ctypes.CDLL) -> None:
    """Tell threads that wait for a step to stop, and wait until they have."""
    if not threads:
        return
    parameters.set(stop=1)
    parameters.column[STEP["step"]] += MOST_THREADS
    for number in range(1, len(threads) + 1):
        libc.sem_post(ctypes.c_void_p(parameters.get("semaphores") + LINE * number))
    for thread in threads:
        thread.join(JOIN_S)
        if thread.is_alive():
            _logger.error("%s did not end within a second", thread.name)
    threads.clear()
    parameters.set(stop=0, threads=1)


# Ctrl-C while a step computes: Python handles signals when the step's one call has returned. Most steps end soon; one
# that still computes after `PATIENCE_S` is ended by a thread that the system wakes. Only where this process
# handles the signal in Python and nothing else listens in this way: the engine process of a server ignores it.
PATIENCE_S = 0.2


class StepInterrupted(RuntimeError):
    """A step that was ended before it was complete: what it has stored is of no use."""


_watched_teams: weakref.WeakSet[Team] = weakref.WeakSet()
_installed = threading.Event()


def watch_for_interrupts(team: Team) -> None:
    """From here on an interrupt ends the steps of a team, where this process can know of it."""
    _watched_teams.add(team)
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
        under_way = [
            (team, step) for team in list(_watched_teams) if (step := team.running_step()) is not None
        ]
        if under_way:
            time.sleep(PATIENCE_S)
        for team, step in under_way:
            team.interrupt(step)


def _forget_signals() -> None:
    """A child writes to the same pipe, and has no thread that reads it."""
    if _installed.is_set():
        _installed.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_signals)
