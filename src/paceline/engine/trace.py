"""A trace of an engine's steps: what each changed, which requests took and left rows, and what was decided.

`StepTrace` keeps notes until its owner takes them as a `TraceDelta`, together with the state of now. A step that
changes something costs one tuple, whose content is put together then; a step of plain decode like the one before it is
only counted. Beyond a number of notes, steps are counted as dropped until the next delta. `PeriodicTrace` takes its
deltas itself, by the run's clock, for runs that are watched afterwards. Knows nothing of viewers and messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Decision, DecisionKind
from paceline.core.fast import value
from paceline.core.plan import EMPTY, SAME_ROWS, StepPlan
from paceline.core.recorder import RunWatcher
from paceline.engine.snapshot import Snapshot, places_here, snapshot_of
from paceline.scheduler.state import Flight, SchedulerState

Watch = Callable[[SchedulerState], RunWatcher]  # makes the watcher of the engine with that state
MOST_STEPS = 4096  # notes between two deltas
SAMPLED = 64  # one step in this many is timed: the clock costs as much as a note
# What a viewer draws; why a request waited is explained on demand.
SHOWN = frozenset(
    {
        DecisionKind.ADMIT,
        DecisionKind.RESUME,
        DecisionKind.PREEMPT,
        DecisionKind.FORK,
        DecisionKind.FINISH,
        DecisionKind.REFUSE,
        DecisionKind.FAIL,
    }
)


class Noted(NamedTuple):
    """One decision, as far as a viewer shows it."""

    kind: str  # a DecisionKind
    request: int
    rule: str  # a Rule
    value: int
    against: int
    time_s: float


@value
class Steps:
    """Steps as they were submitted, with how things stood then, as columns.

    Steps of plain decode that changed nothing are counted with the step before them.
    """

    seq: Sequence[int]
    time_s: Sequence[float]
    count: Sequence[int]  # this step and those like it that followed at once
    until_s: Sequence[float]  # when the last of these was submitted
    decode_rows: Sequence[int]  # those that only fill a rectangle included
    prefill_tokens: Sequence[int]  # prompt padding included
    padding: Sequence[int]  # of both, the tokens that are only padding
    padding_rows: Sequence[int]  # of these, the rows that decode past their end
    budget: Sequence[int]
    running: Sequence[int]
    waiting: Sequence[int]

    def __len__(self) -> int:
        return sum(self.count)


Column = list[int]


@value
class Changes:
    """What changed, and in which of the steps: columns as well, the first of each with places in `Steps`, in order."""

    cleared: tuple[Column]  # a step failed before it, or the model slept: all rows were empty then
    leaves: tuple[Column, Column]  # rows
    joins: tuple[Column, Column, Column]  # rows, requests
    spans: tuple[Column, Column, Column]  # rows, tokens
    decode_added: tuple[Column, Column]  # rows
    decode_removed: tuple[Column, Column]
    pads: tuple[Column, Column, Column]  # rows, tokens of prompt padding computed in the step
    fills: tuple[Column, Column]  # rows that decode only padding from this step on, until they stop or leave
    placed: tuple[Column, Column, Column]  # rows, tokens of contexts that are copied to their place
    encodes: tuple[Column, Column]  # rows for which the step encodes a picture
    notes: tuple[Column, list[Noted]]


Done = tuple[int, float, bool]  # a step came back: its number, when, and whether it was lost


@value
class TraceDelta:
    """Everything since the last delta, and the state of now."""

    steps: Steps
    changes: Changes
    done: tuple[Done, ...]
    dropped: int  # steps without a note
    # By layer group: blocks whose prefix was evicted, by place in `Snapshot.blocks`.
    evicted: tuple[tuple[int, ...], ...]
    cleared: bool  # a step failed after the newest one of these, or the model slept
    ended: tuple[Noted, ...]  # endings since the newest step; the next one notes them too
    snapshot: Snapshot


@value
class Moment:
    """The part of a delta that describes one moment."""

    evicted: tuple[tuple[int, ...], ...]
    num_evicted: tuple[int, ...]  # by layer group, since the start
    ended: tuple[Noted, ...]
    snapshot: Snapshot


# What is kept of a step until the next delta: its plan and decisions, when it was submitted, whether a step failed
# before it, its flight (None while there is none), rows in use and requests waiting, the requests that joined, in the
# order of the plan's joins, and the rows whose pictures it encodes. A plain tuple, since many are made: a named one
# takes several times as long.
_Note = tuple[
    StepPlan, Sequence[Decision], float, bool, Flight | None, int, int, Sequence[int], Sequence[int]
]


class StepTrace:
    """Takes notes of one engine's steps."""

    def __init__(self, state: SchedulerState, most: int = MOST_STEPS) -> None:
        self.cpu_s = 0.0  # of this thread, spent on notes: an estimate from samples
        self._state = state
        self._queue = state.queue
        self._pools = [group.pool for group in state.kv.groups]
        self.most = most
        self._steps: list[_Note] = []
        self._counts: list[int] = []  # by note: steps it stands for
        self._until_s: list[float] = []  # by note: when the last of these was submitted
        self._num_padding = self._num_waiting = 0  # as of the last note
        self._awaited: set[int] = set()  # steps with a note that have not come back
        self._done: deque[Done] = deque()
        self._last_done: Done | None = None  # of all steps
        self._dropped = 0
        self._cleared = False  # a step failed since the newest note
        self._sleeps = state.num_sleeps  # as of that note
        self._filling: NDArray[np.bool_] = _NO_ROWS  # rows that decode only padding, as of the last delta
        self._evicted = self._num_evicted()  # as of the last delta

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        started_s = 0.0 if plan.seq % SAMPLED else time.thread_time()
        if (
            plan.decode_rows is SAME_ROWS
            and not decisions
            and self._counts
            and not plan.work.prefill_tokens
            and not plan.work.encode_positions
            and not plan.work.placed_tokens
            and plan.leaves is EMPTY
            and plan.padding_rows == self._num_padding
            and len(self._queue) == self._num_waiting
            and not self._cleared
        ):
            self._counts[-1] += 1
            self._until_s[-1] = time_s
        else:
            self._note(plan, decisions, time_s)
        if started_s:
            self.cpu_s += SAMPLED * (time.thread_time() - started_s)

    def _note(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        state = self._state
        if len(self._steps) >= self.most:
            self._dropped += 1
            return
        request_of, joined = state.rows.request_id.item, plan.joins.row
        self._num_waiting, self._num_padding = len(state.queue), plan.padding_rows
        self._steps.append(
            (
                plan,
                decisions,
                time_s,
                self._is_cleared(),
                state.flights[-1] if state.flights else None,
                state.rows.num_live,
                self._num_waiting,
                # Few join in a step: one by one is cheaper than all at once.
                [request_of(row) for row in joined.tolist()] if len(joined) else (),
                self._encoding_rows() if plan.work.encode_positions else (),
            )
        )
        self._counts.append(1)
        self._until_s.append(time_s)
        self._awaited.add(plan.seq)
        self._cleared, self._sleeps = False, state.num_sleeps

    def _encoding_rows(self) -> list[int]:
        """Rows that hold a picture of which the newest step computes a part."""
        group = self._state.flights[-1].group if self._state.flights else None
        encodings = group.encodings if group is not None else ()
        rows = list(self._state.encodings.rows.items())
        return [row for row, media in rows if any(each in encodings for each in media.held.values())]

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        self._last_done = (seq, time_s, failed)
        if seq in self._awaited:
            self._awaited.discard(seq)
            self._done.append(self._last_done)
        if failed:
            self._cleared = True

    def moment(self) -> Moment:
        """The state of now, for a delta that may be taken later; changes nothing."""
        return Moment(
            evicted=self._newly_evicted(),
            num_evicted=self._num_evicted(),
            ended=tuple(_noted(each) for each in self._state.decisions if each.kind is DecisionKind.FINISH),
            snapshot=snapshot_of(self._state),
        )

    def take_delta(self, moment: Moment | None = None) -> TraceDelta:
        """Hand out the notes and begin anew: with the state of now, or of a moment since the newest step."""
        moment = self.moment() if moment is None else moment
        steps, changes, self._filling = _as_columns(self._steps, self._counts, self._until_s, self._filling)
        if self._last_done is not None and (not self._done or self._done[-1] != self._last_done):
            self._done.append(self._last_done)
        delta = TraceDelta(
            steps=steps,
            changes=changes,
            done=tuple(self._done),
            dropped=self._dropped,
            evicted=moment.evicted,
            cleared=self._is_cleared(),
            ended=moment.ended,
            snapshot=moment.snapshot,
        )
        self._steps, self._counts, self._until_s = [], [], []
        self._done.clear()
        self._last_done = None
        self._dropped = 0
        self._evicted = moment.num_evicted
        return delta

    def _is_cleared(self) -> bool:
        """Whether all rows have been empty since the newest note."""
        return self._cleared or self._state.num_sleeps != self._sleeps

    def _newly_evicted(self) -> tuple[tuple[int, ...], ...]:
        """The newest of them where there were very many."""
        found = []
        for pool, seen in zip(self._pools, self._evicted, strict=True):
            last = list(pool.evicted_last) if pool.num_evicted > seen else []
            last = last[-(pool.num_evicted - seen) :]
            found.append(tuple(places_here(pool.refs, last)))
        return tuple(found)

    def _num_evicted(self) -> tuple[int, ...]:
        return tuple(pool.num_evicted for pool in self._pools)


class PeriodicTrace:
    """Takes a delta every `interval_s` of the engine's clock, whatever clock that is, and gives it to `on_delta`.

    Where the engine had nothing to do for longer than that, a delta of the beginning of its rest comes too: the step
    that ends the rest would be the first to say which requests had left. The interval doubles after every
    `doubles_after` deltas, so that their number stays bounded however long the run is.
    """

    def __init__(
        self,
        state: SchedulerState,
        on_delta: Callable[[TraceDelta], None],
        *,
        interval_s: float,
        doubles_after: int,
    ) -> None:
        self._state = state
        self._trace = StepTrace(state)
        self._on_delta = on_delta
        self._interval_s = interval_s
        self._doubles_after = doubles_after
        self._num_deltas = 0
        self._num_noted = 0
        self._due_s: float | None = None
        self._rest: Moment | None = None  # the state when the engine came to rest

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        rest, self._rest = self._rest, None
        if rest is not None and time_s - rest.snapshot.time_s >= self._interval_s:
            self._take(self._trace.take_delta(rest), rest.snapshot.time_s)
        self._trace.submitted(plan, decisions, time_s)
        self._num_noted += 1
        if self._due_s is None or time_s >= self._due_s or self._num_noted >= self._trace.most:
            self.take_delta(time_s)

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        self._trace.completed(seq, time_s, failed=failed)
        self._rest = self._trace.moment() if self._has_nothing_to_do() else None

    def take_delta(self, time_s: float) -> None:
        """Take one now, whenever the next is due; for the beginning and the end of a run."""
        self._take(self._trace.take_delta(), time_s)

    def _has_nothing_to_do(self) -> bool:
        state = self._state
        return not (state.rows.num_live or len(state.queue) or state.flights)

    def _take(self, delta: TraceDelta, time_s: float) -> None:
        self._on_delta(delta)
        self._num_deltas += 1
        self._num_noted = 0
        if self._num_deltas % self._doubles_after == 0:
            self._interval_s *= 2
        self._due_s = time_s + self._interval_s


_NO_ROWS: NDArray[np.bool_] = np.zeros(0, np.bool_)


def _as_columns(
    notes: Sequence[_Note],
    counts: Sequence[int],
    until_s: Sequence[float],
    filling: NDArray[np.bool_],
) -> tuple[Steps, Changes, NDArray[np.bool_]]:
    """The notes as columns, and the rows that decode only padding after them; `filling` are those before them."""
    plans, decisions, times, cleared, flights, running, waiting, joined, encoding = (
        zip(*notes, strict=True) if notes else ((),) * 9
    )
    works = [plan.work for plan in plans]
    steps = Steps(
        seq=[plan.seq for plan in plans],
        time_s=times,
        count=counts,
        until_s=until_s,
        decode_rows=[work.decode_rows for work in works],
        prefill_tokens=[work.prefill_tokens for work in works],
        padding=[plan.pad_tokens + plan.padding_rows for plan in plans],
        padding_rows=[plan.padding_rows for plan in plans],
        budget=[flight.budget if flight is not None else 0 for flight in flights],
        running=running,
        waiting=waiting,
    )
    row_sets = [plan.decode_rows for plan in plans]
    spans = [plan.spans for plan in plans]
    join_places, join_rows = _gathered([plan.joins.row for plan in plans])
    span_places, span_rows = _gathered([span.row for span in spans])
    placed = [_placed(plan) for plan in plans]
    placed_places, placed_rows = _gathered([rows for rows, _ in placed])
    noted = [
        (place, _noted(decision))
        for place, several in enumerate(decisions)
        for decision in several
        if decision.kind in SHOWN
    ]
    pads, fills, filling = _padding(flights, filling)
    changes = Changes(
        cleared=([place for place, is_cleared in enumerate(cleared) if is_cleared],),
        leaves=_gathered([plan.leaves for plan in plans]),
        joins=(join_places, join_rows, [request for several in joined for request in several]),
        spans=(span_places, span_rows, _gathered([span.num_scheduled for span in spans])[1]),
        decode_added=_gathered([rows.added for rows in row_sets]),
        decode_removed=_gathered([rows.removed for rows in row_sets]),
        pads=pads,
        fills=fills,
        placed=(placed_places, placed_rows, _gathered([tokens for _, tokens in placed])[1]),
        encodes=_gathered([np.asarray(rows, np.int64) for rows in encoding]),
        notes=([place for place, _ in noted], [note for _, note in noted]),
    )
    return steps, changes, filling


def _padding(
    flights: Sequence[Flight | None], before: NDArray[np.bool_]
) -> tuple[tuple[Column, Column, Column], tuple[Column, Column], NDArray[np.bool_]]:
    """Prompt padding of each step, the rows that begin to decode only padding, and those that do so at the end."""
    pads: tuple[Column, Column, Column] = ([], [], [])
    fills: tuple[Column, Column] = ([], [])
    for place, flight in enumerate(flights):
        if flight is None or flight.filling is None:  # of continuous batching, which pads nothing
            continue
        for pad in flight.pads:
            for column, number in zip(pads, (place, *pad), strict=True):
                column.append(number)
        began = flight.filling.copy()
        known = min(len(began), len(before))
        began[:known] &= ~before[:known]
        rows = began.nonzero()[0].tolist()
        fills[0].extend([place] * len(rows))
        fills[1].extend(rows)
        before = flight.filling
    return pads, fills, before


def _placed(plan: StepPlan) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Rows and tokens of the runs that a step places: every layer group has the same."""
    if not plan.work.placed_tokens:
        return EMPTY, EMPTY
    runs = plan.placements
    return runs.row[runs.group == 0], runs.count[runs.group == 0]


def _gathered(parts: Sequence[NDArray[np.signedinteger[Any]]]) -> tuple[Column, Column]:
    """All numbers of all parts one after the other, and the place of the part each is from."""
    places = [place for place, part in enumerate(parts) if len(part)]
    if not places:
        return [], []
    found = [parts[place] for place in places]
    return np.repeat(places, [len(part) for part in found]).tolist(), np.concatenate(found).tolist()


def _noted(decision: Decision) -> Noted:
    kind, request, reason, value, _, time_s = decision[:6]
    return Noted(kind, request, reason, value, decision.against, time_s)
