"""Tokens that a guide is certain of, as drafts of its row, and which mask belongs to each draw of such rows.

The host says which tokens are certain and at which position they begin; how far the row is when a step comes, it does
not know. A row with a guide has no other drafts, so that the host can make the masks behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.drafts import FOLLOWED
from paceline.runner.gpu.kernels.draft_layout import DraftLayout, Proposals
from paceline.runner.gpu.kernels.step_rows import RowColumns

_SLOTS, _LANES = 64, 256  # slots and draws of a program


@dataclass(frozen=True, slots=True, kw_only=True)
class CertainTokens:
    """What rows are going to say, int32."""

    tokens: Tensor  # [rows, most]
    first: Tensor  # [rows]: position of the first of them
    count: Tensor  # [rows]; 0: nothing is certain


def propose_certain(into: Proposals, rows: RowColumns, slot_rows: Tensor, certain: CertainTokens) -> None:
    """The drafts of rows of `slot_rows` [slots] whose next token is certain become those tokens."""
    slots, most = slot_rows.shape[0], into.guess.shape[1]
    _certain_kernel[(triton.cdiv(slots, _SLOTS),)](
        into.kind,
        into.number,
        into.guess,
        slot_rows,
        rows.length,
        rows.active,
        certain.tokens,
        certain.first,
        certain.count,
        certain.tokens.stride(0),
        slots,
        MOST=most,
        SLOTS=_SLOTS,
        KIND=FOLLOWED,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["tokens_stride", "slots"])
def _certain_kernel(
    kinds,
    numbers,
    guesses,
    slot_rows,
    lengths,
    active,
    tokens,
    firsts,
    counts,
    tokens_stride,
    slots,
    MOST: tl.constexpr,
    SLOTS: tl.constexpr,
    KIND: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0).to(tl.int64)
    runs = present & (tl.load(active + row, mask=present, other=0) != 0)
    count = tl.load(counts + row, mask=runs, other=0)
    at = tl.load(lengths + row, mask=runs, other=0) - tl.load(firsts + row, mask=runs, other=0)
    taken = runs & (at >= 0) & (at < count)
    number = tl.minimum(count - at, MOST)
    for depth in tl.static_range(MOST):
        here = taken & (depth < number)
        token = tl.load(tokens + row * tokens_stride + at + depth, mask=here, other=0)
        tl.store(guesses + slot * MOST + depth, token, mask=taken)
    tl.store(numbers + slot, number, mask=taken)
    tl.store(kinds + slot, tl.full([SLOTS], KIND, tl.int32), mask=taken)


def place_masks(mask_of: Tensor, layout: DraftLayout, rows: RowColumns, first_masks: Tensor) -> None:
    """Which mask each draw of a step has, int32 [draws], negative: none. `first_masks` int32 [rows]: that of a row's
    first draw; those of the draws behind it follow."""
    draws = mask_of.shape[0]
    _place_kernel[(triton.cdiv(draws, _LANES),)](
        mask_of,
        layout.draw_rows,
        layout.draw_positions,
        rows.length,
        first_masks,
        draws,
        LANES=_LANES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["draws"])
def _place_kernel(mask_of, draw_rows, draw_positions, lengths, first_masks, draws, LANES: tl.constexpr):
    draw = tl.program_id(0) * LANES + tl.arange(0, LANES)
    present = draw < draws
    row = tl.load(draw_rows + draw, mask=present, other=0)
    first = tl.load(first_masks + row, mask=present, other=-1)
    depth = tl.load(draw_positions + draw, mask=present, other=0) - tl.load(
        lengths + row, mask=present, other=0
    )
    tl.store(mask_of + draw, tl.where(first >= 0, first + depth, -1), mask=present)
