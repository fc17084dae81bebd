"""From the engine's records to the decision log: a thread of its own writes them in batches.

A step pays for one append to a queue, and only when something was decided. The queue is bounded: what a slow disk
does not take is left out, and an entry says how much. A disk that fails stops the writing, never the engine.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from paceline.audit.codec import encode_decision, plain
from paceline.audit.trail_db import TrailDb
from paceline.core.events import Decision, DecisionKind
from paceline.core.recorder import Inputs, StepRecord

INTERVAL_S = 0.5
MOST_WAITING = 4096  # steps whose decisions are not written yet

_logger = logging.getLogger("paceline")
Batch = tuple[list[tuple[object, ...]], Sequence[Decision]]  # adds and decisions of a step


class TrailWriter:
    """A `StepRecorder` that keeps decisions for good."""

    def __init__(self, db: TrailDb, interval_s: float = INTERVAL_S, most_waiting: int = MOST_WAITING) -> None:
        self._db = db
        self._waiting: deque[Batch] = deque()
        self._most = most_waiting
        self._lost = 0
        self._interval_s = interval_s
        self._summaries = Summaries()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-trail", daemon=True)
        self._thread.start()
        atexit.register(self.close, (), ())  # for owners that never close their engine

    def step(self, record: StepRecord) -> None:
        if record.decisions or record.inputs:
            self._put(record.inputs, record.decisions)

    def close(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        """Write what is left. A second call does nothing."""
        if not self._closed.is_set():
            self._put(inputs, decisions)
            self._closed.set()
            self._thread.join()
            self._db.close()
            atexit.unregister(self.close)

    def _put(self, inputs: Inputs, decisions: Sequence[Decision]) -> None:
        adds = [entry for entry in inputs if entry[0] == "add"]
        if not adds and not decisions:
            return
        if len(self._waiting) >= self._most:
            self._lost += len(decisions)
            return
        self._waiting.append((adds, decisions))

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._interval_s):
                self._write()
            self._write()
        except Exception:
            _logger.exception("decisions are not written any more")
            self._most = 0  # nothing piles up for a disk that takes nothing

    def _write(self) -> None:
        bodies: list[str] = []
        for _ in range(len(self._waiting)):
            bodies += self._summaries.bodies(*self._waiting.popleft())
        lost, self._lost = self._lost, 0
        if lost:
            bodies.append(_body({"kind": "lost", "decisions": lost}))
        if bodies:
            self._db.append(bodies)


class Summaries:
    """Makes entries: every decision, and one line about each request when it ends."""

    def __init__(self) -> None:
        self._live: dict[int, dict[str, Any]] = {}

    def bodies(self, adds: Sequence[tuple[object, ...]], decisions: Sequence[Decision]) -> list[str]:
        for _, _, request, num_prompt, _, arrival_s, tenant, priority, *_ in adds:
            facts = {
                "tenant": tenant,
                "priority": priority,
                "num_prompt": num_prompt,
                "arrival_s": plain(arrival_s),
            }
            self._live[request] = {**facts, "delay_s": None, "preemptions": 0}  # type: ignore[index]
        made: list[str] = []
        for decision in decisions:
            made.append(_body({"kind": "decision", "decision": encode_decision(decision)}))
            known = self._live.get(decision.request)
            if known is None:
                continue
            if decision.kind is DecisionKind.ADMIT:
                known["delay_s"] = decision.seconds
            elif decision.kind is DecisionKind.PREEMPT:
                known["preemptions"] += 1
            elif decision.kind in (DecisionKind.FINISH, DecisionKind.REFUSE):
                del self._live[decision.request]
                ending = {"reason": decision.reason.value, "num_output": 0}
                if decision.kind is DecisionKind.FINISH:
                    ending["num_output"] = decision.value
                made.append(_body({"kind": "request", "request": decision.request, **known, **ending}))
        return made


def _body(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
