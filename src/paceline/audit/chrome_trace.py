"""A run log as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One track for each row with its requests, parts of prompts, decoding and preemptions; one for the steps; one for each
request with its waiting; counters for rows, waiting, blocks and tokens of steps. Times are microseconds from the first
thing that happened. Streams: a trace may be larger than memory.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.audit.codec import Json, decode_decision, decode_time
from paceline.audit.linefile import LineFile
from paceline.audit.runlog import LoggedLine, LoggedStep, RunLog
from paceline.core.events import Decision, DecisionKind
from paceline.errors import InputError

# Which request was on which row when, folded from the lines of a run log: what a timeline of a run is drawn from.
#
# A log names rows in its plans and requests in its decisions; joins stand in the order in which their requests were
# admitted, without those that left again before the plan was made. Knows nothing of how a timeline is written.


_ADMITTED = (DecisionKind.ADMIT, DecisionKind.RESUME)  # a fork is followed by one of these


@dataclass(slots=True)
class HeldRow:
    """A request on its row."""

    request: int
    row: int
    from_s: float
    busy_until_s: float  # end of the last part of its prompt
    decode_from_s: float | None = None
    steps: int = 0  # number of the step in which it began to decode


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    request: int
    facts: dict[str, Json]
    waits_from_s: float
    waits_for: str = "waiting"
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One step as it ran: after the one before it, however early it was planned."""

    seq: int
    start_s: float
    end_s: float
    failed: bool
    work: dict[str, Json]
    padding: int


@dataclass(slots=True)
class _Blocks:
    """Blocks in the tables of rows, each counted once however many share it."""

    of_row: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    uses: Counter[tuple[int, int]] = field(default_factory=Counter)

    def put(self, row: int, group: int, index: int, block: int) -> None:
        table = self.of_row.setdefault(row, {})
        if (group, index) in table:
            self._drop(group, table[group, index])
        table[group, index] = block
        self.uses[group, block] += 1

    def free(self, row: int) -> None:
        for (group, _), block in self.of_row.pop(row, {}).items():
            self._drop(group, block)

    def _drop(self, group: int, block: int) -> None:
        self.uses[group, block] -= 1
        if not self.uses[group, block]:
            del self.uses[group, block]


class _Fold:
    """Reads lines in order and makes events of them."""

    def __init__(self) -> None:
        self._to = _Events()
        self._rows: dict[int, HeldRow] = {}
        self._row_of: dict[int, int] = {}
        self._open: dict[int, OpenRequest] = {}
        self._blocks = _Blocks()
        self._done_s = float("-inf")  # end of the last step
        self.num_steps = 0

    def taken(self) -> list[Event]:
        """The events made since the last call."""
        made, self._to.events = self._to.events, []
        return made

    def step(self, logged: LoggedStep) -> None:
        if not self.num_steps:
            self._to.zero_s = _first_time(logged)
        self._inputs(logged.inputs)
        start_s = max(logged.t_plan, self._done_s)
        admitted = self._decisions(logged.decisions)
        plan = logged.plan
        span = Span(
            seq=logged.seq,
            start_s=start_s,
            end_s=max(logged.t_done, start_s),
            failed=logged.result is None,
            work=plan.get("work", {}),
            padding=plan.get("pad_tokens", 0) + plan.get("padding_rows", 0),
        )
        for row in plan.get("leaves", ()):
            self._leave(row, self._done_s)
            self._blocks.free(row)
        for request, row in zip(admitted, plan.get("joins", {}).get("row", ()), strict=True):
            self._join(request, row, start_s)
        self._tables(plan)
        self._compute(plan, span)
        self._done_s, self.num_steps = span.end_s, self.num_steps + 1
        waiting = len(self._open) - len(self._row_of)
        self._to.stepped(span, len(self._rows), waiting, len(self._blocks.uses))

    def finish(self, end: LoggedLine | None) -> None:
        """The log is over: whatever still goes on ends with it."""
        if end is not None:
            self._inputs(end.inputs)
            self._decisions(end.decisions)
        waiting = [opened for opened in self._open.values() if opened.request not in self._row_of]
        for row in list(self._rows):
            self._leave(row, self._done_s)
        for opened in waiting:
            self._to.waited(opened, self._done_s)
        for opened in self._open.values():
            self._to.ended(opened, "the log ends", max(self._done_s, opened.waits_from_s))

    # -- what came before the plan -------------------------------------------------------------------------

    def _inputs(self, entries: Iterable[Sequence[Json]]) -> None:
        for kind, time_s, *values in entries:
            if kind == "add":
                facts = values[0]
                opened = OpenRequest(facts["id"], facts, decode_time(facts["arrival_s"]))
                self._open[opened.request] = opened
                self._to.came(opened, opened.waits_from_s)
            elif kind == "step_failed":
                for row in list(self._rows):
                    self._leave(row, decode_time(time_s))
                    self._blocks.free(row)

    def _decisions(self, entries: Iterable[Json]) -> list[int]:
        """Returns the requests that join in the plan that follows."""
        admitted: list[int] = []
        for entry in entries:
            decision = decode_decision(entry)
            kind, request = decision.kind, int(decision.request)
            if kind in _ADMITTED:
                admitted.append(request)
            elif kind is DecisionKind.PREEMPT:
                if request in admitted:
                    admitted.remove(request)
                self._preempt(decision)
            elif kind in (DecisionKind.FINISH, DecisionKind.REFUSE):
                if request in admitted:
                    admitted.remove(request)
                self._end(decision)
        return admitted

    def _preempt(self, decision: Decision) -> None:
        opened = self._open.get(decision.request)
        row = self._row_of.get(decision.request)
        if row is not None:
            self._to.preempted(self._rows[row], decision.reason, decision.time_s)
            self._leave(row, decision.time_s)
        if opened is not None:
            opened.waits_from_s = max(decision.time_s, opened.waits_from_s)
            opened.waits_for = f"preempted ({decision.reason.rpartition(':')[2]})"
            opened.preemptions += 1

    def _end(self, decision: Decision) -> None:
        row = self._row_of.get(decision.request)
        opened = self._open.pop(decision.request, None)
        end_s = decision.time_s
        if row is not None:
            end_s = max(end_s, self._rows[row].busy_until_s)
            self._leave(row, end_s)
        elif opened is not None:
            self._to.waited(opened, end_s)
        if opened is not None:
            self._to.ended(opened, decision.reason, max(end_s, opened.waits_from_s))

    # -- the plan ------------------------------------------------------------------------------------------

    def _join(self, request: int, row: int, start_s: float) -> None:
        self._rows[row] = HeldRow(request, row, start_s, start_s)
        self._row_of[request] = row
        opened = self._open.get(request)
        if opened is not None:
            self._to.waited(opened, start_s)

    def _leave(self, row: int, time_s: float) -> None:
        held = self._rows.pop(row, None)
        if held is None:
            return
        self._row_of.pop(held.request, None)
        self._rest(held, time_s)
        end_s = max(time_s, held.busy_until_s, held.from_s)
        self._to.left(held, end_s)
        opened = self._open.get(held.request)
        if opened is not None:
            opened.waits_from_s = end_s

    def _rest(self, held: HeldRow, time_s: float) -> None:
        if held.decode_from_s is not None:
            held.busy_until_s = max(time_s, held.decode_from_s)
            self._to.decoded(held, held.busy_until_s, self.num_steps - held.steps)
            held.decode_from_s = None

    def _tables(self, plan: dict[str, Json]) -> None:
        for name, column in (("new_blocks", "block"), ("block_copies", "target")):
            part = plan.get(name)
            if part:
                groups = part.get("group") or [0] * len(part["row"])
                for row, group, index, block in zip(
                    part["row"], groups, part["index"], part[column], strict=True
                ):
                    self._blocks.put(row, group, index, block)

    def _compute(self, plan: dict[str, Json], span: Span) -> None:
        change = plan.get("decode_rows", {})
        for row in change.get("removed", ()):
            if row in self._rows:
                self._rest(self._rows[row], self._done_s)
        spans = plan.get("spans", {})
        for row, tokens in zip(spans.get("row", ()), spans.get("num_scheduled", ()), strict=True):
            held = self._rows.get(row)
            if held is not None:
                opened = self._open.get(held.request)
                again = opened is not None and opened.preemptions > 0
                self._to.prefilled(held, tokens, span, again=again)
                held.busy_until_s = span.end_s
        for row in change.get("added", ()):
            held = self._rows.get(row)
            if held is not None:
                held.decode_from_s, held.steps = span.start_s, self.num_steps


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
    fold = _Fold()
    for step in log:
        try:
            fold.step(step)
        except _BROKEN as problem:
            raise InputError(f"{log.path}: line {step.line} is broken: {problem}") from problem
        yield from fold.taken()
    if not fold.num_steps:
        if log.is_unfinished:
            raise InputError(f"{log.path} has no step yet; try again after the server has answered a request")
        raise InputError(f"{log.path} has no step that could be drawn")
    fold.finish(log.end)
    yield from fold.taken()


def _first_time(step: LoggedStep) -> float:
    arrivals = [decode_time(entry[2]["arrival_s"]) for entry in step.inputs if entry[0] == "add"]
    return min([step.t_plan, *arrivals])


class _Events:
    """A timeline that makes events of what happens."""

    def __init__(self) -> None:
        self.zero_s = 0.0  # the first time of the log
        self.events: list[Event] = []
        self._named: set[int] = set()
        self._name(ENGINE, "process_name", {"name": "engine"})
        self._name(ENGINE, "thread_name", {"name": "steps"}, STEPS)
        self._name(ENGINE, "thread_sort_index", {"sort_index": -1}, STEPS)
        self._name(REQUESTS, "process_name", {"name": "requests"})

    def came(self, opened: OpenRequest, time_s: float) -> None:
        facts = {name: value for name, value in opened.facts.items() if name not in ("id", "keys")}
        self._async("b", opened.request, f"request {opened.request}", time_s, facts)

    def waited(self, opened: OpenRequest, end_s: float) -> None:
        self._async("b", opened.request, opened.waits_for, opened.waits_from_s)
        self._async("e", opened.request, opened.waits_for, max(end_s, opened.waits_from_s))

    def preempted(self, held: HeldRow, rule: str, time_s: float) -> None:
        reason, _, kind = rule.partition(":")
        args = {"request": held.request, "reason": reason, "kind": kind}
        self._add("i", f"preempted ({kind})", time_s, tid=self._thread(held.row), s="t", args=args)

    def prefilled(self, held: HeldRow, tokens: int, span: Span, *, again: bool) -> None:
        args = {"tokens": tokens, "step": span.seq, "request": held.request}
        name = "compute again" if again else "prefill"
        self._slice(name, span.start_s, span.end_s, self._thread(held.row), args)

    def decoded(self, held: HeldRow, end_s: float, steps: int) -> None:
        assert held.decode_from_s is not None
        args = {"steps": steps, "request": held.request}
        self._slice("decode", held.decode_from_s, end_s, self._thread(held.row), args)

    def left(self, held: HeldRow, end_s: float) -> None:
        name = f"request {held.request}"
        self._slice(name, held.from_s, end_s, self._thread(held.row), {"request": held.request})
        self._async("b", held.request, f"on row {held.row}", held.from_s)
        self._async("e", held.request, f"on row {held.row}", end_s)

    def ended(self, opened: OpenRequest, how: str, time_s: float) -> None:
        self._async("e", opened.request, f"request {opened.request}", time_s, {"ended": how})

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
        length_us = _us(to_s - self.zero_s) - _us(from_s - self.zero_s)
        self._add("X", name, from_s, tid=tid, dur=round(max(0.0, length_us), 3), args=args)

    def _async(self, phase: str, request: int, name: str, time_s: float, args: Event | None = None) -> None:
        more: Event = {"id": request, "cat": "request", "pid": REQUESTS}
        self._add(phase, name, time_s, tid=0, **more, **({"args": args} if args else {}))

    def _add(self, phase: str, name: str, time_s: float, **more: Any) -> None:
        ts = max(0.0, _us(time_s - self.zero_s))
        self.events.append({"ph": phase, "name": name, "ts": ts, "pid": ENGINE, **more})

    def _name(self, pid: int, name: str, args: Event, tid: int = 0) -> None:
        self.events.append({"ph": "M", "name": name, "ts": 0, "pid": pid, "tid": tid, "args": args})


def _encoded(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
