"""What the KV side of a plan changes, collected while a step is planned.

Lists of small changes, turned into the plan's flat arrays once per step. `mark` and `rollback` undo what a failed
admission had added. Owns no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import (
    NO_APPENDS,
    NO_BLOCK_COPIES,
    NO_DROPS,
    NO_MOVES,
    NO_PLACEMENTS,
    NO_SWAPS,
    BlockAppends,
    BlockCopies,
    Moves,
    Placements,
    RowDrops,
    Swaps,
    i32,
)
from paceline.core.request import BlockKey

I32 = NDArray[np.int32]
Blocks = NDArray[np.int64]  # block numbers; 64 bit because they are used as indices
Growth = tuple[Blocks, int, Blocks, Blocks]  # one block for each of many rows: rows, group, indices, blocks
Append = tuple[int, int, int, Blocks]  # several blocks for one row: row, group, index of the first, blocks
Copy = tuple[int, int, int, int, int]  # row, group, index, source, target
Swap = tuple[int, int, Blocks, Blocks]  # ticket, group, blocks, places
# Row, group, start, count, shift and first of a run of placed tokens; and the blocks it is copied from.
Placing = tuple[tuple[int, int, int, int, int, int], Blocks]
FEW = 4  # appends that are cheaper to write out one by one


class KVDelta:
    """Appends, copies and swaps since the last plan."""

    def __init__(self) -> None:
        self.growths: list[Growth] = []
        self.appends: list[Append] = []
        self.copies: list[Copy] = []
        self.swap_out: list[Swap] = []
        self.swap_in: list[Swap] = []
        # Host and disk places instead of blocks and host places, and what they hold.
        self.store: list[Swap] = []
        self.fetch: list[Swap] = []
        self.stored_keys: list[BlockKey] = []
        self.fetched_keys: list[BlockKey] = []
        self.stored_uses: list[int] = []
        self.fetched_uses: list[int] = []
        self.placements: list[Placing] = []
        self.drops: dict[int, int] = {}  # of rows, the tokens they have dropped so far

    def mark(self) -> tuple[int, int, int, int, int]:
        return (
            len(self.growths),
            len(self.appends),
            len(self.copies),
            len(self.swap_out),
            len(self.swap_in),
        )

    def rollback(self, mark: tuple[int, int, int, int, int]) -> None:
        growths, appends, copies, swap_out, swap_in = mark
        del self.growths[growths:], self.appends[appends:], self.copies[copies:]
        del self.swap_out[swap_out:], self.swap_in[swap_in:]

    def forget(self, row: int) -> None:
        """Nothing of a prompt's row is sent: it leaves in this very plan."""
        self.appends = [append for append in self.appends if append[0] != row]
        self.copies = [copy for copy in self.copies if copy[0] != row]
        self.placements = [placing for placing in self.placements if placing[0][0] != row]
        self.drops.pop(row, None)

    def forget_drop(self, row: int) -> None:
        """The row leaves in this very plan: what moved up in its table is nothing to its next owner."""
        if self.drops.pop(row, None) is not None:
            self.appends = [append for append in self.appends if append[0] != row]

    @property
    def has_copies(self) -> bool:
        return bool(self.copies or self.swap_out or self.swap_in or self.store or self.fetch)

    def take(self) -> tuple[BlockAppends, BlockCopies, Swaps, Swaps]:
        """The plan's arrays; the delta is empty afterwards."""
        appends, copies, swap_out, swap_in = NO_APPENDS, NO_BLOCK_COPIES, NO_SWAPS, NO_SWAPS
        if self.growths or self.appends:
            row, group, index, block = _append_columns(self.growths, self.appends)
            appends = BlockAppends(row=row, group=group, index=index, block=block)
            self.growths, self.appends = [], []
        if self.copies:
            row, group, index, source, target = np.array(self.copies, np.int32).T.copy()
            copies = BlockCopies(row=row, group=group, index=index, source=source, target=target)
            self.copies = []
        if self.swap_out:
            swap_out, self.swap_out = _swaps(self.swap_out), []
        if self.swap_in:
            swap_in, self.swap_in = _swaps(self.swap_in), []
        return appends, copies, swap_out, swap_in

    def take_drops(self) -> RowDrops:
        """What rows have dropped; none of it is left afterwards."""
        if not self.drops:
            return NO_DROPS
        drops = RowDrops(row=i32(self.drops), num_tokens=i32(self.drops.values()))
        self.drops = {}
        return drops

    def take_placements(self) -> Placements:
        """What is copied out of modules; none of it is left afterwards."""
        if not self.placements:
            return NO_PLACEMENTS
        row, group, start, count, shift, first = np.array(
            [run for run, _ in self.placements], np.int32
        ).T.copy()
        offset = i32(accumulate([len(blocks) for _, blocks in self.placements[:-1]], initial=0))
        blocks = np.concatenate([blocks for _, blocks in self.placements]).astype(np.int32)
        self.placements = []
        return Placements(
            row=row,
            group=group,
            start=start,
            count=count,
            shift=shift,
            first=first,
            offset=offset,
            blocks=blocks,
        )

    def take_moves(self) -> tuple[Moves, Moves]:
        """What is to be stored and fetched; none of it is left afterwards."""
        store, fetch = NO_MOVES, NO_MOVES
        if self.store:
            store = _moves(self.store, self.stored_keys, self.stored_uses)
            self.store, self.stored_keys, self.stored_uses = [], [], []
        if self.fetch:
            fetch = _moves(self.fetch, self.fetched_keys, self.fetched_uses)
            self.fetch, self.fetched_keys, self.fetched_uses = [], [], []
        return store, fetch


def _append_columns(growths: Sequence[Growth], appends: Sequence[Append]) -> I32:
    """Row, group, index and block of every block appended: [4, blocks]."""
    parts = [_columns(*growth) for growth in growths]
    if len(appends) > FEW:
        parts.append(_many_appends(appends))
    else:
        parts += [
            _columns(row, group, np.arange(start, start + len(blocks)), blocks)
            for row, group, start, blocks in appends
        ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def _columns(row: Blocks | int, group: int, index: Blocks, block: Blocks) -> I32:
    columns = np.empty((4, len(block)), np.int32)
    columns[0], columns[1], columns[2], columns[3] = row, group, index, block
    return columns


def _many_appends(appends: Sequence[Append]) -> I32:
    """The same columns as one by one, with a number of operations that does not grow with the appends."""
    rows, groups, starts, blocks = zip(*appends, strict=True)
    lengths = [len(part) for part in blocks]
    ends = accumulate(lengths)
    shifts = [start + length - end for start, length, end in zip(starts, lengths, ends, strict=True)]
    columns = np.array((rows, groups, shifts, shifts), np.int32).repeat(lengths, axis=1)
    columns[2] += np.arange(len(columns[2]), dtype=np.int32)
    columns[3] = np.concatenate(blocks)
    return columns


def _moves(entries: Sequence[Swap], keys: Sequence[BlockKey], uses: Sequence[int]) -> Moves:
    swaps = _swaps(entries)
    return Moves(
        ticket=swaps.ticket,
        group=swaps.group,
        host=swaps.block,
        disk=swaps.place,
        contents=tuple(keys),
        uses_left=tuple(uses),
    )


def _swaps(entries: Sequence[Swap]) -> Swaps:
    columns = np.empty((4, sum([len(entry[2]) for entry in entries])), np.int32)
    end = 0
    for ticket, group, blocks, places in entries:
        start, end = end, end + len(blocks)
        part = columns[:, start:end]
        part[0], part[1], part[2], part[3] = ticket, group, blocks, places
    return Swaps(ticket=columns[0], group=columns[1], block=columns[2], place=columns[3])
