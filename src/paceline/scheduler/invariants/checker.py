"""Running the invariants: always in tests and simulations, sampled in production."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import StepPlan, StepResult, StepWork, Swaps
from paceline.core.request import RequestId
from paceline.scheduler.invariants import blocks, fairness, rows_and_requests
from paceline.scheduler.invariants.half_steps import (
    NO_REQUEST,
    SEVERAL,
    Blocks,
    BlocksInUse,
    Frame,
    Frames,
    Planned,
    take_frame,
    take_owners,
)
from paceline.scheduler.invariants.registry import (
    ALWAYS,
    BLOCKS,
    CHANGES,
    HOST,
    INVARIANTS,
    PLANNED,
    Check,
    CheckContext,
    Invariant,
    InvariantViolation,
)
from paceline.scheduler.scheduler import Scheduler

# Importing them fills the registry.
_PARTS = (blocks, fairness, rows_and_requests)
SILENT_STEPS = 8  # steps a run may go without a token beyond what its longest prompt needs


class InvariantChecker:
    """Checks everything after every schedule and update, and raises on the first violation.

    What lies in arrays is looked at `batch` half-steps at a time, from pictures taken after each. A violation
    may so be raised late, but never out of turn: `flush` raises the first in time, and has to be called when
    anything else goes wrong, and at the end.
    """

    def __init__(self, scheduler: Scheduler, batch: int = 1) -> None:
        self.num_checks = 0
        self.first: InvariantViolation | None = None  # the earliest violation known
        self.overlapped = scheduler.state.rows.num_rows > scheduler.state.config.max_num_seqs
        self._scheduler = scheduler
        self._batch = batch
        mode = scheduler.state.config.mode
        moments = (ALWAYS, BLOCKS, CHANGES, HOST, PLANNED)
        mine = sorted((e for e in INVARIANTS if mode in e.modes), key=lambda e: moments.index(e.moment))
        self._order = {entry: place for place, entry in enumerate(mine)}
        self._sweeps = [entry for entry in mine if entry.sweep is not None]
        at_once = [(entry, entry.check) for entry in mine if entry.sweep is None]
        self._at = {moment: [due for due in at_once if due[0].moment == moment] for moment in moments}
        self._without_room = [due for due in self._at[PLANNED] if due[0].name[0] not in "LF"]
        self._frames: list[Frame] = []
        self._last: Frame | None = None
        self._swept: Blocks | None = None  # blocks that are known to be sound
        self._seen: object = None  # where every request was at the last look that found nothing
        self._host_seen: object = None
        self._underway: deque[Planned] = deque()
        self._copying: dict[int, NDArray[np.int64]] = {}  # swap ticket -> its blocks
        sizes = [group.pool.num_blocks for group in scheduler.state.kv.groups]
        # Where each group's blocks begin when all are numbered one after another, and the end.
        self._starts: NDArray[np.int64] = np.cumsum([0, *sizes])
        self._arrived: dict[RequestId, tuple[float, int]] = {}
        self._has_trees = False
        self._backlog = fairness.Backlog()
        self._displaced = fairness.Displaced()
        self._num_added = 0
        self._silent = 0
        config, budget = scheduler.state.config, scheduler.state.config.fewest_step_tokens
        self._padding = 0
        if scheduler.state.mode.keeps_finished:
            self._padding = -(-config.max_num_seqs * 2 * config.max_model_len // budget)
        self._seen_decisions = 0
        self._stored = 0
        self._since_s: float | None = None

    def after_schedule(self, plan: StepPlan | None) -> None:
        state = self._scheduler.state
        decisions = state.decisions
        self._note_arrivals()
        planned = None
        if plan is not None:
            if len(plan.swap_out.ticket):
                self._note_copies(plan.swap_out)
            planned = Planned(plan, state.flights[-1], self._in_flight())
        context = CheckContext(self._scheduler, plan)
        context.arrived = self._arrived
        context.backlog = self._backlog.before(self._scheduler)
        context.displaced = self._displaced.marks
        if self._since_s is None:
            self._since_s = state.now_s
        self._stored += 0 if plan is None else len(plan.store.disk)
        context.stored, context.since_s = self._stored, self._since_s
        context.decisions = decisions[min(self._seen_decisions, len(decisions)) :]
        # While free blocks are withheld, promises that speak of room do not hold.
        due = self._at[PLANNED]
        for pool in state.pools:
            if pool.withheld:
                due = self._without_room
        self._check(context, due, after_schedule=True, planned=planned)
        self._backlog.note(self._scheduler)
        self._displaced.note(self._scheduler, context.decisions)
        if plan is not None and len(plan.swap_in.ticket):
            self._note_copies(plan.swap_in)
        if planned is not None and self.overlapped:
            self._underway.append(planned)
        # The engine takes them with a plan; without one they stay, and are looked at once all the same.
        self._seen_decisions = 0 if plan is not None else len(decisions)
        self._progress(plan)

    def after_update(self, result: StepResult | None) -> None:
        if result is None:
            self._underway.clear()
            self._copying.clear()
        else:
            if self._copying:
                for ticket in (*result.copies_done.tolist(), *result.copies_failed.tolist()):
                    self._copying.pop(ticket, None)
            while self._underway and self._underway[0].plan.seq <= result.seq:
                self._underway.popleft()
            if any(result.count.tolist()):
                self._silent = 0
        self._check(CheckContext(self._scheduler, None), [], after_schedule=False, planned=None)
        self._seen_decisions = len(self._scheduler.state.decisions)

    def flush(self) -> None:
        """CheckContext at what has not been looked at; raises the first violation there is."""
        if self.first is None:
            self._sweep()
        if self.first is not None:
            self._frames = []  # the rest follows from it
            raise self.first

    def found(self, violation: InvariantViolation) -> None:
        """Another check has seen a violation just now: the first, unless something was wrong before."""
        if self.first is None:
            self._sweep()
        if self.first is None:
            self.first = violation

    def _check(
        self,
        context: CheckContext,
        planned_due: list[tuple[Invariant, Check]],
        *,
        after_schedule: bool,
        planned: Planned | None,
    ) -> None:
        """Take a picture, and look at once at what no picture shows."""
        self.num_checks += 1
        scheduler, frames = self._scheduler, self._frames
        frame = self._last = take_frame(
            scheduler.state, self._last, after_schedule=after_schedule, planned=planned
        )
        frames.append(frame)
        due, seen, host = self._at[ALWAYS], _places(scheduler), self._host_seen
        moved = seen != self._seen
        if moved:
            due = due + self._at[CHANGES]
            host = _host_places(scheduler)
            if host != self._host_seen:
                due += self._at[HOST]
        self._seen = self._host_seen = None
        try:
            if moved:
                frame.owners = take_owners(scheduler.state)
            # First what is always true: a plan made from a broken state says little about the plan.
            for entry, check in due + planned_due if planned_due else due:
                message = check(context)
                if message is not None:
                    self._sweep((entry, message))
                    break
            else:
                self._seen, self._host_seen = seen, host
        except Exception:
            self.flush()  # a state too broken to be looked at may be known by name
            raise
        if self.first is not None or len(frames) >= self._batch:
            self.flush()

    def _sweep(self, seen: tuple[Invariant, str] | None = None) -> None:
        """CheckContext at the pictures. `seen` is a violation found at the last of them."""
        if not self._frames:
            return
        found = []
        if seen is not None:
            found.append((len(self._frames) - 1, self._order[seen[0]], *seen))
        frames, self._frames = Frames(self._scheduler.state, self._frames), []
        unreadable: Exception | None = None
        try:
            if self.overlapped:
                rows_and_requests.remember(frames)
        except Exception as error:
            unreadable = error
        known = len(frames.blocks) == 1 and frames.blocks[0] is self._swept
        for entry in self._sweeps:
            if known and entry.moment == BLOCKS:
                continue
            assert entry.sweep is not None
            try:
                found += [(at, self._order[entry], entry, message) for at, message in entry.sweep(frames)]
            except Exception as error:  # what is too broken for one check may be known by name to another
                unreadable = error
        for frame in frames.frames:
            if frame.planned is not None:
                frame.planned.in_flight = ()  # looked at: it need not keep the plans before it
        self._swept = None if found or unreadable is not None else frames.blocks[-1]
        if found:
            _, _, entry, message = min(found, key=lambda finding: finding[:2])
            self.first = InvariantViolation(entry.name, message)
        elif unreadable is not None:
            raise unreadable

    def _in_flight(self) -> Sequence[Planned | BlocksInUse]:
        if not self._copying:
            return tuple(self._underway)
        touched = np.full(self._starts[-1], NO_REQUEST, np.int64)
        # Not even its own row may write there until the copy is done.
        touched[np.concatenate(list(self._copying.values()))] = SEVERAL
        return (*self._underway, BlocksInUse(touched))

    def _note_arrivals(self) -> None:
        """Each request's place in the order of arrival, as it was when it came."""
        state = self._scheduler.state
        if state.counters.added == self._num_added and not self._has_trees:
            return
        self._has_trees = any(request.tree is not None for request in state.requests.values())
        self._num_added = state.counters.added
        if len(self._arrived) > 4 * len(state.requests) + 64:
            self._arrived = {id: seen for id, seen in self._arrived.items() if id in state.requests}
        for request_id, order in state.orders.items():
            request = state.requests[request_id]
            if request_id not in self._arrived or request.tree is not None:  # branches exchange places
                self._arrived[request_id] = (request.arrival_s, order)

    def _note_copies(self, swaps: Swaps) -> None:
        """Blocks that a swap reads or writes from now on until its ticket comes back."""
        for ticket in set(swaps.ticket.tolist()):
            mine = swaps.ticket == ticket
            self._copying[ticket] = self._starts[swaps.group[mine]] + swaps.block[mine]

    def _progress(self, plan: StepPlan | None) -> None:
        """L2: a token or an ending within as many steps as the longest prompt and a full batch may need."""
        tickets = self._scheduler.state.kv.tickets.open.values()
        if plan is not None and not _computes(plan.work) and any(ticket.level for ticket in tickets):
            return  # it looks for copies of the disk; how long requests wait for them is bounded by T4
        self._silent = self._silent + 1 if plan is not None else 0
        if self._silent < SILENT_STEPS:
            return
        state = self._scheduler.state
        config, fewest = state.config, state.dial.fewest
        if (
            state.kv.keeping
        ):  # a row that drops KV is computed again in pieces of a block at most, cut where one leaves
            fewest = min(fewest, max(1, state.kv.block_size // 2))
        patience = -(-config.max_model_len // fewest) + config.max_num_seqs + SILENT_STEPS
        patience += state.encodings.most_steps(fewest)
        if self._silent > patience * 2 * (1 + len(state.flights)) + self._padding:
            self.found(InvariantViolation("L2", f"{self._silent} steps without a token"))
            self.flush()


def _computes(work: StepWork) -> bool:
    return bool(work.decode_rows or work.prefill_tokens)


_PLACE = attrgetter("state", "row", "priority")
_ON_HOST = attrgetter("host_places")


def _places(scheduler: Scheduler) -> object:
    """Where every request is: changes whenever one comes, goes or moves."""
    state = scheduler.state
    counters, requests = state.counters, state.requests.values()
    totals = (counters.added, counters.finished, counters.preempted, len(state.kv.tickets.open))
    return totals, list(map(_PLACE, requests)), list(map(len, map(_ON_HOST, requests)))


def _host_places(scheduler: Scheduler) -> object:
    """Which host places are free, and which requests keep the others."""
    state = scheduler.state
    tickets = [(number, ticket.free_places) for number, ticket in state.kv.tickets.open.items()]
    owners = [request.id for request in state.requests.values() if request.host_places]
    return [part.free_places() for level in state.kv.levels[1:] for part in level], tickets, owners


class SampledChecker:
    """For production: one full check every `every` steps; a violation is counted and logged, never raised."""

    def __init__(
        self, scheduler: Scheduler, every: int, on_violation: Callable[[InvariantViolation], None]
    ) -> None:
        self._checker = InvariantChecker(scheduler)
        self._every = every
        self._steps = 0
        self._on_violation = on_violation
        self.violations: Counter[str] = Counter()

    def after_schedule(self, plan: StepPlan | None) -> None:
        return None

    def after_update(self, result: StepResult | None) -> None:
        self._steps += 1
        if self._steps % self._every:
            return
        try:
            self._checker.after_update(result)
        except InvariantViolation as violation:
            self._report(violation)
        except Exception as error:  # a state too broken to be looked at must not end a service either
            self._report(InvariantViolation("unreadable", repr(error)))

    def _report(self, violation: InvariantViolation) -> None:
        self._checker.first = None  # it goes on looking
        self.violations[violation.name] += 1
        self._on_violation(violation)
