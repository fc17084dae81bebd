"""Running the invariants: always in tests and simulations, sampled in production."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import StepPlan, StepResult, Swaps
from paceline.core.request import RequestId
from paceline.scheduler.invariants import blocks, progress, requests
from paceline.scheduler.invariants.registry import (
    ALWAYS,
    BLOCKS,
    CHANGES,
    INVARIANTS,
    PLANNED,
    InvariantViolation,
    Look,
)
from paceline.scheduler.scheduler import Scheduler

_PARTS = (blocks, progress, requests)  # importing them fills the registry
SILENT_STEPS = 8  # steps a run may go without a token beyond what its longest prompt needs


class InvariantChecker:
    """Checks everything after every schedule and update, and raises on the first violation."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.num_checks = 0
        self.overlapped = scheduler.state.rows.num_rows > scheduler.state.config.max_num_seqs
        self._scheduler = scheduler
        mode = scheduler.state.config.mode
        mine = [entry for entry in INVARIANTS if mode in entry.modes]
        self._at = {
            moment: [entry for entry in mine if entry.moment == moment]
            for moment in (ALWAYS, BLOCKS, CHANGES, PLANNED)
        }
        self._blocks_seen: object = None
        self._places_seen: object = None
        self._touched: deque[tuple[int, NDArray[np.int64]]] = deque()
        self._copying: dict[int, NDArray[np.int64]] = {}  # swap ticket -> its blocks
        sizes = [group.pool.num_blocks for group in scheduler.state.kv.groups]
        # Where each group's blocks are in `Look.in_flight`, and the end.
        self._offsets: NDArray[np.int64] = np.cumsum([0, *sizes])
        self._arrived: dict[RequestId, tuple[float, int]] = {}
        self._num_added = 0
        self._silent = 0
        self._seen_decisions = 0

    def after_schedule(self, plan: StepPlan | None) -> None:
        state = self._scheduler.state
        decisions = state.decisions
        self._note_arrivals()
        if plan is not None:
            self._note_copies(plan.swap_out)
        look = self._look(plan)
        look.decisions = decisions[min(self._seen_decisions, len(decisions)) :]
        self._always_true(look)  # first: a plan made from a broken state says little about the plan
        # While free blocks are withheld, promises that speak of room do not hold.
        excused = any(group.pool.withheld for group in state.kv.groups)
        for entry in self._at[PLANNED]:
            if not (excused and entry.name[0] in "LF"):
                self._report(entry.name, entry.check(look))
        if plan is not None:
            self._note_copies(plan.swap_in)
            if self.overlapped:
                self._remember(plan, look)
        self._seen_decisions = 0  # the engine takes them with the plan
        self._progress(plan)

    def after_update(self, result: StepResult | None) -> None:
        if result is None:
            self._touched.clear()
            self._copying.clear()
        else:
            for ticket in result.copies_done.tolist():
                self._copying.pop(ticket, None)
            while self._touched and self._touched[0][0] <= result.seq:
                self._touched.popleft()
            if (result.count > 0).any():
                self._silent = 0
        self._always_true(self._look(None))
        self._seen_decisions = len(self._scheduler.state.decisions)

    def _look(self, plan: StepPlan | None) -> Look:
        in_flight = [touched for _, touched in self._touched]
        if self._copying:
            touched = np.full(self._offsets[-1], -1, np.int64)
            # Not even its own row may write there until the copy is done.
            touched[np.concatenate(list(self._copying.values()))] = -2
            in_flight.append(touched)
        look = Look(self._scheduler, plan, in_flight)
        look.arrived = self._arrived
        return look

    def _note_arrivals(self) -> None:
        """Each request's place in the order of arrival, as it was when it came."""
        state = self._scheduler.state
        if state.counters.added == self._num_added:
            return
        self._num_added = state.counters.added
        if len(self._arrived) > 4 * len(state.requests) + 64:
            self._arrived = {id: seen for id, seen in self._arrived.items() if id in state.requests}
        for request_id, order in state.orders.items():
            if request_id not in self._arrived:
                self._arrived[request_id] = (state.requests[request_id].arrival_s, order)

    def _note_copies(self, swaps: Swaps) -> None:
        """Blocks that a swap reads or writes from now on until its ticket comes back."""
        for ticket in set(swaps.ticket.tolist()):
            mine = swaps.ticket == ticket
            self._copying[ticket] = self._offsets[swaps.group[mine]] + swaps.block[mine]

    def _always_true(self, look: Look) -> None:
        self.num_checks += 1
        due = self._at[ALWAYS].copy()
        blocks = _block_bytes(self._scheduler)
        if blocks != self._blocks_seen:
            due += self._at[BLOCKS]
        places = _places(self._scheduler)
        if places != self._places_seen:
            due += self._at[CHANGES]
        for entry in due:
            self._report(entry.name, entry.check(look))
        self._blocks_seen, self._places_seen = blocks, places

    def _remember(self, plan: StepPlan, look: Look) -> None:
        """Which row of this step touches which block, for the steps planned while it runs."""
        state = self._scheduler.state
        touched = np.full(self._offsets[-1], -1, np.int64)
        flight = state.flights[-1]
        part = np.zeros(state.rows.num_rows, np.bool_)
        part[: len(flight.mask)] = flight.mask
        part[[row for row, _, _ in flight.spans]] = True
        for held, offset in zip(look.held, self._offsets.tolist(), strict=False):
            mine = part[held.row]
            blocks, rows = held.block[mine] + offset, held.row[mine]
            touched[blocks] = rows
            touched[blocks[touched[blocks] != rows]] = -2  # several rows
        copies = plan.block_copies
        touched[self._offsets[copies.group] + copies.source] = -2
        self._touched.append((plan.seq, touched))

    def _progress(self, plan: StepPlan | None) -> None:
        """L2: a token or an ending within as many steps as the longest prompt and a full batch may need."""
        state = self._scheduler.state
        self._silent = self._silent + 1 if plan is not None else 0
        config = state.config
        allowed = (
            -(-config.max_model_len // config.max_num_batched_tokens) + config.max_num_seqs + SILENT_STEPS
        )
        allowed *= 2 * (1 + len(state.flights))
        if state.mode.keeps_finished:
            allowed += -(-config.max_num_seqs * 2 * config.max_model_len // config.max_num_batched_tokens)
        if self._silent > allowed:
            self._report("L2", f"{self._silent} steps without a token")

    def _report(self, name: str, message: str | None) -> None:
        if message is not None:
            raise InvariantViolation(name, message)


def _block_bytes(scheduler: Scheduler) -> object:
    """Everything the block invariants read, as comparable bytes."""
    state = scheduler.state
    seen: list[object] = [
        len(state.kv.tickets.open),
        [(f.seq, f.group, len(f.blocks)) for f in state.kv.fences],
        state.rows.live.tobytes(),
    ]
    high = state.rows.high
    for group in state.kv.groups:
        pool = group.pool
        seen += [
            pool.refs.tobytes(),
            pool.cached.tobytes(),
            pool.num_free,
            len(pool.evictable),
            len(group.cache),
            group.reserved,
        ]
        seen += [group.held[:high].tobytes(), group.first[:high].tobytes(), group.table[:high].tobytes()]
    return seen


def _places(scheduler: Scheduler) -> object:
    """Where every request is: changes whenever one comes, goes or moves."""
    state = scheduler.state
    counters = state.counters
    where = [
        (request.state, request.row, request.priority, len(request.host_places))
        for request in state.requests.values()
    ]
    return [counters.added, counters.finished, counters.preempted, len(state.kv.tickets.open), where]


class SampledChecker:
    """For production: one full check every so many steps; a violation is counted and told, never raised."""

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
            self._tell(violation)
        except Exception as error:  # a state too broken to be looked at must not end a service either
            self._tell(InvariantViolation("unreadable", repr(error)))

    def _tell(self, violation: InvariantViolation) -> None:
        self.violations[violation.name] += 1
        self._on_violation(violation)
