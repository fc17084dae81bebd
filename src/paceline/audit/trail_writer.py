"""From the engine's records to the decision log: a thread of its own makes pages of them and writes these.

A step pays for one append to a queue, whatever it decided. Everything else is the thread's: it shares the interpreter
with the engine, so that it makes its pages in native code, a few hundred decisions at a time. The queue is bounded:
what a slow disk does not take is left out, and a page says how much. A disk that fails stops the writing, never the
engine.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from paceline import __version__
from paceline.audit.page_text import page_text
from paceline.audit.trail_db import TrailDb
from paceline.core.events import Decision
from paceline.core.recorder import Inputs, StepRecord

INTERVAL_S = 0.5
MOST_WAITING = 4096  # steps whose decisions are not written yet
PAGE = 256  # decisions of a page, those of one step aside: what is one call to native code, and holds the engine up

_logger = logging.getLogger("paceline")
Step = tuple[Inputs, Sequence[Decision]]


class TrailWriter:
    """A `StepRecorder` that keeps decisions for good."""

    def __init__(self, db: TrailDb, interval_s: float = INTERVAL_S, most_waiting: int = MOST_WAITING) -> None:
        self._db = db
        self._waiting: deque[Step] = deque()
        self._most = most_waiting
        self._lost = 0
        self._interval_s = interval_s
        self._has_begun = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-trail", daemon=True)
        self._thread.start()
        atexit.register(self.close, (), ())  # for owners that never close their engine

    def step(self, record: StepRecord) -> None:
        inputs = record.inputs
        if not record.decisions and len(inputs) == 1 and inputs[0][0] == "done":
            return  # a step of plain decode
        if len(self._waiting) < self._most:
            self._waiting.append((inputs, record.decisions))
        else:
            self._lost += len(record.decisions)

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        """Write what is left. A second call does nothing."""
        if not self._closed.is_set():
            self._waiting.append((inputs, decisions))
            self._closed.set()
            self._thread.join()
            self._db.close()
            atexit.unregister(self.close)

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._interval_s):
                self._write()
            self._write()
        except Exception:
            _logger.exception("decisions are not written any more")
            self._most = 0  # nothing piles up for a disk that takes nothing
            self._waiting.clear()

    def _write(self) -> None:
        """One transaction for everything that waits."""
        waiting = self._waiting
        pages = list(make_pages(waiting.popleft() for _ in range(len(waiting))))
        lost, self._lost = self._lost, 0
        if lost:
            pages.append((page_text({"lost": lost}), 0))
        if not pages:
            return
        if not self._has_begun:
            self._has_begun = True
            pages.insert(0, (_start(), 0))
        self._db.append(pages)


def make_pages(steps: Iterable[Step]) -> Iterator[tuple[str, int]]:
    """Texts of pages, each with its number of decisions. A step is never divided."""
    adds: list[tuple[object, ...]] = []
    decisions: list[Decision] = []
    for inputs, decided in steps:
        for entry in inputs:
            if entry[0] == "add":  # id, prompt, most tokens, arrival, tenant, priority, parent, class
                adds.append((*entry[2:8], entry[9], entry[-1]))
        decisions += decided
        if len(decisions) >= PAGE or len(adds) >= PAGE:
            yield page_text({"adds": adds, "decisions": decisions}), len(decisions)
            adds, decisions = [], []
    if adds or decisions:
        yield page_text({"adds": adds, "decisions": decisions}), len(decisions)


def _start() -> str:
    """A run begins: its requests are numbered anew, and its clock is not that of the run before."""
    now = {"unix_s": round(time.time(), 3), "clock_s": time.monotonic()}
    return page_text({"start": {"version": __version__, **now}})
