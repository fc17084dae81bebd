"""Invariants of the KV cache: conservation, references, sharing, prefixes."""

from __future__ import annotations

import numpy as np

from paceline.config.engine import MOST_STEPS_AHEAD
from paceline.core.request import RequestState
from paceline.kv.block_pool import ABSENT, NULL_BLOCK
from paceline.scheduler.invariants.half_steps import Frames, first_true, in_time
from paceline.scheduler.invariants.registry import (
    BLOCKS,
    CHANGES,
    PLANNED,
    CheckContext,
    Findings,
    invariant,
    sweep,
)

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
            for parts in blocks.ticket_blocks:
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
