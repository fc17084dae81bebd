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
    i32,
)
from paceline.core.request import NO_ROW, SALT
from paceline.scheduler.state import Join, SchedulerState


def build_spans(spans: dict[int, int]) -> RowSpans:
    """Tokens per row as columns."""
    if not spans:
        return NO_SPANS
    row, num_scheduled = np.array((list(spans), list(spans.values())), np.int32)
    return RowSpans(row=row, num_scheduled=num_scheduled)


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
    if not any(join.request.stretches for join in joins):
        return ()
    numbers = [state.encodings.numbers(join.request) for join in joins]
    return tuple(
        tuple([(stretch.start, stretch.end, known[stretch.item]) for stretch in join.request.stretches])
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
