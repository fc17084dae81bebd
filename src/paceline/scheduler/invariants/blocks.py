"""Invariants of the KV cache: conservation, references, sharing, prefixes."""

from __future__ import annotations

import numpy as np

from paceline.core.request import RequestState
from paceline.kv.block_pool import NULL_BLOCK
from paceline.kv.group import LayerGroup
from paceline.scheduler.invariants.registry import PLANNED, Look, invariant


@invariant("S1")
def every_block_is_free_or_live(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        pool = group.pool
        live = int(np.count_nonzero(pool.refs))
        if pool.num_free + live != pool.num_blocks:
            return f"group {group.index}: {pool.num_free} free + {live} live blocks are not {pool.num_blocks}"
    return None


@invariant("S3")
def the_free_list_has_each_free_block_once(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        free = group.pool.free_blocks()
        counts = np.bincount(free, minlength=group.pool.num_blocks)
        if counts.max(initial=0) > 1:
            return f"group {group.index}: block {int(counts.argmax())} is free twice"
        if not np.array_equal(counts == 1, group.pool.refs == 0):  # S2
            wrong = int(np.flatnonzero((counts == 1) != (group.pool.refs == 0))[0])
            return f"group {group.index}: block {wrong} has {group.pool.refs[wrong]} references (S2)"
    return None


@invariant("S4")
def references_are_what_holds_blocks(look: Look) -> str | None:
    kv = look.scheduler.state.kv
    for group in kv.groups:
        held = [_live_entries(look, group)]
        held += [fence.blocks for fence in kv.fences if fence.group == group.index]
        held += [ticket.blocks[group.index] for ticket in kv.tickets.open.values()]
        expected = np.bincount(np.concatenate(held), minlength=group.pool.num_blocks)
        expected[NULL_BLOCK] = 1
        if not np.array_equal(expected, group.pool.refs):
            wrong = int(np.flatnonzero(expected != group.pool.refs)[0])
            return (
                f"group {group.index}: block {wrong} has {group.pool.refs[wrong]} references, "
                f"{expected[wrong]} holders"
            )
    return None


@invariant("S5")
def no_row_holds_a_block_twice(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        entries, rows = _entries_and_rows(look, group)
        pairs = rows * group.pool.num_blocks + entries
        if len(np.unique(pairs)) != len(pairs):
            return f"group {group.index}: a row holds a block twice"
    return None


@invariant("S6", moment=PLANNED)
def nothing_is_written_where_others_read(look: Look) -> str | None:
    """Others may hold the block a row writes only if they see none of the positions written."""
    if look.plan is None:
        return None
    state = look.scheduler.state
    size = state.kv.block_size
    for group in state.kv.groups:
        entries, rows = _entries_and_rows(look, group)
        holders = np.bincount(entries, minlength=group.pool.num_blocks)
        holders[NULL_BLOCK] = -1
        for row, start, end in _writes(look):
            blocks = group.table[row, start // size : (end - 1) // size + 1]
            for block in blocks[holders[blocks] != 1].tolist():
                others = [other for other in rows[entries == block].tolist() if other != row]
                if block == NULL_BLOCK or any(state.rows.upper[other] > start for other in others):
                    return f"row {row} writes tokens {start} to {end} into block {block}, which {others} read"
    return None


@invariant("S8")
def tables_cover_what_is_computed(look: Look) -> str | None:
    state = look.scheduler.state
    live, size = look.live, state.kv.block_size
    upper = state.rows.upper[live]
    for group in state.kv.groups:
        held = group.held[live]
        if (held * size < upper).any():
            return f"row {live[int((held * size < upper).argmax())]}: its table is too short"
        if state.mode.keeps_finished:
            continue
        if (held > -(-np.maximum(upper, state.rows.computed[live] + 1) // size)).any():
            return "a row holds blocks beyond what it computes"
    return None


@invariant("S10")
def who_does_not_run_owns_nothing(look: Look) -> str | None:
    state = look.scheduler.state
    idle = ~state.rows.live
    for group in state.kv.groups:
        if group.held[idle].any() or group.reserved_for[idle].any():
            return f"group {group.index}: a row that is not in use holds blocks"
        if int(group.reserved_for.sum()) != group.reserved or group.reserved > group.pool.num_free:
            return f"group {group.index}: {group.reserved} blocks are promised, {group.pool.num_free} are free"
    for request in state.requests.values():
        on_row = request.row >= 0
        if on_row != (request.state in (RequestState.RUNNING, RequestState.BLOCKED) and on_row):
            return f"request {request.id} is {request.state.value} and has row {request.row}"
        if request.host_places and request.state not in (RequestState.SWAPPED, RequestState.PAUSED):
            return f"request {request.id} is {request.state.value} and keeps host places"
    return None


@invariant("S4h")
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


@invariant("S15")
def the_cache_and_its_blocks_agree(look: Look) -> str | None:
    for group in look.scheduler.state.kv.groups:
        entries = group.cache.entries()
        if len(entries) != len(group.cache) or len(entries) != int(np.count_nonzero(group.pool.cached)):
            return f"group {group.index}: {len(group.cache)} keys, {len(entries)} blocks, flags differ"
        for block in group.pool.evictable:
            if block not in entries:
                return f"group {group.index}: block {block} waits for eviction without a key"
    return None


@invariant("S16")
def only_computed_blocks_are_cached(look: Look) -> str | None:
    """A cached block a row holds lies wholly before what that row knows to be computed, or came from the cache."""
    state = look.scheduler.state
    for group in state.kv.groups:
        if not len(group.cache):
            continue
        entries, rows = _entries_and_rows(look, group)
        position = _positions(look, group)
        full = (position + 1) * state.kv.block_size <= state.rows.computed[rows]
        wrong = group.pool.cached[entries] & ~full
        if wrong.any():
            return f"block {int(entries[wrong][0])} is cached before it was computed"
    return None


@invariant("S22", moment=PLANNED)
def no_block_changes_hands_under_a_step(look: Look) -> str | None:
    """What a plan writes is not touched by an earlier step of another row that may still be running."""
    if look.plan is None or not look.in_flight:
        return None
    state = look.scheduler.state
    size, group = state.kv.block_size, state.kv.groups[0]
    for row, start, end in _writes(look):
        blocks = group.table[row, start // size : (end - 1) // size + 1]
        for touched in look.in_flight:
            owner = touched[blocks]
            if ((owner != -1) & (owner != row)).any():
                return f"row {row} writes a block that a step under way still uses"
    return None


@invariant("S26t")
def tenants_never_share_blocks(look: Look) -> str | None:
    state = look.scheduler.state
    if len({request.tenant for request in state.requests.values()}) < 2:
        return None
    for group in state.kv.groups:
        entries, rows = _entries_and_rows(look, group)
        owner = np.full(group.pool.num_blocks, -1, np.int64)
        tenants = state.rows.tenant[rows]
        owner[entries] = tenants
        if (owner[entries] != tenants).any():
            return f"group {group.index}: two tenants hold one block"
    return None


def _live_entries(look: Look, group: LayerGroup):  # type: ignore[no-untyped-def]
    return _entries_and_rows(look, group)[0]


def _entries_and_rows(look: Look, group: LayerGroup):  # type: ignore[no-untyped-def]
    """All (block, row) pairs of a group's live tables, flat."""
    mask = _entry_mask(look, group)
    rows = np.repeat(look.live, mask.sum(axis=1)) if len(look.live) else np.zeros(0, np.int64)
    return group.table[look.live, : mask.shape[1]][mask], rows


def _positions(look: Look, group: LayerGroup):  # type: ignore[no-untyped-def]
    return np.nonzero(_entry_mask(look, group))[1]


def _entry_mask(look: Look, group: LayerGroup):  # type: ignore[no-untyped-def]
    held, first = group.held[look.live], group.first[look.live]
    columns = np.arange(int(held.max(initial=0)))
    return (columns < held[:, None]) & (columns >= first[:, None])


def _writes(look: Look) -> list[tuple[int, int, int]]:
    """(row, first position, end) of every write of the plan just made."""
    assert look.plan is not None
    state = look.scheduler.state
    flight = state.flights[-1]
    rows = state.rows
    decode = np.flatnonzero(flight.mask)
    active = decode[~rows.done[decode]]
    writes = [(row, end - 1, end) for row, end in zip(active.tolist(), rows.upper[active].tolist(), strict=True)]
    writes += [(row, int(rows.upper[row]) - count, int(rows.upper[row])) for row, _, count in flight.spans]
    return writes
