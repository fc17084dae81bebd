"""What a step takes from the rows on the device, and what its draw changes in them.

Token ids, positions and slots of a step's tokens are worked out from the rows: decoding rows come first, a token each;
spans of known tokens follow. After the draw each active row takes its token in, and ends if the token or its length
says so. That is inside the step's graph: the next step computes the token of an ended row and stores it nowhere,
although the host learns of the ending later. `write_words` is how the host changes rows: pairs of an address in the
rows' memory and the word that goes there.

It must not know what a row is beyond its columns, nor texts: stop strings are the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE
from paceline.runner.gpu.kernels.prefill_attention import Spans

RUNNING, STOPPED, LENGTH, NOT_FINITE = 0, 1, 2, 3
MAX_STOP_IDS = 8
FORCED_STOP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """State of rows on the device, all int32 [rows] but the last two."""

    length: Tensor  # tokens of the sequence, prompt included
    max_length: Tensor
    active: Tensor  # 1 while the row runs
    dropped: Tensor  # tokens that its tables have no entries for
    stop_ids: Tensor  # int32 [rows, MAX_STOP_IDS], -1 where there is none
    tokens: Tensor  # int32 [rows, longest sequence + 1]: every token of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """What one step reports, by slot of the batch, int32 [slots]. An inactive row reports -1."""

    token: Tensor
    code: Tensor  # one of the four above


def update_rows(
    rows: RowColumns, drawn: DrawnTokens, slot_rows: Tensor, tokens: Tensor, finite: Tensor
) -> None:
    """Takes `tokens` int32 and `finite` uint8 [slots] of the draw into the rows and reports them.

    `finite` is 0 where a row's numbers are not usable, and FORCED_STOP where its token ends it whatever it is.
    """
    slots = tokens.shape[0]
    assert rows.tokens.stride(1) == 1
    per_program = 128
    _update_kernel[(triton.cdiv(slots, per_program),)](
        rows.length,
        rows.max_length,
        rows.active,
        rows.stop_ids,
        rows.tokens,
        rows.tokens.stride(0),
        drawn.token,
        drawn.code,
        slot_rows,
        tokens,
        finite,
        slots,
        SLOTS=per_program,
        STOPS=MAX_STOP_IDS,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["slots", "row_tokens_stride"])
def _update_kernel(
    lengths,
    max_lengths,
    active,
    stop_ids,
    row_tokens,
    row_tokens_stride,
    drawn_token,
    drawn_code,
    slot_rows,
    tokens,
    finite,
    slots,
    SLOTS: tl.constexpr,
    STOPS: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0)
    runs = present & (tl.load(active + row, mask=present, other=0) != 0)
    token = tl.load(tokens + slot, mask=runs, other=-1)
    length = tl.load(lengths + row, mask=runs, other=0) + 1
    stops = tl.load(
        stop_ids + row[:, None] * STOPS + tl.arange(0, STOPS)[None, :], mask=runs[:, None], other=-1
    )
    is_stop = tl.max((stops == token[:, None]).to(tl.int32), 1) != 0
    code = tl.where(length >= tl.load(max_lengths + row, mask=runs, other=0), 2, 0)
    usable = tl.load(finite + slot, mask=runs, other=1)
    code = tl.where(is_stop | (usable == 2), 1, code)
    code = tl.where(usable == 0, 3, code)
    tl.store(row_tokens + row.to(tl.int64) * row_tokens_stride + length - 1, token, mask=runs)
    tl.store(lengths + row, length, mask=runs)
    tl.store(active + row, (code == 0).to(tl.int32), mask=runs)
    tl.store(drawn_token + slot, token, mask=present)
    tl.store(drawn_code + slot, tl.where(runs, code, -1), mask=present)


_LANES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTokens:
    """Columns over the tokens of a step. `slots` has one tensor for each layer group."""

    ids: Tensor  # int32 [tokens]
    positions: Tensor  # int32 [tokens]
    slots: Sequence[Tensor]  # int64 [tokens]
    turns: Tensor | None = (
        None  # int32 [axes, tokens]: by what they turn, if that is more than their positions
    )


def allocate_step_tokens(
    tokens: int, groups: int, device: torch.device | str = "cuda", axes: int = 0
) -> StepTokens:
    def column(dtype: torch.dtype) -> Tensor:
        return torch.zeros(tokens, dtype=dtype, device=device)

    return StepTokens(
        ids=column(torch.int32),
        positions=column(torch.int32),
        slots=[column(torch.int64) for _ in range(groups)],
        turns=torch.zeros(axes, tokens, dtype=torch.int32, device=device) if axes else None,
    )


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
    """The last token of each row of `slot_rows` [slots]; `visible` int32 [rows] gets how much attention sees.

    A row that has dropped tokens sees fewer than its length, and its places are as many further to the front.
    """
    slots = slot_rows.shape[0]
    for group, table in enumerate(tables):
        _decode_kernel[(triton.cdiv(slots, _LANES),)](
            into.ids,
            into.positions,
            into.slots[group],
            visible,
            rows.length,
            rows.active,
            rows.dropped,
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
    dropped,
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
    place = position - tl.load(dropped + row, mask=runs, other=0)
    block = tl.load(table + row * table_stride + place // BLOCK, mask=runs, other=0).to(tl.int64)
    tl.store(ids + slot, tl.load(tokens + row * tokens_stride + position, mask=runs, other=0), mask=present)
    tl.store(positions + slot, position, mask=present)
    tl.store(places + slot, tl.where(runs, block * BLOCK + place % BLOCK, -1), mask=present)
    tl.store(visible + row, tl.where(runs, place + 1, 0), mask=present)


def span_inputs(
    into: StepTokens, spans: Spans, longest: int, rows: RowColumns, tables: Sequence[Tensor]
) -> None:
    """The tokens of `spans`, none longer than `longest`. Where a span begins is a place in its row's tables: what the
    row has dropped is added for its positions."""
    tokens = rows.tokens
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
            rows.dropped,
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
    dropped,
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
    place = tl.load(starts + span) + offset
    position = place + tl.load(dropped + row)
    block = tl.load(table + row * table_stride + place // BLOCK, mask=mask, other=0).to(tl.int64)
    tl.store(ids + first + offset, tl.load(tokens + row * tokens_stride + position, mask=mask), mask=mask)
    tl.store(positions + first + offset, position, mask=mask)
    tl.store(places + first + offset, block * BLOCK + place % BLOCK, mask=mask)


def span_values(into: Tensor, values: Tensor, spans: Spans, longest: int) -> None:
    """Each token of `spans`, none longer than `longest`, gets the value of its row: int32 [tokens], [rows]."""
    _span_value_kernel[(spans.row.shape[0], triton.cdiv(longest, _LANES))](
        into, values, spans.row, spans.first, spans.count, LANES=_LANES, num_warps=4
    )


@triton.jit
def _span_value_kernel(into, values, span_rows, firsts, counts, LANES: tl.constexpr):
    span = tl.program_id(0)
    offset = tl.program_id(1) * LANES + tl.arange(0, LANES)
    value = tl.load(values + tl.load(span_rows + span))
    nothing = tl.zeros([LANES], tl.int32)
    tl.store(into + tl.load(firsts + span) + offset, nothing + value, mask=offset < tl.load(counts + span))
