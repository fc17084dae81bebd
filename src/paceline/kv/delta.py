"""What the KV side of a plan changes, collected while a step is planned.

Lists of small arrays, turned into the plan's flat arrays once per step. `mark` and `rollback` undo what a failed
admission had added. Owns no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import BlockAppends, BlockCopies, Swaps

I32 = NDArray[np.int32]
Blocks = NDArray[np.int64]  # block numbers; 64 bit because they are used as indices
# One change of several blocks: arrays of one length, or an int that stands for a column of that value.
Columns = tuple[Blocks | int, ...]


class KVDelta:
    """Appends, copies and swaps since the last plan."""

    def __init__(self) -> None:
        self.appends: list[Columns] = []  # row, group, index, block
        self.copies: list[Columns] = []  # row, group, index, source, target
        self.swap_out: list[Columns] = []  # ticket, group, block, place
        self.swap_in: list[Columns] = []

    def mark(self) -> tuple[int, int, int, int]:
        return len(self.appends), len(self.copies), len(self.swap_out), len(self.swap_in)

    def rollback(self, mark: tuple[int, int, int, int]) -> None:
        for entries, length in zip(
            (self.appends, self.copies, self.swap_out, self.swap_in), mark, strict=True
        ):
            del entries[length:]

    @property
    def has_copies(self) -> bool:
        return bool(self.copies or self.swap_out or self.swap_in)

    def take(self) -> tuple[BlockAppends, BlockCopies, Swaps, Swaps]:
        """The plan's arrays; the delta is empty afterwards."""
        appends, copies, swap_out, swap_in = _NO_APPENDS, _NO_COPIES, _NO_SWAPS, _NO_SWAPS
        if self.appends:
            row, group, index, block = _columns(self.appends, 4)
            appends = BlockAppends(row=row, group=group, index=index, block=block)
            self.appends = []
        if self.copies:
            row, group, index, source, target = _columns(self.copies, 5)
            copies = BlockCopies(row=row, group=group, index=index, source=source, target=target)
            self.copies = []
        if self.swap_out:
            swap_out, self.swap_out = _swaps(self.swap_out), []
        if self.swap_in:
            swap_in, self.swap_in = _swaps(self.swap_in), []
        return appends, copies, swap_out, swap_in


_NO_APPENDS, _NO_COPIES, _NO_SWAPS = BlockAppends(), BlockCopies(), Swaps()


def _swaps(entries: Sequence[Columns]) -> Swaps:
    ticket, group, block, place = _columns(entries, 4)
    return Swaps(ticket=ticket, group=group, block=block, place=place)


def _columns(entries: Sequence[Columns], width: int) -> tuple[I32, ...]:
    if len(entries) == 1 and isinstance(entries[0][-1], np.ndarray):
        length = len(entries[0][-1])
        return tuple(
            np.full(length, part, np.int32) if isinstance(part, int) else part.astype(np.int32)
            for part in entries[0]
        )
    lengths = [len(entry[-1]) if isinstance(entry[-1], np.ndarray) else 1 for entry in entries]
    columns = []
    for position in range(width):
        parts = [entry[position] for entry in entries]
        if all(isinstance(part, int) for part in parts):
            column = np.repeat(np.array(parts, np.int32), lengths)
        elif any(isinstance(part, int) for part in parts):
            values: list[int] = []
            for part, length in zip(parts, lengths, strict=True):
                values += [part] * length if isinstance(part, int) else part.tolist()
            column = np.array(values, np.int32)
        else:
            column = np.concatenate(parts).astype(np.int32)
        columns.append(column)
    return tuple(columns)
