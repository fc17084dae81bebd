"""What a step computes, worked out on the device from the rows: token ids, positions and slots of its tokens.

Decoding rows come first, a token each; spans of known tokens follow. A row that has ended on the device is invisible:
its token is computed and stored nowhere, although the host may not know of the ending yet. `write_words` is how the
host changes rows: pairs of an address in the rows' memory and the word that goes there.

It must not know what a row is beyond its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.prefill_plan import Spans
from paceline.runner.gpu.kernels.row_update import RowColumns

_LANES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Columns over the tokens of a step. `slots` has one tensor for each layer group."""

    ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    slots: Sequence[Tensor]  # int64 [tokens]


def write_words(memory: Tensor, changes: Tensor, count: int) -> None:
    """`changes` int32 [2, at least count]: addresses in `memory` (int32, flat) and the words to write there."""
    assert changes.stride(1) == 1
    _write_kernel[(triton.cdiv(count, 1024),)](memory, changes, changes.stride(0), count, LANES=1024)


@triton.jit(do_not_specialize=["stride", "count"])
def _write_kernel(memory, changes, stride, count, LANES: tl.constexpr):
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    mask = at < count
    address = tl.load(changes + at, mask=mask, other=0)
    tl.store(memory + address, tl.load(changes + stride + at, mask=mask, other=0), mask=mask)


def decode_inputs(
    into: StepTokens, visible: Tensor, rows: RowColumns, slot_rows: Tensor, tables: Sequence[Tensor]
) -> None:
    """The last token of each row of `slot_rows` [slots]; `visible` int32 [rows] gets how much attention sees."""
    slots = slot_rows.shape[0]
    for group, table in enumerate(tables):
        _decode_kernel[(triton.cdiv(slots, _LANES),)](
            into.ids,
            into.positions,
            into.slots[group],
            visible,
            rows.length,
            rows.active,
            rows.tokens,
            table,
            slot_rows,
            rows.tokens.stride(0),
            table.stride(0),
            slots,
            LANES=_LANES,
            BLOCK=BLOCK_SIZE,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["tokens_stride", "table_stride", "slots"])
def _decode_kernel(
    ids,
    positions,
    places,
    visible,
    lengths,
    active,
    tokens,
    table,
    slot_rows,
    tokens_stride,
    table_stride,
    slots,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.program_id(0) * LANES + tl.arange(0, LANES)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0).to(tl.int64)
    length = tl.load(lengths + row, mask=present, other=0)
    runs = present & (tl.load(active + row, mask=present, other=0) != 0) & (length > 0)
    position = tl.where(runs, length - 1, 0)
    block = tl.load(table + row * table_stride + position // BLOCK, mask=runs, other=0).to(tl.int64)
    tl.store(ids + slot, tl.load(tokens + row * tokens_stride + position, mask=runs, other=0), mask=present)
    tl.store(positions + slot, position, mask=present)
    tl.store(places + slot, tl.where(runs, block * BLOCK + position % BLOCK, -1), mask=present)
    tl.store(visible + row, tl.where(runs, length, 0), mask=present)


def span_inputs(
    into: StepTokens, spans: Spans, longest: int, tokens: Tensor, tables: Sequence[Tensor]
) -> None:
    """The tokens of `spans`, none longer than `longest`, of rows with all their `tokens` [rows, ...]."""
    number = spans.row.shape[0]
    for group, table in enumerate(tables):
        _span_kernel[(number, triton.cdiv(longest, _LANES))](
            into.ids,
            into.positions,
            into.slots[group],
            spans.row,
            spans.first,
            spans.count,
            spans.position,
            tokens,
            table,
            tokens.stride(0),
            table.stride(0),
            LANES=_LANES,
            BLOCK=BLOCK_SIZE,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["tokens_stride", "table_stride"])
def _span_kernel(
    ids,
    positions,
    places,
    span_rows,
    firsts,
    counts,
    starts,
    tokens,
    table,
    tokens_stride,
    table_stride,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span = tl.program_id(0)
    row = tl.load(span_rows + span).to(tl.int64)
    first = tl.load(firsts + span)
    offset = tl.program_id(1) * LANES + tl.arange(0, LANES)
    mask = offset < tl.load(counts + span)
    position = tl.load(starts + span) + offset
    block = tl.load(table + row * table_stride + position // BLOCK, mask=mask, other=0).to(tl.int64)
    tl.store(ids + first + offset, tl.load(tokens + row * tokens_stride + position, mask=mask), mask=mask)
    tl.store(positions + first + offset, position, mask=mask)
    tl.store(places + first + offset, block * BLOCK + position % BLOCK, mask=mask)


def reference_decode_inputs(
    rows: RowColumns, slot_rows: Tensor, tables: Sequence[Tensor]
) -> list[tuple[int, int, tuple[int, ...], int]]:
    """The definition, slot by slot: token, position, slot in each group, visible tokens."""
    found = []
    for row in slot_rows.tolist():
        length = int(rows.length[row])
        if not rows.active[row] or length < 1:
            found.append((0, 0, (-1,) * len(tables), 0))
            continue
        block, place = divmod(length - 1, BLOCK_SIZE)
        places = tuple(int(table[row, block]) * BLOCK_SIZE + place for table in tables)
        found.append((int(rows.tokens[row, length - 1]), length - 1, places, length))
    return found
