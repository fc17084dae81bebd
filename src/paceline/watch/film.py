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
from paceline.core.plan import NO_JOINS, NO_SPANS, SAME_ROWS, StepPlan
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


class Joined(NamedTuple):
    """A request came onto a row."""

    row: int
    request: int
    num_prompt: int
    num_tokens: int  # known when it came
    num_computed: int  # of these, already in its blocks
    source: int  # row it was copied from, or -1


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
    budget: list[int]
    running: list[int]
    waiting: list[int]
    blocks_free: list[int]

    def __len__(self) -> int:
        return len(self.seq)


@value
class Change:
    """What changed in one of the steps."""

    at: int  # which of them, counted from 0
    cleared: bool  # a step failed before it: until then nobody has a row
    padding: int  # tokens and rows that only fill a rectangle
    swap_blocks: int
    leaves: tuple[int, ...]
    joins: tuple[Joined, ...]
    spans: tuple[tuple[int, int], ...]  # row, tokens
    decode_added: tuple[int, ...]
    decode_removed: tuple[int, ...]
    notes: tuple[Noted, ...]


class Done(NamedTuple):
    """A step came back, or was lost."""

    seq: int
    time_s: float
    failed: bool


@value
class Cut:
    """Everything since the cut before, and the state of now."""

    steps: Steps
    changes: tuple[Change, ...]  # in the order of the steps
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
        joined = plan.joins.row
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
                state.rows.request_id[joined] if len(joined) else joined,
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
            changes=tuple([_change(at, note) for at, note in enumerate(self._steps) if _is_change(note)]),
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
    joined: NDArray[np.signedinteger[Any]]  # the requests that came, in the order of the plan's joins


def _columns(notes: Sequence[_Note]) -> Steps:
    works = [note.plan.work for note in notes]
    return Steps(
        seq=[note.plan.seq for note in notes],
        time_s=[note.time_s for note in notes],
        decode_rows=[work.decode_rows for work in works],
        prefill_tokens=[work.prefill_tokens for work in works],
        budget=[note.budget for note in notes],
        running=[note.running for note in notes],
        waiting=[note.waiting for note in notes],
        blocks_free=[note.blocks_free for note in notes],
    )


def _is_change(note: _Note) -> bool:
    """Whether there is anything besides the figures to tell; for some steps with deferrals, which are not told, there
    is not."""
    plan = note.plan
    return bool(
        note.decisions
        or plan.decode_rows is not SAME_ROWS
        or plan.spans is not NO_SPANS
        or len(plan.leaves)
        or plan.joins is not NO_JOINS
        or plan.padding_rows
        or plan.pad_tokens
        or plan.work.swap_blocks
        or note.cleared
    )


def _change(at: int, note: _Note) -> Change:
    plan = note.plan
    return Change(
        at=at,
        cleared=note.cleared,
        padding=plan.pad_tokens + plan.padding_rows,
        swap_blocks=plan.work.swap_blocks,
        leaves=_plain(plan.leaves),
        joins=_joined(plan, note.joined.tolist()) if len(plan.joins.row) else (),
        spans=tuple(zip(_plain(plan.spans.row), _plain(plan.spans.num_scheduled), strict=True)),
        decode_added=_plain(plan.decode_rows.added),
        decode_removed=_plain(plan.decode_rows.removed),
        notes=tuple([_noted(decision) for decision in note.decisions if decision.kind in TOLD]),
    )


def _plain(numbers: NDArray[np.signedinteger[Any]]) -> tuple[int, ...]:
    return tuple(numbers.tolist()) if len(numbers) else ()


def _joined(plan: StepPlan, requests: list[int]) -> tuple[Joined, ...]:
    joins, copies = plan.joins, plan.row_copies
    rows = joins.row.tolist()
    sources = dict(zip(copies.target.tolist(), copies.source.tolist(), strict=True))
    columns = (joins.num_prompt.tolist(), joins.num_tokens.tolist(), joins.num_computed.tolist())
    return tuple(
        Joined(*column, sources.get(column[0], -1)) for column in zip(rows, requests, *columns, strict=True)
    )


def _noted(decision: Decision) -> Noted:
    kind, request, reason, value, _, time_s = decision[:6]
    return Noted(kind, request, reason, value, decision.against, time_s)
