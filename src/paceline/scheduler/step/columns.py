"""What a plan says about rows that start and rows that compute known tokens, as columns.

Decides nothing: the composer or the snapshot that makes the plan has decided by now.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import (
    EMPTY,
    NO_JOINS,
    NO_ROW_COPIES,
    NO_SPANS,
    NO_TEXTS,
    SAME_ROWS,
    RowCopies,
    RowJoins,
    RowSet,
    RowSpans,
    StepPlan,
    i32,
)
from paceline.core.request import NO_ROW, SALT
from paceline.core.stretch import StretchKind
from paceline.scheduler.encodings import Group
from paceline.scheduler.state import Flight, Join, SchedulerState
from paceline.scheduler.step.admission import Jumps, Mask, StepDraft

MEDIA = StretchKind.MEDIA


def build_spans(state: SchedulerState, spans: dict[int, int], jumps: Jumps) -> RowSpans:
    """Tokens per row as columns. `jumps`: what rows have placed between them, as first tokens and how many."""
    if not spans:
        return NO_SPANS
    if not jumps:
        row, num_scheduled = np.array((list(spans), list(spans.values())), np.int32)
        return RowSpans(row=row, num_scheduled=num_scheduled)
    entries = []
    for each, count in spans.items():
        placed = jumps.get(each, ())
        end = state.rows.scheduled.item(each)
        at = end - count - sum([length for _, length in placed])
        for start, length in (*placed, (end, 0)):
            if start > at:
                entries.append((each, start - at, at))
            at = start + length
    if not entries:
        return NO_SPANS
    row, num_scheduled, first = np.array(entries, np.int32).T.copy()
    return RowSpans(row=row, num_scheduled=num_scheduled, start=first)


def build_joins(state: SchedulerState, joins: list[Join]) -> tuple[RowJoins, RowCopies]:
    """The joins of a plan as columns, and the row copies of those that are forks."""
    if not joins:
        return NO_JOINS, NO_ROW_COPIES
    rows = state.rows
    at = np.array([join.row for join in joins], np.int64)
    forks = [join for join in joins if join.source != NO_ROW]
    joined = RowJoins(
        row=at.astype(np.int32),
        generation=rows.generation[at],
        num_prompt=rows.num_prompt[at].astype(np.int32),
        num_tokens=rows.num_known[at].astype(np.int32),
        num_computed=rows.computed[at].astype(np.int32),
        limit=rows.max_len[at].astype(np.int32),
        pad=rows.pad[at].astype(np.int32),
        model=np.array([join.request.model for join in joins], np.int32),
        adapter=np.array([join.request.adapter for join in joins], np.int32),
        media=_media_of(state, joins) if state.encodings.rows else (),
        texts=NO_TEXTS if state.drafts is None else _texts_of(joins, state.cache_resets),
        sampling=tuple([join.request.sampling for join in joins]),
        tokens=tuple([join.request.tokens if join.source == NO_ROW else EMPTY for join in joins]),
    )
    if not forks:
        return joined, NO_ROW_COPIES
    copies = RowCopies(
        source=i32(join.source for join in forks),
        target=i32(join.row for join in forks),
        num_tokens=i32(join.request.num_tokens for join in forks),
    )
    return joined, copies


def _media_of(state: SchedulerState, joins: list[Join]) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Of each row that joins, where its items stand and their numbers."""
    if not any(join.request.media for join in joins):
        return ()
    numbers = [state.encodings.numbers(join.request) for join in joins]
    return tuple(
        tuple(
            [(start, end, known[item]) for start, end, kind, item in join.request.stretches if kind is MEDIA]
        )
        for join, known in zip(joins, numbers, strict=True)
    )


def _texts_of(joins: list[Join], era: int) -> NDArray[np.int64]:
    """A number for each tenant and salt, the same in every process, that no two are likely to share, nor one tenant
    before and after a reset."""
    names = [f"{join.request.tenant}{SALT}{era}".encode("utf-8", "surrogatepass") for join in joins]
    digests = [hashlib.blake2b(name, digest_size=7).digest() for name in names]
    return np.array([int.from_bytes(digest, "little") for digest in digests], np.int64)


def row_changes(last: NDArray[np.bool_], mask: NDArray[np.bool_], leaves: list[int]) -> RowSet:
    """The decode rows `mask` as a change against those of the last plan."""
    if not leaves and mask.tobytes() == last.tobytes():
        return SAME_ROWS
    if len(last) < len(mask):
        last = np.concatenate([last, np.zeros(len(mask) - len(last), np.bool_)])
    if leaves:  # leaving takes a row out of the runner's set, whatever joins it next
        last = last.copy()
        last[leaves] = False
    changed = mask != last
    return RowSet(
        added=(changed & mask).nonzero()[0].astype(np.int32),
        removed=(changed & last).nonzero()[0].astype(np.int32),
    )


def decode_context(state: SchedulerState, draft: StepDraft, mask: Mask, advancing: int) -> int:
    """Tokens of KV that the decoding rows read."""
    if draft.first is None or state.drafts is None:
        return int(np.dot(state.rows.scheduled[: len(mask)], mask))
    ahead = 1.0 + state.drafts.right * len(state.flights)  # drafts under way are right as often as lately
    return int(np.dot(draft.first, mask)) + int(ahead * advancing)


def flight_of(
    state: SchedulerState, draft: StepDraft, plan: StepPlan, group: Group | None, filling: Mask | None
) -> Flight:
    """What is to be known of a plan when its result comes."""
    rows = state.rows
    return Flight(
        seq=plan.seq,
        mask=draft.advancing,
        spans=tuple([(row, rows.generation.item(row), count) for row, count in draft.advances().items()]),
        group=group,
        at_length=draft.at_length,
        budget=draft.budget,
        work=plan.work,
        pads=() if filling is None else tuple(draft.pads.items()),
        filling=filling,
        width=draft.draft_width,
        room=draft.draft_tokens,
        first=draft.first,
        sources=_sources_of(plan, len(state.kv.groups)) if draft.jumps else (),
    )


def _sources_of(plan: StepPlan, num_groups: int) -> tuple[NDArray[np.int64], ...]:
    """The blocks that a plan copies placed tokens from, by group."""
    placements = plan.placements
    lengths = np.diff(np.append(placements.offset, len(placements.blocks)))
    group = placements.group.repeat(lengths)
    return tuple([placements.blocks[group == each].astype(np.int64) for each in range(num_groups)])
