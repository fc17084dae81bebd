"""Invariants of the KV cache: conservation, references, sharing, prefixes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.core.request import RequestState
from paceline.kv.block_pool import NULL_BLOCK
from paceline.scheduler.invariants.registry import BLOCKS, CHANGES, PLANNED, Look, invariant


@invariant("S1", moment=BLOCKS)
def every_block_is_free_or_live(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        pool = group.pool
        live = int(np.count_nonzero(pool.refs > 0))
        if pool.num_free + live != pool.num_blocks:
            return f"group {group.index}: {pool.num_free} free + {live} live blocks are not {pool.num_blocks}"
    return None


@invariant("S3", moment=BLOCKS)
def the_free_list_has_each_free_block_once(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        free = group.pool.free_blocks()
        counts = np.bincount(free, minlength=group.pool.num_blocks)
        wrong = counts != (group.pool.refs == 0)  # S2: free exactly when nobody holds it
        if np.count_nonzero(wrong):
            block = int(wrong.argmax())
            return f"block {block} is free {counts[block]} times and has {group.pool.refs[block]} references"
    return None


@invariant("S4", moment=BLOCKS)
def references_are_what_holds_blocks(look: Look) -> str | None:
    kv = look.scheduler.state.kv
    for group in kv.groups:
        others = [fence.blocks for fence in kv.fences if fence.group == group.index]
        others += [ticket.blocks[group.index] for ticket in kv.tickets.open.values()]
        expected = look.held[group.index].holders
        if others:
            expected = expected + np.bincount(np.concatenate(others), minlength=group.pool.num_blocks)
        expected[NULL_BLOCK] = 1
        differ = expected != group.pool.refs
        if np.count_nonzero(differ):
            wrong = int(differ.argmax())
            return (
                f"group {group.index}: block {wrong} has {group.pool.refs[wrong]} references, "
                f"{expected[wrong]} holders"
            )
    return None


@invariant("S5", moment=BLOCKS)
def no_row_holds_a_block_twice(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        held = look.held[group.index]
        pairs = np.sort(held.row * group.pool.num_blocks + held.block)
        if np.count_nonzero(pairs[1:] == pairs[:-1]):
            return f"group {group.index}: a row holds a block twice"
    return None


@invariant("S8", moment=PLANNED)
def tables_cover_what_is_computed(look: Look) -> str | None:
    state = look.scheduler.state
    live, size = look.live, state.kv.block_size
    upper = state.rows.upper[live]
    for group in state.kv.groups:
        held = group.held[live]
        if np.count_nonzero(held * size < upper):
            return f"row {live[int((held * size < upper).argmax())]}: its table is too short"
        if state.mode.keeps_finished:
            continue
        if np.count_nonzero((held - 1) * size > upper):
            return "a row holds blocks beyond what it computes"
    return None


@invariant("S6", moment=PLANNED)
def nothing_is_written_where_others_read(look: Look) -> str | None:
    """Others may hold the block a row writes only if they see none of the positions written."""
    if look.plan is None:
        return None
    state = look.scheduler.state
    size = state.kv.block_size
    rows, start, end = _writes(look)
    for group in state.kv.groups:
        held = look.held[group.index]
        holders = held.holders
        holders[NULL_BLOCK] = -1
        last = group.table[rows, (end - 1) // size]  # a prompt's earlier blocks are new, or S7 would see them
        first = group.table[rows, start // size]
        suspect = (holders[last] != 1) | (holders[first] != 1)
        for at in np.flatnonzero(suspect).tolist():
            for block in (int(first[at]), int(last[at])):
                others = [other for other in held.row[held.block == block].tolist() if other != rows[at]]
                if block == NULL_BLOCK or any(state.rows.upper[other] > start[at] for other in others):
                    return f"row {rows[at]} writes tokens {start[at]} to {end[at]} where rows {others} read"
    return None


@invariant("S10", moment=CHANGES)
def who_does_not_run_owns_nothing(look: Look) -> str | None:
    state = look.scheduler.state
    rows = state.rows
    high = rows.high
    for group in state.kv.groups:
        if np.count_nonzero(group.held[:high].astype(np.bool_) & ~rows.live[:high]):
            return f"group {group.index}: a row that is not in use holds blocks"
    for request in state.requests.values():
        if request.host_places and request.state not in (RequestState.SWAPPED, RequestState.PAUSED):
            return f"request {request.id} is {request.state.value} and keeps host places"
        if request.row >= 0 and request.state not in (RequestState.RUNNING, RequestState.BLOCKED):
            return f"request {request.id} is {request.state.value} and has row {request.row}"
    return None


@invariant("S10", moment=BLOCKS)
def promised_blocks_are_there(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        if group.reserved > group.pool.num_free:
            return (
                f"group {group.index}: {group.reserved} blocks are promised, {group.pool.num_free} are free"
            )
    return None


@invariant("S4h", moment=CHANGES)
def host_places_are_free_or_taken_once(look: Look) -> str | None:
    state = look.scheduler.state
    kv = state.kv
    for index, host in enumerate(kv.places):
        if not host.num_places:
            continue
        taken = [np.array(host.free_places(), np.int64)]
        owners = {r.id: r.host_places[index] for r in state.requests.values() if r.host_places}
        for ticket in kv.tickets.open.values():
            if ticket.free_places or ticket.owner not in owners:
                taken.append(ticket.places[index])
        taken += list(owners.values())
        counts = np.bincount(np.concatenate(taken), minlength=host.num_places)
        if (counts != 1).any():
            return f"host place {int((counts != 1).argmax())} is taken {int(counts[(counts != 1).argmax()])} times"
    return None


@invariant("S15", moment=BLOCKS)
def the_cache_and_its_blocks_agree(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        entries = group.cache.entries()
        if len(entries) != len(group.cache) or len(entries) != int(np.count_nonzero(group.pool.cached)):
            return f"group {group.index}: {len(group.cache)} keys, {len(entries)} blocks, flags differ"
        if not all(map(entries.__contains__, group.pool.evictable)):
            return f"group {group.index}: a block waits for eviction without a key"
    return None


@invariant("S16", moment=BLOCKS)
def only_computed_blocks_are_cached(look: Look) -> str | None:
    """Of the rows that hold a cached block, at least one knows that all of it has been computed."""
    state = look.scheduler.state
    for group in state.kv.groups:
        if not len(group.cache):
            continue
        held = look.held[group.index]
        behind = (held.index + 1) * state.kv.block_size > state.rows.computed[held.row]
        wrong = behind & group.pool.cached[held.block]
        if np.count_nonzero(wrong):
            known = np.zeros(group.pool.num_blocks, np.bool_)
            known[held.block[~behind]] = True
            wrong &= ~known[held.block]
        if np.count_nonzero(wrong):
            return f"block {int(held.block[wrong][0])} is cached before it was computed"
    return None


@invariant("S22", moment=PLANNED)
def no_block_changes_hands_under_a_step(look: Look) -> str | None:
    """What a plan writes is not touched by an earlier step of another row, nor by a copy, still under way."""
    if look.plan is None or not look.in_flight:
        return None
    size = look.scheduler.state.kv.block_size
    rows, start, end = _writes(look)
    copies, swap_in = look.plan.block_copies, look.plan.swap_in
    offset = 0
    for group in look.scheduler.state.kv.groups:
        written = (group.table[rows, start // size], group.table[rows, (end - 1) // size])
        fresh = copies.target[copies.group == group.index]
        if len(swap_in.block):
            fresh = np.concatenate([fresh, swap_in.block[swap_in.group == group.index]])
        for touched in look.in_flight:
            for blocks in written:
                owner = touched[offset + blocks]
                wrong = (owner != -1) & (owner != rows)
                if np.count_nonzero(wrong):
                    return f"row {rows[wrong][0]} writes a block that a step under way still uses"
            if len(fresh) and np.count_nonzero(touched[offset + fresh] != -1):
                return "a copy goes into a block that a step under way still uses"
        offset += group.pool.num_blocks
    return None


@invariant("S26t", moment=BLOCKS)
def tenants_never_share_blocks(look: Look) -> str | None:
    state = look.scheduler.state
    for group in state.kv.groups:
        held = look.held[group.index]
        owner = np.empty(group.pool.num_blocks, np.int64)
        tenants = state.rows.tenant[held.row]
        owner[held.block] = tenants
        if np.count_nonzero(owner[held.block] != tenants):
            return f"group {group.index}: two tenants hold one block"
    return None


@invariant("S22r", moment=PLANNED)
def no_row_changes_hands_under_a_step(look: Look) -> str | None:
    """A row that joins takes part in no earlier step whose result is still to come."""
    flights = look.scheduler.state.flights
    if look.plan is None or len(flights) < 2:
        return None
    joined = look.plan.joins.row
    for flight in list(flights)[:-1] if len(joined) else ():
        busy = {row for row, _, _ in flight.spans}.union(np.flatnonzero(flight.mask).tolist())
        if not busy.isdisjoint(joined.tolist()):
            return f"rows {sorted(busy.intersection(joined.tolist()))} join while step {flight.seq} uses them"
    return None


def _writes(look: Look) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Row, first position and end of every write of the plan just made."""
    flight = look.scheduler.state.flights[-1]
    rows = np.flatnonzero(flight.mask)
    count = np.ones(len(rows), np.int64)
    if flight.spans:
        rows = np.concatenate([rows, np.array([row for row, _, _ in flight.spans])])
        count = np.concatenate([count, np.array([num for _, _, num in flight.spans])])
    end = look.scheduler.state.rows.upper[rows]
    return rows, end - count, end
