"""Invariants of the KV cache: conservation, references, sharing, prefixes, pins, and the levels below the device. Of
placed texts: each slot is written once, out of the right blocks, for the place it has."""

from __future__ import annotations

from collections import Counter

import numpy as np

from paceline.config.engine import MOST_STEPS_AHEAD
from paceline.core.events import Rule
from paceline.core.plan import Placements, StepPlan
from paceline.core.request import ModuleRef, RequestState
from paceline.kv.block_pool import ABSENT, NULL_BLOCK
from paceline.kv.reuse import REMEMBERED_TIMES
from paceline.kv.swap import Ticket
from paceline.kv.tiers import DISK
from paceline.scheduler.invariants.half_steps import Frames, first_true, in_time
from paceline.scheduler.invariants.registry import (
    BLOCKS,
    CHANGES,
    HOST,
    PLANNED,
    CheckContext,
    Findings,
    invariant,
    sweep,
)
from paceline.scheduler.loading import FREES_DEVICE
from paceline.scheduler.modules import Body
from paceline.scheduler.state import SchedulerState

SLACK_S = 1e-6  # times are whole microseconds
_MAY_HAVE_PLACES = (RequestState.SWAPPED, RequestState.PAUSED)
_MAY_HAVE_A_ROW = (RequestState.RUNNING, RequestState.BLOCKED)


@sweep("S1", moment=BLOCKS)
def every_block_is_free_or_live(frames: Frames) -> Findings:
    for group in frames.groups:
        live = np.add.reduce(group.refs != 0, axis=1, dtype=np.int64)  # or with another model
        free = np.array([picture.num_free for picture in group.pictures])
        wrong = first_true(free + live != group.num_blocks)
        if wrong is not None:
            counted = f"{free[wrong]} free + {live[wrong]} live blocks are not {group.num_blocks}"
            yield int(frames.step_of[wrong]), f"group {group.group.index}: {counted}"


@sweep("S3", moment=BLOCKS)
def the_free_list_has_each_free_block_once(frames: Frames) -> Findings:
    for group in frames.groups:
        refs = group.refs.reshape(-1)
        is_free = np.zeros(len(refs), np.bool_)
        is_free[group.free] = True
        differ = is_free != (refs == 0)  # S2: free exactly when no table holds it
        if not np.count_nonzero(differ) and np.count_nonzero(is_free) == len(group.free):
            continue
        times = np.bincount(group.free, minlength=len(refs))
        wrong = first_true(differ | (times > 1))
        if wrong is not None:
            picture, block = group.at(wrong)
            says = f"is free {times[wrong]} times and has {refs[wrong]} references"
            yield int(frames.step_of[picture]), f"block {block} {says}"


@sweep("S4", moment=BLOCKS)
def references_are_what_holds_blocks(frames: Frames) -> Findings:
    for group in frames.groups:
        index = group.group.index
        others, at = [], []  # what holds blocks beside the tables, and in which picture
        for picture, blocks in enumerate(frames.blocks):
            for fence in blocks.picture.fences:
                if fence.group == index:
                    others.append(fence.blocks)
                    at.append(picture)
            for parts in blocks.other_blocks:
                others.append(parts[index])
                at.append(picture)
        too_many = group.holders - group.refs
        if others:
            begin = np.repeat(np.array(at) * group.num_blocks, [len(blocks) for blocks in others])
            np.add.at(too_many.reshape(-1), np.concatenate(others) + begin, 1)
        too_many[:, NULL_BLOCK] = group.refs[:, NULL_BLOCK] != 1  # whatever holds it
        too_many[group.refs == ABSENT] = 0  # M2
        wrong = first_true(too_many)
        if wrong is not None:
            picture, block = group.at(wrong)
            refs = int(group.refs[picture, block])
            says = f"has {refs} references, {refs + int(too_many[picture, block])} holders"
            yield int(frames.step_of[picture]), f"group {index}: block {block} {says}"


@sweep("M2", moment=BLOCKS)
def no_block_of_a_slab_that_left_is_held(frames: Frames) -> Findings:
    for group in frames.groups:
        is_absent = group.refs == ABSENT
        if not np.count_nonzero(is_absent):
            continue
        wrong = first_true(is_absent & ((group.holders > 0) | group.cached))
        if wrong is not None:
            picture, block = group.at(wrong)
            yield (
                int(frames.step_of[picture]),
                f"block {block} belongs to another model and is in a table here, or cached",
            )


@sweep("S5", moment=BLOCKS)
def no_row_holds_a_block_twice(frames: Frames) -> Findings:
    for group in frames.groups:
        entries, shared = group.entries, group.shared
        pairs = np.sort(entries.cell[shared] * frames.num_rows + entries.row[shared])
        wrong = first_true(pairs[1:] == pairs[:-1])
        if wrong is not None:
            picture = int(pairs[wrong]) // (frames.num_rows * group.num_blocks)
            yield int(frames.step_of[picture]), f"group {group.group.index}: a row holds a block twice"


@sweep("S8", moment=PLANNED)
def tables_cover_what_is_computed(frames: Frames) -> Findings:
    state, at = frames.state, frames.scheduled
    size = state.kv.block_size
    scheduled, live = frames.counts["scheduled"][at], frames.flags["live"][at]
    for group in frames.groups:
        held = group.held[frames.picture_of[at]]
        wrong = first_true((held * size < scheduled) & live)
        if wrong is not None:
            place, row = divmod(wrong, frames.num_rows)
            yield int(at[place]), f"row {row}: its table is too short"
        if state.mode.keeps_finished:
            continue
        # A block that was meant for drafts stays for the tokens that come instead.
        meant = 0 if state.drafts is None else state.drafts.width * (MOST_STEPS_AHEAD + 1)
        wrong = first_true(((held - 1) * size > scheduled + meant) & live)
        if wrong is not None:
            yield int(at[wrong // frames.num_rows]), "a row holds blocks beyond what it computes"


@sweep("S6", moment=PLANNED)
def nothing_is_written_where_others_read(frames: Frames) -> Findings:
    """Others may hold the block a row writes only if they see none of the positions written."""
    writes = frames.writes
    scheduled = frames.counts["scheduled"]
    for group in frames.groups:
        # A prompt's blocks between its first and last are new, or S7 would see them.
        written = writes.blocks_of(group, frames.state.kv.block_size)
        alone = [(group.holders[writes.picture, blocks] == 1) & (blocks != NULL_BLOCK) for blocks in written]
        for at in in_time(writes.step, ~(alone[0] & alone[1])):
            step, row, start = int(writes.step[at]), int(writes.row[at]), int(writes.start[at])
            for block in (int(blocks[at]) for blocks in written):
                others = [other for other in group.rows_with(writes.picture[at], block) if other != row]
                if block == NULL_BLOCK or any(scheduled[step, other] > start for other in others):
                    what = f"writes tokens {start} to {writes.end[at]} where rows {others} read"
                    yield step, f"row {row} {what}"


@invariant("S10", moment=CHANGES)
def requests_without_a_row_own_nothing(context: CheckContext) -> str | None:
    for request in context.scheduler.state.requests.values():
        if request.host_places and request.state not in _MAY_HAVE_PLACES:
            return f"request {request.id} is {request.state.value} and keeps host places"
        if request.row >= 0 and request.state not in _MAY_HAVE_A_ROW:
            return f"request {request.id} is {request.state.value} and has row {request.row}"
    return None


@sweep("S10", moment=BLOCKS)
def rows_not_in_use_hold_nothing(frames: Frames) -> Findings:
    for group in frames.groups:
        held = group.held.astype(np.bool_)
        held[group.live] = False
        wrong = first_true(held)
        if wrong is not None:
            step = int(frames.step_of[wrong // frames.num_rows])
            yield step, f"group {group.group.index}: a row that is not in use holds blocks"


@sweep("S10", moment=BLOCKS)
def promised_blocks_are_there(frames: Frames) -> Findings:
    for group in frames.groups:
        for at, picture in enumerate(group.pictures):
            if picture.reserved > picture.num_free:
                promise = f"{picture.reserved} blocks are promised, {picture.num_free} are free"
                yield int(frames.step_of[at]), f"group {group.group.index}: {promise}"


@sweep("S15", moment=BLOCKS)
def the_cache_and_its_blocks_agree(frames: Frames) -> Findings:
    for group in frames.groups:
        for at, (picture, lists) in enumerate(zip(group.pictures, group.lists, strict=True)):
            if picture.num_keys != len(lists.entries):
                counted = f"{picture.num_keys} keys, {len(lists.entries)} blocks"
                yield int(frames.step_of[at]), f"group {group.group.index}: {counted}"
        wrong = first_true(group.keyed != group.cached)
        if wrong is not None:
            picture_at, block = group.at(wrong)
            yield int(frames.step_of[picture_at]), f"block {block} has a key or a flag, and not the other"
        wrong = first_true(~group.keyed.reshape(-1)[group.evictable])
        if wrong is not None:
            step = int(frames.step_of[group.at(int(group.evictable[wrong]))[0]])
            yield step, f"group {group.group.index}: a block waits for eviction without a key"


@sweep("S16", moment=BLOCKS)
def only_computed_blocks_are_cached(frames: Frames) -> Findings:
    """Of the rows that hold a cached block, at least one knows that all of it has been computed."""
    computed = frames.counts["computed"] // frames.state.kv.block_size  # full blocks
    for group in frames.groups:
        entries = group.entries
        behind = entries.index >= entries.spread(computed[frames.step_of[group.live[0]], group.live[1]])
        wrong = behind & group.cached.reshape(-1)[entries.cell]
        if not np.count_nonzero(wrong):
            continue
        known = np.zeros(group.cached.size, np.bool_)
        known[entries.cell[~behind]] = True
        at = first_true(wrong & ~known[entries.cell])
        if at is not None:
            step = int(frames.step_of[entries.picture[at]])
            yield step, f"block {entries.block[at]} is cached before it was computed"


@invariant("D1")
def dropped_rows_hold_what_they_see(context: CheckContext) -> str | None:
    """A row that drops tokens has no blocks for those its next token does not see, all others, and offers none that it
    computed without seeing everything."""
    state = context.scheduler.state
    kv, rows, size = state.kv, state.rows, state.kv.block_size
    for row, (kept, num_prompt) in kv.keeping.items():
        start, scheduled = kept.start(size), int(rows.scheduled[row])
        ends = {kept.end(position, num_prompt, size) for position in (scheduled - 1, scheduled)}
        for group in kv.groups:
            end = start + int(group.dropped[row])
            table = group.table[row, : group.held[row]]
            if (
                end not in ends
                or np.count_nonzero(table) != len(table) - end + start
                or table[start:end].any()
            ):
                return f"row {row} has dropped blocks {start} to {end} before token {scheduled}: {table}"
            computed = table[kept.sees_all(num_prompt, size) // size :]
            if end > start and group.pool.cached[computed].any():
                return f"row {row} offers blocks that it computed without seeing everything"
    return None


@sweep("S26t", moment=BLOCKS)
def tenants_never_share_blocks(frames: Frames) -> Findings:
    tenant = frames.counts["tenant"]
    for group in frames.groups:
        entries, shared = group.entries, group.shared
        cell, picture = entries.cell[shared], entries.picture[shared]
        tenants = tenant[frames.step_of[picture], entries.row[shared]]
        owner = np.empty(group.cached.size, np.int64)
        owner[cell] = tenants
        wrong = first_true(owner[cell] != tenants)
        if wrong is not None:
            step = int(frames.step_of[picture[wrong]])
            yield step, f"group {group.group.index}: two tenants hold one block"


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
            cached = set(part.cache.blocks())
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


@invariant("K1")
def pins_are_within_their_limits(context: CheckContext) -> str | None:
    """Together and for each tenant, and beside what was promised to rows; what is counted is what pins have."""
    pins, kv = context.scheduler.state.kv.pins, context.scheduler.state.kv
    if not pins:
        left = [group.pinned for group in kv.groups]
        return f"{left} blocks are counted as pinned, and there is no pin" if any(left) else None
    for tenant, users in pins.users().items():
        counted = Counter(name for pin in pins if pin.tenant == tenant for name in pin.names)
        if counted != users:
            return f"pins of {tenant} have {len(counted)} blocks, {len(users)} are counted"
        if len(users) > pins.most_of_tenant:
            return f"{len(users)} blocks are pinned for {tenant}, and it may have {pins.most_of_tenant}"
    for group in kv.groups:
        held = len(pins.held(group.index))
        if held != group.pinned or held > pins.most:
            return f"{held} blocks are pinned, {group.pinned} are counted and {pins.most} allowed"
    return None


@invariant("K2")
def a_pinned_block_is_never_evicted(context: CheckContext) -> str | None:
    """Each name of a pin stands for a block that can be hit and is held, in every group without a window."""
    kv = context.scheduler.state.kv
    for group in kv.groups if kv.pins else ():
        entries = kv.pins.entries(group.index)
        for name, block in entries.items():
            if group.cache.named(name) != block or not group.pool.refs[block]:
                return f"block {block} is pinned, has {group.pool.refs[block]} references and cannot be hit"
        for pin in kv.pins if group.window is None else ():
            if not all(name in entries for name in pin.names):
                return f"the pin {pin.name} of {pin.tenant} has lost a block"
    return None


@invariant("K3")
def each_pin_is_of_one_tenant(context: CheckContext) -> str | None:
    """No block is pinned for two tenants."""
    owner: dict[bytes, str] = {}
    for tenant, users in context.scheduler.state.kv.pins.users().items():
        for name in users:
            if owner.setdefault(name, tenant) != tenant:
                return f"a block is pinned for {tenant} and for {owner[name]}"
    return None


@invariant("K5", moment=PLANNED)
def a_placed_slot_is_written_once_from_its_module(context: CheckContext) -> str | None:
    """Rows hold the modules that they are still to place. What a plan computes and places of a row follows on one
    another; what it places is a body of the row, with the shift of its place, out of blocks that stay as they are."""
    state = context.scheduler.state
    for row, bodies in state.modules.rows.items():
        for body in bodies:
            if body.end > state.rows.scheduled[row] and (wrong := _wrong_sources(state, row, body)):
                return wrong
    for flight in state.flights:
        for group, blocks in zip(state.kv.groups, flight.sources, strict=False):
            if (group.pool.refs[blocks] < 1).any():
                return f"step {flight.seq} copies out of a block that no row and no fence holds"
    plan = context.plan
    return None if plan is None or not plan.work.placed_tokens else _wrong_plan(state, plan)


def _wrong_sources(state: SchedulerState, row: int, body: Body) -> str | None:
    module, held = _module(state, row, body), state.kv.sources.rows.get(row, {}).get(body.stretch.item)
    if held is None or any(len(blocks) != len(module.keys) for blocks in held):
        return f"row {row} does not hold the module that it is to place at token {body.start}"
    for group, blocks in zip(state.kv.groups, held, strict=True):
        for key, block in zip(module.keys, blocks.tolist(), strict=True):
            is_other = group.pool.cached[block] and group.cache.key_of(block).key != key.key
            if is_other or not group.pool.refs[block]:
                return f"row {row} holds block {block}, which is not of the module that it is to place"
    return None


def _wrong_plan(state: SchedulerState, plan: StepPlan) -> str | None:
    placements, size = plan.placements, state.kv.block_size
    for at, row in enumerate(placements.row.tolist()):
        start, count = placements.start.item(at), placements.count.item(at)
        body = next((b for b in state.modules.rows[row] if b.start <= start and start + count <= b.end), None)
        if body is None or count < 1:
            return f"tokens {start} to {start + count} of row {row} are placed, and are no part of a body"
        if placements.shift.item(at) != body.stretch.start:
            return f"token {start} of row {row} is shifted by {placements.shift.item(at)}, not {body.stretch.start}"
        first = start - body.stretch.start
        if placements.first.item(at) != first % size or _blocks(placements, at, size) < 1:
            return f"token {start} of row {row} is copied from place {placements.first.item(at)} of a block"
    for row in [row for row, _, _ in state.flights[-1].spans if row in state.modules.rows]:
        if (wrong := _wrong_runs(state, plan, row)) is not None:
            return wrong
    return None


def _wrong_runs(state: SchedulerState, plan: StepPlan, row: int) -> str | None:
    """What is computed and placed of a row follows on one another, and ends where the row is."""
    spans, placements = plan.spans, plan.placements
    mine = (placements.row == row) & (placements.group == 0)
    runs = list(zip(placements.start[mine].tolist(), placements.count[mine].tolist(), strict=True))
    mine = spans.row == row
    runs += list(zip(spans.start[mine].tolist(), spans.num_scheduled[mine].tolist(), strict=True))
    runs.sort()
    advance = next(count for each, _, count in state.flights[-1].spans if each == row)
    at = int(state.rows.scheduled[row]) - advance
    for start, count in runs:
        if start != at:
            return f"row {row} stands at token {at}, and the next run of its tokens begins at {start}"
        at += count
    return (
        None
        if at == state.rows.scheduled[row]
        else f"row {row} is at {state.rows.scheduled[row]}, its runs end at {at}"
    )


def _module(state: SchedulerState, row: int, body: Body) -> ModuleRef:
    request = state.rows.requests[row]
    assert request is not None
    return request.modules[body.stretch.item]


def _blocks(placements: Placements, at: int, size: int) -> int:
    """How many blocks a run has, beyond those that it needs: 1, or fewer where some are lacking."""
    ends = np.append(placements.offset[1:], len(placements.blocks))
    needed = -(-(placements.first.item(at) + placements.count.item(at)) // size)
    return int(ends[at] - placements.offset[at]) - needed + 1
