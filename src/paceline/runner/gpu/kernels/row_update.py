"""After the draw: each active row of the batch takes its token in, and ends if the token or its length says so.

It runs inside the step's graph, so that the next step sees an ended row as inactive although the host learns of it
later. It must not know texts: stop strings are the host's. Codes are the columns of the result, 0 while the row runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

RUNNING, STOPPED, LENGTH, NOT_FINITE = 0, 1, 2, 3
MAX_STOP_IDS = 8
FORCED_STOP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowColumns:
    """State of rows on the device, all int32 [rows] but the last two."""

    length: Tensor  # tokens of the sequence, prompt included
    max_length: Tensor
    active: Tensor  # 1 while the row runs
    stop_ids: Tensor  # int32 [rows, MAX_STOP_IDS], -1 where there is none
    tokens: Tensor  # int32 [rows, longest sequence + 1]: every token of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """What one step reports, by slot of the batch, int32 [slots]. An inactive row reports -1."""

    token: Tensor
    code: Tensor


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


def reference_update_rows(
    rows: RowColumns, slot_rows: Tensor, tokens: Tensor, finite: Tensor
) -> list[tuple[int, int]]:
    """The definition, slot by slot on the host: changes `rows` and returns (token, code) of each slot."""
    report = []
    for row, token, is_finite in zip(slot_rows.tolist(), tokens.tolist(), finite.tolist(), strict=True):
        if not rows.active[row]:
            report.append((-1, -1))
            continue
        rows.tokens[row, rows.length[row]] = token
        rows.length[row] += 1
        code = LENGTH if rows.length[row] >= rows.max_length[row] else RUNNING
        code = STOPPED if is_finite == FORCED_STOP or token in rows.stop_ids[row].tolist() else code
        code = code if is_finite else NOT_FINITE
        rows.active[row] = int(code == RUNNING)
        report.append((token, code))
    return report
