"""A run log as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One track for each row with its requests, parts of prompts, decoding and giving way; one for the steps; one for each
request with its waiting; counters for rows, waiting, blocks and tokens of steps. Times are microseconds from the first
thing that happened. Streams: a trace may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.audit.codec import decode_time
from paceline.audit.linefile import LineFile
from paceline.audit.runlog import LoggedStep, RunLog
from paceline.audit.trace_fold import Asked, Held, Span, TraceFold
from paceline.errors import InputError

ENGINE, REQUESTS = 1, 2  # processes of the trace
STEPS = 0  # thread of the steps; row n is thread n + 1
_BROKEN = (ValueError, KeyError, TypeError, IndexError)
Event = dict[str, Any]


def write_trace(log: RunLog, path: str) -> int:
    """Write the trace of a log; returns how many events it has. A path that ends in `.gz` is compressed."""
    events = trace_events(log)
    first = next(events)  # raises before there is a file
    file, count = LineFile(path), 1
    try:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n' + _encoded(first))
        for event in events:
            file.write("," + _encoded(event))
            count += 1
        file.write("]}")
    finally:
        file.close()
    return count


def trace_events(log: RunLog) -> Iterator[Event]:
    """The events of a log, in the order of its steps. Raises InputError for lines that say nothing sensible."""
    timeline: _Events | None = None
    fold: TraceFold | None = None
    for step in log:
        try:
            if timeline is None:
                timeline = _Events(_first_time(step))
                fold = TraceFold(timeline)
            assert fold is not None
            fold.step(step)
        except _BROKEN as problem:
            raise InputError(f"{log.path}: line {step.line} is broken: {problem}") from problem
        yield from timeline.taken()
    if timeline is None or fold is None:
        if log.is_unfinished:
            raise InputError(f"{log.path} has no step yet; try again after the server has answered a request")
        raise InputError(f"{log.path} has no step that could be drawn")
    fold.finish(log.end)
    yield from timeline.taken()


def _first_time(step: LoggedStep) -> float:
    arrivals = [decode_time(entry[2]["arrival_s"]) for entry in step.inputs if entry[0] == "add"]
    return min([step.t_plan, *arrivals])


class _Events:
    """A timeline that makes events of what it is told."""

    def __init__(self, zero_s: float) -> None:
        self._zero_s = zero_s
        self._events: list[Event] = []
        self._named: set[int] = set()
        self._name(ENGINE, "process_name", {"name": "engine"})
        self._name(ENGINE, "thread_name", {"name": "steps"}, STEPS)
        self._name(ENGINE, "thread_sort_index", {"sort_index": -1}, STEPS)
        self._name(REQUESTS, "process_name", {"name": "requests"})

    def taken(self) -> list[Event]:
        """What was made since the last time."""
        made, self._events = self._events, []
        return made

    def came(self, asked: Asked, time_s: float) -> None:
        facts = {name: value for name, value in asked.facts.items() if name not in ("id", "keys")}
        self._async("b", asked.request, f"request {asked.request}", time_s, facts)

    def waited(self, asked: Asked, end_s: float) -> None:
        self._async("b", asked.request, asked.waits_for, asked.waits_from_s)
        self._async("e", asked.request, asked.waits_for, max(end_s, asked.waits_from_s))

    def gave_way(self, held: Held, rule: str, time_s: float) -> None:
        reason, _, kind = rule.partition(":")
        args = {"request": held.request, "reason": reason, "kind": kind}
        self._add("i", f"gave way ({kind})", time_s, tid=self._thread(held.row), s="t", args=args)

    def prefilled(self, held: Held, tokens: int, span: Span, *, again: bool) -> None:
        args = {"tokens": tokens, "step": span.seq, "request": held.request}
        name = "compute again" if again else "prefill"
        self._slice(name, span.start_s, span.end_s, self._thread(held.row), args)

    def decoded(self, held: Held, end_s: float, steps: int) -> None:
        assert held.decode_from_s is not None
        args = {"steps": steps, "request": held.request}
        self._slice("decode", held.decode_from_s, end_s, self._thread(held.row), args)

    def left(self, held: Held, end_s: float) -> None:
        name = f"request {held.request}"
        self._slice(name, held.from_s, end_s, self._thread(held.row), {"request": held.request})
        self._async("b", held.request, f"on row {held.row}", held.from_s)
        self._async("e", held.request, f"on row {held.row}", end_s)

    def ended(self, asked: Asked, how: str, time_s: float) -> None:
        self._async("e", asked.request, f"request {asked.request}", time_s, {"ended": how})

    def stepped(self, span: Span, running: int, waiting: int, blocks: int) -> None:
        work = span.work
        tokens = {"decode": work.get("decode_rows", 0), "prefill": work.get("prefill_tokens", 0)}
        name = f"step {span.seq}{' failed' if span.failed else ''}"
        facts = {**work, **({"padding": span.padding} if span.padding else {})}
        self._slice(name, span.start_s, span.end_s, STEPS, facts)
        for counter, values in (
            ("rows in use", {"rows": running}),
            ("waiting", {"requests": waiting}),
            ("KV blocks of rows", {"blocks": blocks}),
            ("tokens of a step", tokens),
        ):
            self._add("C", counter, span.start_s, tid=STEPS, args=values)

    # -- events --------------------------------------------------------------------------------------------

    def _thread(self, row: int) -> int:
        if row not in self._named:
            self._named.add(row)
            self._name(ENGINE, "thread_name", {"name": f"row {row}"}, row + 1)
            self._name(ENGINE, "thread_sort_index", {"sort_index": row}, row + 1)
        return row + 1

    def _slice(self, name: str, from_s: float, to_s: float, tid: int, args: Event) -> None:
        # Of rounded times, so that what ends when another begins does not overlap it.
        length_us = _us(to_s - self._zero_s) - _us(from_s - self._zero_s)
        self._add("X", name, from_s, tid=tid, dur=round(max(0.0, length_us), 3), args=args)

    def _async(self, phase: str, request: int, name: str, time_s: float, args: Event | None = None) -> None:
        more: Event = {"id": request, "cat": "request", "pid": REQUESTS}
        self._add(phase, name, time_s, tid=0, **more, **({"args": args} if args else {}))

    def _add(self, phase: str, name: str, time_s: float, **more: Any) -> None:
        ts = max(0.0, _us(time_s - self._zero_s))
        self._events.append({"ph": phase, "name": name, "ts": ts, "pid": ENGINE, **more})

    def _name(self, pid: int, name: str, args: Event, tid: int = 0) -> None:
        self._events.append({"ph": "M", "name": name, "ts": 0, "pid": pid, "tid": tid, "args": args})


def _encoded(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
