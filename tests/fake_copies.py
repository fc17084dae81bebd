"""What the runner without a model does with placed texts: it copies numbers, and turns them by the distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.plan import Placements, StepPlan
from paceline.scheduler.invariants import InvariantViolation
from tests.reference_output import turned


class PlacedRow(Protocol):
    """What of a row is needed here."""

    computed: int
    hashes: list[int]  # what the KV of its tokens must hold
    jumps: dict[int, int]  # first tokens that this step places, and where they end
    tables: list[list[int]]
    changed: bool


def copy_placed(
    placements: Placements, rows: Sequence[PlacedRow], kv: Sequence[list[list[int]]], size: int
) -> None:
    """K5: what is copied is what the module holds there, turned by the distance."""
    columns = (placements.row, placements.group, placements.start, placements.count)
    more = (placements.shift, placements.first, placements.offset)
    for number, group, start, count, shift, first, offset in zip(
        *(column.tolist() for column in (*columns, *more)), strict=True
    ):
        row, memory = rows[number], kv[group]
        for at in range(count):
            block, slot = divmod(first + at, size)
            value = turned(memory[int(placements.blocks[offset + block])][slot], shift)
            if value != row.hashes[start + at]:
                raise InvariantViolation("K5", f"row {number} is placed something else at token {start + at}")
            index, slot = divmod(start + at, size)
            memory[row.tables[group][index]][slot] = value
        row.jumps[start] = start + count
        row.changed = True


def starts_of(plan: StepPlan, work: Sequence[tuple[int, int]], rows: Sequence[PlacedRow]) -> dict[int, int]:
    """Where the runs of rows begin that are placed some of their tokens, by place in `work`: rows and how many tokens
    they compute, the spans of the plan last."""
    if not len(plan.placements.row):
        return {}
    stand = {number: rows[number].computed for number in plan.placements.row.tolist()}
    starts = {}
    for place, start in enumerate(plan.spans.start.tolist(), len(work) - len(plan.spans.row)):
        number, count = work[place]
        at = rows[number].computed
        if number in stand:
            at = starts[place] = _behind_jumps(rows[number], stand[number])
            stand[number] = at + count
        if start != at:
            raise InvariantViolation("K5", f"row {number} computes from token {start} on, and stands at {at}")
    return starts


def end_jumps(placements: Placements, rows: Sequence[PlacedRow]) -> None:
    """The step is done: rows stand behind what was placed last."""
    for number in set(placements.row.tolist()):
        rows[number].computed = _behind_jumps(rows[number], rows[number].computed)
        rows[number].jumps.clear()


def _behind_jumps(row: PlacedRow, at: int) -> int:
    """Where a row stands that stood at a token, and was placed what follows."""
    while at in row.jumps:
        at = row.jumps[at]
    return at
