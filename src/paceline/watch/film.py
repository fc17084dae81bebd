"""What happened in an engine since the last cut: steps, who came onto a row and left it, and what was decided.

Attached to an engine while somebody watches and taken off afterwards; an engine nobody watches pays nothing. A step
costs one tuple; what it says is put together when somebody looks. Steps beyond a number are counted, and nothing more
is kept of them until the next cut, which says how things stand then. It must not know who watches, nor how a cut
travels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.events import Decision, DecisionKind
from paceline.core.plan import StepPlan
from paceline.core.recorder import RunWatcher
from paceline.core.values import value
from paceline.scheduler.state import SchedulerState
from paceline.watch.scene import Scene, scene_of

Watch = Callable[[SchedulerState], RunWatcher]  # makes somebody who looks on at the engine of that state
MOST_STEPS = 4096  # between two cuts
# What a lane or a story shows; who waited for what is asked for by request.
TOLD = frozenset(
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
    """One decision, as far as a picture shows it."""

    kind: str  # a DecisionKind
    request: int
    rule: str  # a Rule
    value: int
    against: int
    time_s: float


@value
class Steps:
    """Steps as they were submitted, with how things stood then: columns, since most steps change nothing."""

    seq: list[int]
    time_s: list[float]
    decode_rows: list[int]
    prefill_tokens: list[int]
    padding: list[int]  # tokens and rows that only fill a rectangle
    budget: list[int]
    running: list[int]
    waiting: list[int]
    blocks_free: list[int]

    def __len__(self) -> int:
        return len(self.seq)


Column = list[int]


@value
class Changes:
    """What changed, and in which of the steps: columns as well, the first of each with places in `Steps`, in order."""

    cleared: tuple[Column]  # a step failed before it: until then nobody has a row
    leaves: tuple[Column, Column]  # rows
    joins: tuple[Column, Column, Column]  # rows, requests
    spans: tuple[Column, Column, Column]  # rows, tokens
    decode_added: tuple[Column, Column]  # rows
    decode_removed: tuple[Column, Column]
    notes: tuple[Column, list[Noted]]


class Done(NamedTuple):
    """A step came back, or was lost."""

    seq: int
    time_s: float
    failed: bool


@value
class Cut:
    """Everything since the cut before, and the state of now."""

    steps: Steps
    changes: Changes
    done: tuple[Done, ...]
    dropped: int  # steps that were not fetched in time
    evicted: tuple[
        tuple[int, ...], ...
    ]  # by layer group: blocks whose prefix was given up, by place in `Scene.blocks`
    cleared: bool  # a step failed after the newest one of these
    ended: tuple[Noted, ...]  # endings since the newest step; the next one notes them too
    scene: Scene


class Film:
    """Takes notes of one engine's steps."""

    def __init__(self, state: SchedulerState, most: int = MOST_STEPS) -> None:
        self._state = state
        self.most = most
        self._steps: list[_Note] = []
        self._done: deque[Done] = deque()
        self._dropped = 0
        self._cleared = False
        self._evicted = [group.pool.num_evicted for group in state.kv.groups]  # as of the last cut

    def submitted(self, plan: StepPlan, decisions: Sequence[Decision], time_s: float) -> None:
        state = self._state
        if len(self._steps) >= self.most:
            self._dropped += 1
            return
        request_of = state.rows.request_id.item  # few join in a step: one by one is cheaper than all at once
        self._steps.append(
            _Note(
                plan,
                decisions,
                time_s,
                self._cleared,
                state.flights[-1].budget if state.flights else 0,
                state.rows.num_live,
                len(state.queue),
                sum([group.pool.num_free for group in state.kv.groups]),
                [request_of(row) for row in plan.joins.row.tolist()] if len(plan.joins.row) else (),
            )
        )
        self._cleared = False

    def completed(self, seq: int, time_s: float, *, failed: bool = False) -> None:
        if len(self._done) >= self.most:
            self._done.popleft()
        self._done.append(Done(seq, time_s, failed))
        self._cleared = self._cleared or failed

    def cut(self) -> Cut:
        """Hand out what was noted and begin anew."""
        cut = Cut(
            steps=_columns(self._steps),
            changes=_changes(self._steps),
            done=tuple(self._done),
            dropped=self._dropped,
            evicted=self._newly_evicted(),
            cleared=self._cleared,
            ended=tuple(_noted(each) for each in self._state.decisions if each.kind is DecisionKind.FINISH),
            scene=scene_of(self._state),
        )
        self._steps.clear()
        self._done.clear()
        self._dropped = 0
        return cut

    def _newly_evicted(self) -> tuple[tuple[int, ...], ...]:
        """The newest of them where there were very many."""
        pools = [group.pool for group in self._state.kv.groups]
        found = []
        for pool, seen in zip(pools, self._evicted, strict=True):
            last = list(pool.evicted_last) if pool.num_evicted > seen else []
            found.append(tuple(block - 1 for block in last[-(pool.num_evicted - seen) :]))
        self._evicted = [pool.num_evicted for pool in pools]
        return tuple(found)


class _Note(NamedTuple):
    """What is kept of a step until somebody looks: values, and figures that the next step changes."""

    plan: StepPlan
    decisions: Sequence[Decision]
    time_s: float
    cleared: bool
    budget: int
    running: int
    waiting: int
    blocks_free: int
    joined: Sequence[int]  # the requests that came, in the order of the plan's joins


def _columns(notes: Sequence[_Note]) -> Steps:
    plans = [note.plan for note in notes]
    works = [plan.work for plan in plans]
    return Steps(
        seq=[plan.seq for plan in plans],
        time_s=[note.time_s for note in notes],
        decode_rows=[work.decode_rows for work in works],
        prefill_tokens=[work.prefill_tokens for work in works],
        padding=[plan.pad_tokens + plan.padding_rows for plan in plans],
        budget=[note.budget for note in notes],
        running=[note.running for note in notes],
        waiting=[note.waiting for note in notes],
        blocks_free=[note.blocks_free for note in notes],
    )


def _changes(notes: Sequence[_Note]) -> Changes:
    plans = [note.plan for note in notes]
    row_sets = [plan.decode_rows for plan in plans]
    spans = [plan.spans for plan in plans]
    at, rows = _gathered([plan.joins.row for plan in plans])
    spans_at, span_rows = _gathered([span.row for span in spans])
    told = [
        (place, _noted(decision))
        for place, note in enumerate(notes)
        for decision in note.decisions
        if decision.kind in TOLD
    ]
    return Changes(
        cleared=([place for place, note in enumerate(notes) if note.cleared],),
        leaves=_gathered([plan.leaves for plan in plans]),
        joins=(at, rows, [request for note in notes for request in note.joined]),
        spans=(spans_at, span_rows, _gathered([span.num_scheduled for span in spans])[1]),
        decode_added=_gathered([each.added for each in row_sets]),
        decode_removed=_gathered([each.removed for each in row_sets]),
        notes=([place for place, _ in told], [note for _, note in told]),
    )


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
