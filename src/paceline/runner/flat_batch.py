"""One step's tokens, flat: which rows take part with how many, and where each token stands and is stored.

Everything is computed once per step over arrays, whatever the number of tokens. Rows that have ended but are still
planned, and the padding of padded modes, are computed like any other token and store nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.core.plan import StepPlan
from paceline.runner.device_rows import DeviceRows

Index = NDArray[np.int64]
NOWHERE = -1  # slot of a token whose keys and values are not stored


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FlatBatch:
    """`rows`, `start`, `count` speak of rows; `tokens`, `positions`, `row_of` of tokens, row by row."""

    rows: Index  # decoding rows first, then spans; padding is not among them
    num_decode: int
    start: Index  # position of a row's first token in this step
    count: Index
    masked: NDArray[np.bool_]  # ended: nothing of it counts
    tokens: Index
    positions: Index
    lengths: Index  # of a token's sequence when it was first computed
    row_of: Index  # index into `rows`; len(rows) for padding
    slots: tuple[Index, ...]  # per layer group, flat

    @property
    def last(self) -> Index:
        """Index of each row's last token."""
        last: Index = np.cumsum(self.count) - 1
        return last


def make_batch(rows: DeviceRows, plan: StepPlan, block_size: int) -> FlatBatch:
    """The batch of a plan that has been applied to `rows`."""
    decode = np.flatnonzero(rows.decoding)
    at = np.concatenate([decode, plan.spans.row])
    masked = rows.ended[at]
    start = np.where(masked, 0, rows.computed[at])
    count = np.ones(len(at), np.int64)
    count[len(decode) :] = plan.spans.num_scheduled
    row_of = np.repeat(np.arange(len(at)), count)
    first = np.cumsum(count) - count
    positions = start[row_of] + np.arange(len(row_of)) - first[row_of]
    owner = at[row_of]
    stored = ~masked[row_of]
    slots = tuple(
        np.where(stored, table[owner, positions // block_size] * block_size + positions % block_size, NOWHERE)
        for table in rows.tables
    )
    tokens = rows.tokens[owner, positions]
    lengths = np.maximum(positions + 1, rows.num_prompt[owner])
    if plan.pad_tokens:  # computed for real, never read
        pad = np.zeros(plan.pad_tokens, np.int64)
        tokens, positions = np.concatenate([tokens, pad]), np.concatenate([positions, pad])
        lengths = np.concatenate([lengths, pad + 1])
        row_of = np.concatenate([row_of, pad + len(at)])
        slots = tuple(np.concatenate([slot, pad + NOWHERE]) for slot in slots)
    return FlatBatch(
        rows=at,
        num_decode=len(decode),
        start=start,
        count=count,
        masked=masked,
        tokens=tokens,
        positions=positions,
        lengths=lengths,
        row_of=row_of,
        slots=slots,
    )
