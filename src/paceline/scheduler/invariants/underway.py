"""Invariants of what is under way: nothing a step or a copy still uses is given to another."""

from __future__ import annotations

from itertools import chain

import numpy as np

from paceline.scheduler.invariants.frames import Entries, Frames, in_time
from paceline.scheduler.invariants.pictures import NOBODY, SEVERAL
from paceline.scheduler.invariants.registry import PLANNED, Findings, Look, invariant, sweep


def remember(frames: Frames) -> None:
    """Note which row of each plan touches which block, for the plans that are made while it runs."""
    writes, starts = frames.writes, frames.block_starts
    touched = np.full((len(writes.plans), starts[-1]), NOBODY, np.int64)
    flat = touched.reshape(-1)
    for group, start in zip(frames.groups, starts.tolist(), strict=False):
        entries = Entries(group, writes.picture, writes.row)
        place = entries.block + entries.spread(writes.number * starts[-1] + start)
        flat[place] = entries.row
        flat[place[flat[place] != entries.row]] = SEVERAL
    for planned, mine in zip(writes.plans, touched, strict=True):
        copies = planned.plan.block_copies
        if len(copies.row):
            mine[starts[copies.group] + copies.source] = SEVERAL
        planned.touched = mine


@sweep("S22", moment=PLANNED)
def no_block_changes_hands_under_a_step(frames: Frames) -> Findings:
    """What a plan writes is not touched by an earlier step of another row, nor by a copy, still under way."""
    writes, starts = frames.writes, frames.block_starts
    underway = dict.fromkeys(chain.from_iterable(planned.in_flight for planned in writes.plans))
    if not underway:
        return
    nobody = np.full(starts[-1], NOBODY, np.int64)
    touched = np.array([nobody, *(one.touched for one in underway)])
    place = {one: at for at, one in enumerate(underway, start=1)}
    for lag in range(max(len(planned.in_flight) for planned in writes.plans)):
        behind = [place[p.in_flight[lag]] if lag < len(p.in_flight) else 0 for p in writes.plans]
        at = np.array(behind, np.int64)[writes.number]
        for group, start in zip(frames.groups, starts.tolist(), strict=False):
            for blocks in writes.blocks_of(group, frames.state.kv.block_size):
                owner = touched[at, start + blocks]
                for wrong in in_time(writes.step, (owner != NOBODY) & (owner != writes.row)):
                    what = f"row {writes.row[wrong]} writes a block that a step under way still uses"
                    yield int(writes.step[wrong]), what
    for step, planned in zip(writes.steps, writes.plans, strict=True):
        copies, swaps = planned.plan.block_copies, planned.plan.swap_in
        if not len(copies.row) and not len(swaps.block):
            continue
        fresh = np.concatenate([starts[copies.group] + copies.target, starts[swaps.group] + swaps.block])
        if any(np.count_nonzero(one.touched[fresh] != NOBODY) for one in planned.in_flight):
            yield step, "a copy goes into a block that a step under way still uses"


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
