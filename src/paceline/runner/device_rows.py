"""The device's side of the row table: tokens, counters and block tables of every row.

Plans change it, in the order a plan prescribes; a step's sampling advances it. It never sees a request: a row is a
number with a generation. On the CPU these are numpy arrays.

A step's tokens are flat: which rows take part with how many, and where each token stands and is stored, computed once
per step over arrays. Rows that have ended but are still planned, and the padding of padded modes, are computed like any
other token and store nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.engine import EngineConfig
from paceline.config.sized import Capacity
from paceline.core.adapter import NO_ADAPTER
from paceline.core.plan import BlockAppends, BlockCopies, Placements, RowCopies, RowJoins, StepPlan

Index = NDArray[np.int64]


class DeviceRows:
    """Columns of all rows, as the runner knows them."""

    def __init__(self, config: EngineConfig) -> None:
        capacity = Capacity.of(config)
        num_rows = capacity.num_rows
        self.tokens: Index = np.zeros((num_rows, config.scheduler.max_model_len + 1), np.int64)
        self.generation: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.num_prompt: Index = np.zeros(num_rows, np.int64)
        self.num_tokens: Index = np.zeros(num_rows, np.int64)
        self.computed: Index = np.zeros(num_rows, np.int64)
        self.limit: Index = np.zeros(num_rows, np.int64)
        self.texts: Index = np.zeros(num_rows, np.int64)  # see RowJoins
        self.adapter: Index = np.zeros(num_rows, np.int64)
        self.dropped: Index = np.zeros(num_rows, np.int64)  # tokens that its tables have no entries for
        self.second_at: Index = np.zeros(num_rows, np.int64)  # of rows that pool; see PoolingParams
        self.ended = np.zeros(num_rows, np.bool_)  # has its last token; the host may not know yet
        self.decoding = np.zeros(num_rows, np.bool_)
        # Of rows with pictures: where each begins and ends in the row, and its number.
        self.media: dict[int, tuple[tuple[int, int, int], ...]] = {}
        self.prompt_logprobs: Index = np.full(num_rows, -2, np.int64)  # -2: not asked for
        # One row more than there are: padding reads the null block, and stores nothing.
        self.tables: list[Index] = [
            np.zeros((num_rows + 1, capacity.max_blocks_per_row), np.int64) for _ in config.kv.groups
        ]

    def apply(self, plan: StepPlan) -> None:
        """Leaves, joins, row copies and block appends of a plan."""
        self.decoding[plan.leaves] = False
        if self.media:  # what steps of text alone ask before they look at any row
            for row in plan.leaves.tolist():
                self.media.pop(row, None)
        if len(plan.joins.row):
            self._join(plan.joins)
            self._copy_rows(plan.row_copies)
        self.dropped[plan.drops.row] = plan.drops.num_tokens
        change = plan.decode_rows
        self.decoding[change.removed] = False
        self.decoding[change.added] = True
        self.set_blocks(plan.new_blocks, plan.new_blocks.block)

    def set_blocks(self, places: BlockAppends | BlockCopies, blocks: NDArray[np.int32]) -> None:
        for group, table in enumerate(self.tables):
            mine = places.group == group
            table[places.row[mine], places.index[mine]] = blocks[mine]

    def slots(self, owner: Index, places: Index, block_size: int) -> tuple[Index, ...]:
        """Where the tokens of rows are stored, by layer group. A place is a position less what the row has dropped."""
        return tuple(
            table[owner, places // block_size] * block_size + places % block_size for table in self.tables
        )

    def place(self, placements: Placements, block_size: int) -> Iterator[tuple[int, Index, Index, int]]:
        """Of each run that is placed its layer group, the slots it comes from and goes to, and how far keys turn."""
        runs = zip(
            *(getattr(placements, name).tolist() for name in ("row", "group", "start", "count")),
            *(getattr(placements, name).tolist() for name in ("shift", "first", "offset")),
            strict=True,
        )
        for row, group, start, count, shift, first, offset in runs:
            old, new = np.arange(first, first + count), np.arange(start, start + count)
            source = placements.blocks[offset + old // block_size].astype(np.int64) * block_size
            target = self.tables[group][row, new // block_size] * block_size
            yield group, source + old % block_size, target + new % block_size, shift

    def adapters_of(self, batch: FlatBatch) -> Index | None:
        """The adapter of each token of a batch; None where no token has one."""
        numbers = self.adapter[batch.rows]
        if not numbers.any():
            return None
        # A row that has ended may have an adapter that is gone; padding belongs to no row.
        of_rows = np.where(batch.masked, NO_ADAPTER, numbers)
        return np.append(of_rows, NO_ADAPTER)[batch.row_of] if of_rows.any() else None

    def _join(self, joins: RowJoins) -> None:
        at = joins.row
        self.generation[at] = joins.generation
        self.num_prompt[at] = joins.num_prompt
        self.num_tokens[at] = joins.num_tokens
        self.computed[at] = joins.num_computed
        self.limit[at] = joins.limit
        self.adapter[at] = joins.adapter if len(joins.adapter) else NO_ADAPTER
        if len(joins.texts):
            self.texts[at] = joins.texts
        self.dropped[at] = 0
        self.ended[at] = self.decoding[at] = False
        for table in self.tables:
            table[at] = 0
        if self.media or joins.media:
            for row, media in zip(at.tolist(), joins.media or ((),) * len(at), strict=True):
                self.media.pop(row, None)
                if media:
                    self.media[row] = media
        for row, tokens, sampling in zip(at.tolist(), joins.tokens, joins.sampling, strict=True):
            self.tokens[row, : len(tokens)] = tokens
            wanted = sampling.prompt_logprobs
            self.prompt_logprobs[row] = -2 if wanted is None else wanted

    def _copy_rows(self, copies: RowCopies) -> None:
        columns = (copies.source.tolist(), copies.target.tolist(), copies.num_tokens.tolist())
        for source, target, count in zip(*columns, strict=True):
            self.tokens[target, :count] = self.tokens[source, :count]


NOWHERE = -1  # slot of a token whose keys and values are not stored


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlatBatch:
    """`rows`, `start`, `count` speak of rows; `tokens`, `positions`, `row_of` of tokens, row by row."""

    # Decoding rows first, then spans, of which a row may have several; padding is not among them.
    rows: Index
    start: Index  # position of a row's first token in this step
    count: Index
    masked: NDArray[np.bool_]  # ended: nothing of it counts
    tokens: Index
    positions: Index
    places: Index  # of tokens in their rows' tables: positions less what a row has dropped
    lengths: Index  # of a token's sequence when it was first computed
    row_of: Index  # index into `rows`; len(rows) for padding
    slots: tuple[Index, ...]  # per layer group, flat

    @property
    def last(self) -> Index:
        """Index of each row's last token."""
        last: Index = np.cumsum(self.count) - 1
        return last


class Drafts(NamedTuple):
    """Guesses of a step."""

    tokens: Index  # [decoding rows, width]
    number: Index  # of each row
    predicted: Index | None = None  # of these, from the prediction of the row's request; None: none


def make_batch(rows: DeviceRows, plan: StepPlan, block_size: int, drafts: Drafts | None = None) -> FlatBatch:
    """The batch of a plan that has been applied to `rows`; `drafts` are written behind the last token of
    each row, and stay there until others come."""
    decode = np.flatnonzero(rows.decoding)
    at = np.concatenate([decode, plan.spans.row])
    masked = rows.ended[at]
    start = np.where(masked, 0, rows.computed[at])
    if len(plan.spans.start):
        start[len(decode) :] = np.where(masked[len(decode) :], 0, plan.spans.start)
    count = np.ones(len(at), np.int64)
    count[len(decode) :] = plan.spans.num_scheduled
    if drafts is not None:
        guesses, number = drafts.tokens, drafts.number
        owner, place = (np.arange(guesses.shape[1]) < number[:, None]).nonzero()
        rows.tokens[decode[owner], rows.num_tokens[decode[owner]] + place] = guesses[owner, place]
        count[: len(decode)] += number
    row_of = np.repeat(np.arange(len(at)), count)
    first = np.cumsum(count) - count
    positions = start[row_of] + np.arange(len(row_of)) - first[row_of]
    owner = at[row_of]
    stored = ~masked[row_of]
    places = positions - np.where(stored, rows.dropped[owner], 0)
    slots = tuple(np.where(stored, slot, NOWHERE) for slot in rows.slots(owner, places, block_size))
    tokens = rows.tokens[owner, positions]
    lengths = np.maximum(positions + 1, rows.num_prompt[owner])
    if plan.pad_tokens:  # computed for real, never read
        pad = np.zeros(plan.pad_tokens, np.int64)
        tokens, positions = np.concatenate([tokens, pad]), np.concatenate([positions, pad])
        places = np.concatenate([places, pad])
        lengths = np.concatenate([lengths, pad + 1])
        row_of = np.concatenate([row_of, pad + len(at)])
        slots = tuple(np.concatenate([slot, pad + NOWHERE]) for slot in slots)
    return FlatBatch(
        rows=at,
        start=start,
        count=count,
        masked=masked,
        tokens=tokens,
        positions=positions,
        places=places,
        lengths=lengths,
        row_of=row_of,
        slots=slots,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The tokens of a batch behind which a token is drawn: its last, and of a row with drafts those before them too.
    Row by row, in order."""

    token: Index  # index into the batch's tokens
    row: Index  # index into the batch's rows
    firsts: Index  # the first place of each row
    depth: Index | int  # drafts of the row up to it
    has_next: NDArray[np.bool_] | None  # a draft follows; None: nowhere

    @classmethod
    def of(cls, batch: FlatBatch, due: Index, verified: Index | None) -> Places:
        if verified is None:
            return cls(batch.last[due], due, np.arange(len(due)), 0, None)
        sizes = verified[due] + 1
        firsts: Index = np.cumsum(sizes) - sizes
        row = np.repeat(due, sizes)
        depth = np.arange(len(row)) - np.repeat(firsts, sizes)
        return cls(batch.last[row] - verified[row] + depth, row, firsts, depth, depth < verified[row])


def count_computed(rows: DeviceRows, batch: FlatBatch, placements: Placements) -> None:
    """Rows have computed up to the end of their last entry, or of what was placed behind it."""
    at = batch.rows
    rows.computed[at] = np.where(batch.masked, rows.computed[at], batch.start + batch.count)
    if len(placements.row):
        np.maximum.at(rows.computed, placements.row, placements.start + placements.count)


def last_entries(at: Index, finite: NDArray[np.bool_]) -> Index:
    """Of a batch in which rows have several entries the last one of each, which speaks for all of them from here on."""
    rows, inverse = np.unique(at, return_inverse=True)
    is_good = np.ones(len(rows), np.bool_)
    np.logical_and.at(is_good, inverse, finite)
    finite &= is_good[inverse]
    last: Index = np.zeros(len(rows), np.int64)
    np.maximum.at(last, inverse, np.arange(len(at)))
    return np.sort(last)


def one_token_each(
    rows: DeviceRows, at: Index, positions: Index, tokens: Index, block_size: int
) -> FlatBatch:
    """A batch of one token of each of the rows `at`, which are not of the plan."""
    return FlatBatch(
        rows=at,
        start=positions,
        count=np.ones(len(at), np.int64),
        masked=np.zeros(len(at), np.bool_),
        tokens=tokens,
        positions=positions,
        places=positions,
        lengths=np.maximum(positions + 1, rows.num_prompt[at]),
        row_of=np.arange(len(at)),
        slots=rows.slots(at, positions, block_size),
    )


def part_of(batch: FlatBatch, keep: NDArray[np.bool_]) -> FlatBatch:
    """Some of a batch's tokens: of each row the first ones, or none."""
    count = np.bincount(batch.row_of[keep], minlength=len(batch.rows))
    left = np.flatnonzero(count)
    place: Index = np.cumsum(count > 0) - 1
    return FlatBatch(
        rows=batch.rows[left],
        start=batch.start[left],
        count=count[left],
        masked=batch.masked[left],
        tokens=batch.tokens[keep],
        positions=batch.positions[keep],
        places=batch.places[keep],
        lengths=batch.lengths[keep],
        row_of=place[batch.row_of[keep]],
        slots=tuple(slot[keep] for slot in batch.slots),
    )


def copies_at_once(source: Index, target: Index) -> tuple[Index, Index]:
    """Copies that are made one after the other, of which one may read what another has written, as copies that can all
    be made at once: where the content comes from, and the blocks that are written."""
    first: dict[int, int] = {}
    for read, write in zip(source.tolist(), target.tolist(), strict=True):
        first[write] = first.get(read, read)
    return np.array(list(first.values()), np.int64), np.array(list(first), np.int64)
