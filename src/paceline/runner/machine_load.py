"""How busy this machine is with other processes, and how many threads fit beside them.

Reads the kernel's counters of the cores this process may use; what the process itself and its relatives used is not
counted. Knows nothing of torch or of steps. Where there are no such counters, nothing is known and nothing changes.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REFRESH_S = 0.25  # between two refreshes: the counters have a resolution of 10 ms
REFRESHES_TO_GROW = 4  # in a row that find room for one more thread
TOLERATED = 0.5  # of a core that others may use of ours before a thread is released,
SPARE = 0.25  # and may still use when it is taken back
MANY_TOKENS = 16  # of a step: products so large that a thread which waits for a core at times still helps
BUSY, FREE = 0.4, 0.2  # shares of all cores, used by others, from which a machine is busy, and free again
SAID_EVERY_S = 60.0
_BUSY_COLUMNS = (1, 2, 3, 6, 7, 8)  # of /proc/stat: user, nice, system, irq, softirq, steal
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

Seconds = Callable[[], float | None]


def usable_cores() -> frozenset[int]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cores_allowed() -> int:
    """How many cores' worth of time this process may use: a container may have less than it sees."""
    quota = _quota()
    return len(usable_cores()) if quota is None else max(1, min(len(usable_cores()), math.ceil(quota)))


def busy_sentence(others: float, cores: int) -> str:
    """What a busy machine means, for people."""
    return f"the machine is busy: other processes use {others:.1f} of {cores} cores; answers will be slower"


class MachineLoad:
    """Cores that other processes use, between one refresh and the next."""

    def __init__(
        self,
        *,
        relatives: Sequence[int] = (),
        cores: int | None = None,
        used_s: Seconds | None = None,
        own_s: Seconds | None = None,
        runnable: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`relatives` are processes that count as this one. The rest is for tests: the seconds that all processes and
        that this one have used so far, and the threads of other processes that run or wait for a core."""
        numbers = usable_cores()
        self.cores = cores if cores is not None else len(numbers)
        self._used_s = used_s if used_s is not None else lambda: _machine_seconds(numbers)
        self._own_s = (
            own_s if own_s is not None else lambda: time.process_time() + sum(map(_seconds_of, relatives))
        )
        self._runnable = runnable if runnable is not None else _runnable
        self._clock = clock
        self._last = self._read()
        self.others: float | None = None  # cores, at the last refresh; None: not known
        self.competing = 0.0  # threads of others that run or wait for a core, averaged over a few refreshes

    def refresh(self, least_s: float = REFRESH_S) -> bool:
        """Whether there is a new figure in `others`: not before `least_s` have passed since the last."""
        if self._last is None or self.age_s < least_s:
            return False
        before, now = self._last, self._read()
        self._last = now
        if now is None:
            return False
        used, own = now[1] - before[1], now[2] - before[2]
        self.competing += 0.5 * ((self._runnable() or 0) - self.competing)
        self.others = min(max((used - own) / (now[0] - before[0]), 0.0), float(self.cores))
        return True

    @property
    def age_s(self) -> float:
        """Since the last refresh."""
        return math.inf if self._last is None else self._clock() - self._last[0]

    def sentence(self) -> str:
        return busy_sentence(self.others or 0.0, self.cores)

    @property
    def is_busy(self) -> bool:
        return self.others is not None and self.others >= BUSY * self.cores

    @property
    def is_crowded(self) -> bool:
        """Whether other processes have more threads to run than there are cores."""
        return self.competing > self.cores + 0.5

    @property
    def is_free(self) -> bool:
        return self.others is not None and self.others <= FREE * self.cores

    def _read(self) -> tuple[float, float, float] | None:
        used_s, own_s = self._used_s(), self._own_s()
        return None if used_s is None or own_s is None else (self._clock(), used_s, own_s)


class FreeCores:
    """How many threads may compute. Fewer at once when others take the cores, more again once they stay free.

    Threads of one product wait for each other: one that has to wait for a core makes all of them wait, so that two
    threads on two cores that others use are several times slower than one. A large step is the exception, as long as
    each core has one other thread at most: its products are long, and two threads get a larger share of the cores.
    """

    def __init__(self, load: MachineLoad, most: int) -> None:
        self.load = load
        self.most = most
        self.count = most
        self._roomy = 0  # refreshes in a row that found room for more

    def refresh(self, tokens: int = 1) -> int:
        """How many threads may compute a step of `num_tokens` now; cheap, called before every step and when idle."""
        if self.most > 1 and self.load.refresh() and self.load.others is not None:
            left = self.load.cores - self.load.others
            fitting, roomy = (self._bounded(left + more) for more in (TOLERATED, SPARE))
            if fitting < self.count:
                self.count, self._roomy = fitting, 0
            elif roomy > self.count:
                self._roomy += 1
                if self._roomy >= REFRESHES_TO_GROW:
                    self.count, self._roomy = roomy, 0
            else:
                self._roomy = 0
        return self.most if tokens >= MANY_TOKENS and not self.load.is_crowded else self.count

    @property
    def is_shared(self) -> bool:
        """Whether others use a part of the cores that threads would have."""
        return self.count < self.most

    def _bounded(self, cores: float) -> int:
        return min(max(math.floor(cores), 1), self.most)


class LoadNotices:
    """What to say about the machine while serving: when it becomes busy and free again, once a minute at most."""

    def __init__(
        self, load: MachineLoad, *, reported_busy: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._load = load
        self._clock = clock
        self._reported_busy = reported_busy
        self._next_s = self._clock() + SAID_EVERY_S if reported_busy else -math.inf

    def take(self) -> str | None:
        """A sentence, if there is something new."""
        changed = self._load.is_free if self._reported_busy else self._load.is_busy
        if not changed or self._clock() < self._next_s:
            return None
        self._reported_busy = not self._reported_busy
        self._next_s = self._clock() + SAID_EVERY_S
        return self._load.sentence() if self._reported_busy else "the machine is free again"


def _machine_seconds(cores: frozenset[int]) -> float | None:
    """What all processes have used of these cores, and what the host of a virtual machine took of them."""
    ticks = found = 0
    try:
        with Path("/proc/stat").open() as file:
            next(file)  # the sum over all cores
            for line in file:
                if not line.startswith("cpu"):
                    break
                words = line.split()
                if int(words[0][3:]) in cores:
                    found += 1
                    ticks += sum(int(words[column]) for column in _BUSY_COLUMNS)
    except (OSError, ValueError, IndexError, StopIteration):
        return None
    return ticks / _TICKS if found else None


def _runnable() -> int | None:
    """Threads of other processes that run or wait for a core; the one that reads is not counted."""
    try:
        with Path("/proc/stat").open() as file:
            return next((int(line.split()[1]) - 1 for line in file if line.startswith("procs_running")), None)
    except (OSError, ValueError, IndexError):
        return None


def _quota() -> float | None:
    """Cores that the control group of a container allows; None: no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _seconds_of(pid: int) -> float:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS
    except (OSError, ValueError, IndexError):
        return 0.0
