"""Who was on which row when, folded from the lines of a run log: what a timeline of a run is drawn from.

A log names rows in its plans and requests in its decisions; joins stand in the order in which their requests were let
in, without those that left again before the plan was made. Knows nothing of how a timeline is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.audit.codec import Json, decode_decision, decode_time
from paceline.audit.runlog import LoggedEnd, LoggedStep
from paceline.core.events import Decision, DecisionKind

_LET_IN = (DecisionKind.ADMIT, DecisionKind.RESUME)  # a fork is followed by one of these


@dataclass(slots=True)
class Held:
    """A request on its row."""

    request: int
    row: int
    from_s: float
    busy_until_s: float  # end of the last part of its prompt
    decode_from_s: float | None = None
    steps: int = 0  # number of the step in which it began to decode


@dataclass(slots=True)
class Asked:
    """A request that has not ended."""

    request: int
    facts: dict[str, Json]
    waits_from_s: float
    waits_for: str = "waiting"
    gave_way: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One step as it ran: after the one before it, however early it was planned."""

    seq: int
    start_s: float
    end_s: float
    failed: bool
    work: dict[str, Json]
    padding: int


class Timeline(Protocol):
    """Who is told what happened, in the order of the log."""

    def came(self, asked: Asked, time_s: float) -> None: ...

    def waited(self, asked: Asked, end_s: float) -> None: ...

    def gave_way(self, held: Held, rule: str, time_s: float) -> None: ...

    def prefilled(self, held: Held, tokens: int, span: Span, *, again: bool) -> None: ...

    def decoded(self, held: Held, end_s: float, steps: int) -> None: ...

    def left(self, held: Held, end_s: float) -> None: ...

    def ended(self, asked: Asked, how: str, time_s: float) -> None: ...

    def stepped(self, span: Span, running: int, waiting: int, blocks: int) -> None: ...


@dataclass(slots=True)
class _Blocks:
    """Blocks in the tables of rows, each counted once however many share it."""

    of_row: dict[int, dict[tuple[int, int], int]] = field(default_factory=dict)
    uses: dict[tuple[int, int], int] = field(default_factory=dict)

    def put(self, row: int, group: int, index: int, block: int) -> None:
        table = self.of_row.setdefault(row, {})
        before = table.get((group, index))
        if before is not None:
            self._drop(group, before)
        table[group, index] = block
        self.uses[group, block] = self.uses.get((group, block), 0) + 1

    def free(self, row: int) -> None:
        for (group, _), block in self.of_row.pop(row, {}).items():
            self._drop(group, block)

    def _drop(self, group: int, block: int) -> None:
        left = self.uses[group, block] - 1
        if left:
            self.uses[group, block] = left
        else:
            del self.uses[group, block]


class TraceFold:
    """Reads lines in order and tells a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._to = timeline
        self._rows: dict[int, Held] = {}
        self._row_of: dict[int, int] = {}
        self._asked: dict[int, Asked] = {}
        self._blocks = _Blocks()
        self._done_s = float("-inf")  # end of the last step
        self._num_steps = 0

    def step(self, logged: LoggedStep) -> None:
        self._inputs(logged.inputs)
        start_s = max(logged.t_plan, self._done_s)
        let_in = self._decisions(logged.decisions)
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
        for request, row in zip(let_in, plan.get("joins", {}).get("row", ()), strict=True):
            self._join(request, row, start_s)
        self._tables(plan)
        self._compute(plan, span)
        self._done_s, self._num_steps = span.end_s, self._num_steps + 1
        waiting = len(self._asked) - len(self._row_of)
        self._to.stepped(span, len(self._rows), waiting, len(self._blocks.uses))

    def finish(self, end: LoggedEnd | None) -> None:
        """The log is over: whatever still goes on ends with it."""
        if end is not None:
            self._inputs(end.inputs)
            self._decisions(end.decisions)
        waiting = [asked for asked in self._asked.values() if asked.request not in self._row_of]
        for row in list(self._rows):
            self._leave(row, self._done_s)
        for asked in waiting:
            self._to.waited(asked, self._done_s)
        for asked in self._asked.values():
            self._to.ended(asked, "the log ends", max(self._done_s, asked.waits_from_s))

    # -- what came before the plan -------------------------------------------------------------------------

    def _inputs(self, entries: Iterable[Sequence[Json]]) -> None:
        for kind, time_s, *values in entries:
            if kind == "add":
                facts = values[0]
                asked = Asked(facts["id"], facts, decode_time(facts["arrival_s"]))
                self._asked[asked.request] = asked
                self._to.came(asked, asked.waits_from_s)
            elif kind == "step_failed":
                for row in list(self._rows):
                    self._leave(row, decode_time(time_s))
                    self._blocks.free(row)

    def _decisions(self, entries: Iterable[Json]) -> list[int]:
        """Returns who joins in the plan that follows."""
        let_in: list[int] = []
        for entry in entries:
            decision = decode_decision(entry)
            kind, request = decision.kind, int(decision.request)
            if kind in _LET_IN:
                let_in.append(request)
            elif kind is DecisionKind.PREEMPT:
                if request in let_in:
                    let_in.remove(request)
                self._give_way(decision)
            elif kind in (DecisionKind.FINISH, DecisionKind.REFUSE):
                if request in let_in:
                    let_in.remove(request)
                self._end(decision)
        return let_in

    def _give_way(self, decision: Decision) -> None:
        asked = self._asked.get(decision.request)
        row = self._row_of.get(decision.request)
        if row is not None:
            self._to.gave_way(self._rows[row], decision.reason, decision.time_s)
            self._leave(row, decision.time_s)
        if asked is not None:
            asked.waits_from_s = max(decision.time_s, asked.waits_from_s)
            asked.waits_for = f"gave way ({decision.reason.rpartition(':')[2]})"
            asked.gave_way += 1

    def _end(self, decision: Decision) -> None:
        row = self._row_of.get(decision.request)
        asked = self._asked.pop(decision.request, None)
        end_s = decision.time_s
        if row is not None:
            end_s = max(end_s, self._rows[row].busy_until_s)
            self._leave(row, end_s)
        elif asked is not None:
            self._to.waited(asked, end_s)
        if asked is not None:
            self._to.ended(asked, decision.reason, max(end_s, asked.waits_from_s))

    # -- the plan ------------------------------------------------------------------------------------------

    def _join(self, request: int, row: int, start_s: float) -> None:
        self._rows[row] = Held(request, row, start_s, start_s)
        self._row_of[request] = row
        asked = self._asked.get(request)
        if asked is not None:
            self._to.waited(asked, start_s)

    def _leave(self, row: int, time_s: float) -> None:
        held = self._rows.pop(row, None)
        if held is None:
            return
        self._row_of.pop(held.request, None)
        self._rest(held, time_s)
        end_s = max(time_s, held.busy_until_s, held.from_s)
        self._to.left(held, end_s)
        asked = self._asked.get(held.request)
        if asked is not None:
            asked.waits_from_s = end_s

    def _rest(self, held: Held, time_s: float) -> None:
        if held.decode_from_s is not None:
            held.busy_until_s = max(time_s, held.decode_from_s)
            self._to.decoded(held, held.busy_until_s, self._num_steps - held.steps)
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
                asked = self._asked.get(held.request)
                again = asked is not None and asked.gave_way > 0
                self._to.prefilled(held, tokens, span, again=again)
                held.busy_until_s = span.end_s
        for row in change.get("added", ()):
            held = self._rows.get(row)
            if held is not None:
                held.decode_from_s, held.steps = span.start_s, self._num_steps
