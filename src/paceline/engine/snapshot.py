"""The state of an engine at one moment: its rows, waiting requests, and every block of its KV cache.

A function of the scheduler's state alone, made from whole columns: a thousand rows cost nearly the same as ten. The
steps of a trace, followed up to the same moment, must give the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.core.counters import LEVELS, LevelUse, MediaUse
from paceline.core.fast import value
from paceline.core.request import RequestState, account_of
from paceline.kv.block_pool import ABSENT
from paceline.scheduler.state import SchedulerState
from paceline.scheduler.waiting_queue import first

MOST_WAITING = 256  # requests of the queue that are shown one by one
FREE, CACHED, HELD, SHARED = range(4)  # what a block is; cached: free, with a prefix that can still be found
# Columns of `rows`, one line per live row in order of their rows.
ROW_COLUMNS = (
    "row",
    "request",
    "num_prompt",
    "num_tokens",
    "computed",
    "limit",
    "preemptions",
    "priority",
    "decoding",
    "padding",
    "blocks",
)


class Waiting(NamedTuple):
    """A request that waits for a row."""

    request: int
    arrival_s: float
    num_tokens: int
    preemptions: int
    priority: int
    is_swapped: bool
    tenant: str


@value
class Snapshot:
    """The state after the newest submitted step."""

    seq: int
    time_s: float
    rows: NDArray[np.int64]  # [columns, live rows], as ROW_COLUMNS names them
    tenants: tuple[str, ...]  # with live rows
    tenant_of: NDArray[np.int64]  # by live row: its place in `tenants`
    left: tuple[int, ...]  # rows left since the newest step was submitted: the next plan says so
    waiting: tuple[Waiting, ...]  # the first of them, in the policy's order
    num_waiting: int
    # By layer group: FREE, CACHED, HELD or SHARED; the null block is left out, and so is what other models have.
    blocks: tuple[NDArray[np.uint8], ...]
    below: tuple[LevelUse, ...]  # levels below the device that have places
    saved: int  # blocks that sharing saves: references beyond the first
    evicted: int  # blocks whose prefix was evicted, since the start
    preempted: int
    swapped: int
    finished: int
    vectors: int  # of these, requests that ended with one
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int  # in all steps so far, padding included
    padding_tokens: int  # of these
    draft_tokens: int  # guessed tokens verified
    accepted_tokens: int  # of these, right
    encoded: int  # pictures
    media: MediaUse  # pages of their vectors


def snapshot_of(state: SchedulerState) -> Snapshot:
    rows = state.rows
    live = np.flatnonzero(rows.live[: rows.high])
    counters = state.counters
    groups = state.kv.groups
    blocks_of = np.sum(
        [group.held[live] - group.first[live] - group.dropped[live] for group in groups], axis=0
    )
    columns = (
        live,
        rows.request_id[live],
        rows.num_prompt[live],
        rows.num_tokens[live],
        rows.computed[live],
        rows.max_len[live],
        rows.preemptions[live],
        rows.priority[live],
        rows.decoding[live],
        rows.padding[live],
        blocks_of,
    )
    tenants, tenant_of = _tenants(state, live)
    return Snapshot(
        seq=state.kv.submitted,
        time_s=state.clock.now(),
        rows=np.stack([np.asarray(column, np.int64) for column in columns]),
        left=tuple(state.leaves),
        tenants=tenants,
        tenant_of=tenant_of,
        waiting=_waiting(state),
        num_waiting=len(state.queue),
        blocks=tuple(_blocks(group.pool.refs, group.pool.cached) for group in groups),
        below=levels_below(state),
        saved=sum(_saved(group.pool.refs) for group in groups),
        evicted=sum(group.pool.num_evicted for group in groups),
        preempted=counters.preempted,
        swapped=counters.swapped,
        finished=counters.finished,
        vectors=counters.vectors,
        prompt_tokens=counters.prompt_tokens,
        cached_tokens=counters.cached_tokens,
        computed_tokens=counters.computed_tokens,
        padding_tokens=counters.padding_tokens,
        draft_tokens=counters.draft_tokens,
        accepted_tokens=counters.accepted_tokens,
        encoded=counters.encoded,
        media=state.encodings.use(),
    )


def levels_below(state: SchedulerState) -> tuple[LevelUse, ...]:
    """Levels below the device that have places."""
    found, counters = [], state.counters
    levels = zip(LEVELS[1:], state.kv.levels[1:], counters.found_tokens[1:], strict=True)
    for name, parts, hits in levels:
        places = sum(part.num_places for part in parts)
        if places:
            held = places - sum(part.num_free for part in parts)
            cached = sum(len(part.cache) for part in parts)
            ways = (f"{name}_out", f"{name}_in")
            stored, loaded = (counters.copied_blocks.get(way, 0) for way in ways)
            failed = sum(counters.failed_copies.get(way, 0) for way in ways)
            is_off = name == LEVELS[-1] and not state.tiers.has_disk
            found.append(LevelUse(name, held, cached, places, hits, stored, loaded, failed, is_off))
    return tuple(found)


def _waiting(state: SchedulerState) -> tuple[Waiting, ...]:
    queue = state.queue
    if not len(queue):
        return ()
    view = queue.view(state.now_s)
    requests = [queue.get(int(index)) for index in first(view, state.policy.order(view), MOST_WAITING)]
    return tuple(
        Waiting(
            request.id,
            request.arrival_s,
            request.num_tokens,
            request.preemptions,
            request.priority,
            request.state is RequestState.SWAPPED,
            account_of(request.tenant),
        )
        for request in requests
    )


def _tenants(state: SchedulerState, live: NDArray[np.int64]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Accounts, and which of them each row belongs to. One request of each tenant gives the name."""
    rows = state.rows
    _, ones, which = np.unique(rows.tenant[live], return_index=True, return_inverse=True)
    found = [rows.requests[row] for row in live[ones].tolist()]
    names = ["" if request is None else account_of(request.tenant) for request in found]
    accounts = {name: place for place, name in enumerate(dict.fromkeys(names))}
    return tuple(accounts), np.array([accounts[name] for name in names], np.int64)[which]


def _saved(refs: NDArray[np.int32]) -> int:
    return int(np.maximum(refs[1:] - 1, 0).sum())


def _blocks(refs: NDArray[np.int32], cached: NDArray[np.bool_]) -> NDArray[np.uint8]:
    held, shared = (refs[1:] > 0).view(np.uint8), (refs[1:] > 1).view(np.uint8)
    kinds = HELD * held + shared + (cached[1:].view(np.uint8) > held) * np.uint8(CACHED)
    here = refs[1:] != ABSENT
    return kinds if here.all() else kinds[here]


def places_here(refs: NDArray[np.int32], blocks: Sequence[int]) -> list[int]:
    """Where these blocks are in `Snapshot.blocks`; those that other models have are in none."""
    if not blocks:
        return []
    here = refs != ABSENT
    found = np.array(blocks, np.int64)
    places: list[int] = (
        np.cumsum(here)[found[here[found]]] - 2
    ).tolist()  # the null block counts and is left out
    return places
