"""Invariants of the levels below the device: host memory and disk, and copies between them."""

from __future__ import annotations

import numpy as np

from paceline.core.events import Rule
from paceline.kv.reuse import REMEMBERED_TIMES
from paceline.kv.swap import Ticket
from paceline.kv.tiers import DISK
from paceline.scheduler.invariants.registry import HOST, PLANNED, CheckContext, invariant
from paceline.scheduler.loading import FREES_DEVICE
from paceline.scheduler.state import SchedulerState

SLACK_S = 1e-6  # times are whole microseconds


@invariant("T1", moment=HOST)
def places_are_free_or_held(context: CheckContext) -> str | None:
    """On each level: references are what copies and swapped requests hold, and all other places are free once."""
    state = context.scheduler.state
    kv = state.kv
    for number in range(1, len(kv.levels)):
        for index, part in enumerate(kv.levels[number]):
            if not part.num_places:
                continue
            held = np.bincount(
                np.concatenate([*_holders(state, number, index), np.zeros(0, np.int64)]).astype(np.int64),
                minlength=part.num_places,
            )
            wrong = np.flatnonzero(held != part.pool.refs)
            if len(wrong):
                place = int(wrong[0])
                return f"place {place} of level {number} has {part.pool.refs[place]} references, {held[place]} holders"
            free = np.bincount(np.array(part.free_places(), np.int64), minlength=part.num_places)
            wrong = np.flatnonzero(free != (held == 0))
            if len(wrong):
                return f"place {int(wrong[0])} of level {number} is free {int(free[wrong[0]])} times"
            cached = set(part.cache.entries())
            if cached != set(np.flatnonzero(part.pool.cached).tolist()) or len(cached) != len(part.cache):
                return f"level {number}: keys and places do not agree"
    return None


def _holders(
    state: SchedulerState, number: int, index: int
) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Places of one level and group that copies and swapped requests hold."""
    owners = {}
    if number == 1:
        owners = {r.id: r.host_places[index] for r in state.requests.values() if r.host_places}
    holders = list(owners.values())
    for ticket in state.kv.tickets.open.values():
        if ticket.level == number:
            holders.append(ticket.blocks[index])
        elif ticket.level == number - 1 and (ticket.free_places or ticket.owner not in owners):
            holders.append(ticket.places[index])
    return holders


@invariant("T2")
def a_copy_has_its_target_alone(context: CheckContext) -> str | None:
    """What one copy writes no other copy reads or writes."""
    kv = context.scheduler.state.kv
    if len(kv.tickets.open) < 2 or not kv.keeps_below:
        return None
    read: set[tuple[int, int, int]] = set()
    written: set[tuple[int, int, int]] = set()
    for ticket in kv.tickets.open.values():
        targets, sources = _places(ticket, target=True), _places(ticket, target=False)
        if not written.isdisjoint(targets | sources) or not read.isdisjoint(targets):
            return "two copies use one block, and one of them writes it"
        written |= targets
        read |= sources
    return None


@invariant("T3")
def nothing_is_hit_before_it_is_there(context: CheckContext) -> str | None:
    """What a copy writes has no key until the copy has completed."""
    kv = context.scheduler.state.kv
    for ticket in kv.tickets.open.values() if kv.keeps_below else ():
        for level, index, block in _places(ticket, target=True):
            if kv.levels[level][index].pool.cached[block]:
                return f"block {block} of level {level} can be hit while it is written"
    return None


@invariant("T4", moment=PLANNED)
def no_request_waits_for_a_level_too_long(context: CheckContext) -> str | None:
    """A request waits for copies at most as long as computing its prompt would take, behind those of others; for the
    disk only where it should be the sooner."""
    scheduler = context.scheduler
    loading, state = scheduler.composer.admission.loading, scheduler.state
    for number in loading.waiting:
        since_s, load = loading.patience[number]
        most_s = loading.compute_s(0, state.requests[number].num_tokens) + load.busy_s
        if load.patience_s > most_s + SLACK_S or state.now_s >= since_s + load.patience_s:
            return f"request {number} waits for copies since {since_s}, for {load.patience_s} s, at {state.now_s}"
        if load.rule is Rule.LOADING and not load.is_worth_waiting:
            return f"request {number} waits {load.load_s} s for the disk, computing takes {load.patience_s} s"
    return None


@invariant("T6", moment=PLANNED)
def a_load_is_sooner_than_computing(context: CheckContext) -> str | None:
    """Each behind what link and device have to do first."""
    state, loading = context.scheduler.state, context.scheduler.composer.admission.loading
    for number, load in loading.started:
        request = state.requests.get(number)
        if request is None or request.blocked is None:
            continue
        start = int(state.rows.computed[request.row]) - load.num_tokens
        compute_s = FREES_DEVICE * loading.compute_s(start, load.num_tokens) + load.busy_s
        if load.load_s > compute_s + SLACK_S:
            return f"request {request.id} loads in {load.load_s} s what takes {compute_s} s to compute"
    return None


@invariant("T5", moment=PLANNED)
def writes_stay_within_their_budget(context: CheckContext) -> str | None:
    """Blocks written to the disk since the first look: a burst, and what the time since then allows."""
    tiers = context.scheduler.state.tiers
    if not context.stored:
        return None
    budget = tiers.budgets[DISK - 1]
    if budget.most is None:
        return None
    passed_s = context.scheduler.state.now_s - context.since_s
    allowed = budget.most + (passed_s + SLACK_S) / budget.block_s if budget.most else 0.0
    return None if context.stored <= allowed else f"{context.stored} blocks written in {passed_s} s"


@invariant("T7", moment=HOST)
def few_evicted_keys_are_remembered(context: CheckContext) -> str | None:
    """On every level, at most eight for each of its blocks."""
    for number, parts in enumerate(context.scheduler.state.kv.levels):
        for part in parts:
            kept, most = part.pool.evictable.num_remembered, REMEMBERED_TIMES * part.pool.num_blocks
            if kept > most:
                return f"level {number} remembers {kept} evicted keys, for {part.pool.num_blocks} blocks"
    return None


def _places(ticket: Ticket, *, target: bool) -> set[tuple[int, int, int]]:
    """Level, group and number of the blocks that a copy writes, or reads."""
    upper = ticket.incoming == target
    return {
        (ticket.level + (not upper), index, block)
        for index, blocks in enumerate(ticket.blocks if upper else ticket.places)
        for block in blocks.tolist()
    }
