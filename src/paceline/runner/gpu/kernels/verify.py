"""Which drafts were right, and what the rows have then.

The token behind each of a row's tokens has been drawn. The first counts in any case; one that is the row's first draft
makes the next count, and so on, until a token is not what was guessed, ends the row, or has no usable numbers.
What counts is written into the row, several tokens at once. Drafts behind it leave nothing: their keys lie beyond the
row's length and are overwritten.

How drafts fared is added up by kind, as `runner/drafts.py` does: those verified, or of drafts that were not worth it
the first, which is compared with the token that came.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.core.plan import DRAFT_KINDS
from paceline.runner.drafts import FOLLOWED, MISSED, PARTLY, WHOLLY
from paceline.runner.gpu.kernels.draft_layout import DraftLayout, Proposals
from paceline.runner.gpu.kernels.step_rows import MAX_STOP_IDS, RowColumns

TALLIES = 3  # columns over kinds
_PER_PROGRAM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTokens:
    """What a step reports, by slot, int32. A row that does not run has the code -1 and no tokens."""

    code: Tensor  # [slots]: one of those of step_rows.py
    count: Tensor  # [slots]: tokens the row got
    verified: Tensor  # [slots]: drafts that were computed for it
    predicted: Tensor  # [slots]: of these, from its prediction
    tokens: Tensor  # [width + 1, slots]
    # [TALLIES * DRAFT_KINDS]: drafts compared with the token that came, those that were that token, rows with drafts
    tally: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnBehind:
    """The tokens of a step, what was drawn behind each, and whether the numbers it was drawn from are usable."""

    ids: Tensor  # int32 [tokens]
    chosen: Tensor  # int32 [tokens]
    finite: Tensor  # uint8 [tokens]


def verify(
    rows: RowColumns,
    fate: Tensor,
    report: VerifiedTokens,
    layout: DraftLayout,
    proposals: Proposals,
    slot_rows: Tensor,
    drawn: DrawnBehind,
) -> None:
    """Takes what was drawn into the rows of `slot_rows` [slots], and reports it. `fate` int32 [rows] gets how each
    row's drafts fared."""
    slots, most = slot_rows.shape[0], proposals.guess.shape[1]
    assert rows.tokens.stride(1) == 1 and report.tokens.shape[0] == most + 1
    _verify_kernel[(triton.cdiv(slots, _PER_PROGRAM),)](
        rows.length,
        rows.max_length,
        rows.active,
        rows.stop_ids,
        rows.tokens,
        fate,
        report.code,
        report.count,
        report.verified,
        report.predicted,
        report.tokens,
        report.tally,
        layout.first,
        layout.count,
        proposals.kind,
        proposals.kind if proposals.each is None else proposals.each,
        proposals.guess,
        slot_rows,
        drawn.ids,
        drawn.chosen,
        drawn.finite,
        rows.tokens.stride(0),
        report.tokens.stride(0),
        slots,
        MOST=most,
        SLOTS=_PER_PROGRAM,
        STOPS=MAX_STOP_IDS,
        KINDS=DRAFT_KINDS,
        OF_EACH=proposals.each is not None,
        FOLLOWED=FOLLOWED,
        MISSED=MISSED,
        PARTLY=PARTLY,
        WHOLLY=WHOLLY,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["row_tokens_stride", "report_stride", "slots"])
def _verify_kernel(
    lengths,
    max_lengths,
    active,
    stop_ids,
    row_tokens,
    fates,
    report_code,
    report_count,
    report_verified,
    report_predicted,
    report_tokens,
    tally,
    firsts,
    counts,
    kinds,
    each,
    guesses,
    slot_rows,
    ids,
    chosen,
    finite,
    row_tokens_stride,
    report_stride,
    slots,
    MOST: tl.constexpr,
    SLOTS: tl.constexpr,
    STOPS: tl.constexpr,
    KINDS: tl.constexpr,
    OF_EACH: tl.constexpr,
    FOLLOWED: tl.constexpr,
    MISSED: tl.constexpr,
    PARTLY: tl.constexpr,
    WHOLLY: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0).to(tl.int64)
    count = tl.load(counts + slot, mask=present, other=0)
    first = tl.load(firsts + slot, mask=present, other=0)
    runs = count > 0
    length = tl.load(lengths + row, mask=runs, other=0)
    max_length = tl.load(max_lengths + row, mask=runs, other=0)
    stops = tl.load(
        stop_ids + row[:, None] * STOPS + tl.arange(0, STOPS)[None, :], mask=runs[:, None], other=-1
    )
    kind = tl.load(kinds + slot, mask=runs, other=-1)
    guess = tl.load(guesses + slot * MOST, mask=runs & (kind >= 0), other=-1)
    number = tl.zeros([SLOTS], tl.int32)
    code = tl.zeros([SLOTS], tl.int32)
    is_guessed = tl.zeros([SLOTS], tl.int32)
    counts_next = runs
    for depth in tl.static_range(MOST + 1):
        token = tl.load(chosen + first + depth, mask=counts_next, other=-1)
        usable = tl.load(finite + first + depth, mask=counts_next, other=0) != 0
        if depth == 0:
            taken = counts_next
            is_guessed = (token == guess).to(tl.int32)
        else:
            taken = counts_next & usable
        is_stop = tl.max((stops == token[:, None]).to(tl.int32), 1) != 0
        ending = tl.where(is_stop, 1, tl.where(length + depth + 1 >= max_length, 2, 0))
        ending = tl.where(usable, ending, 3)
        code = tl.where(taken, ending, code)
        number += taken.to(tl.int32)
        tl.store(row_tokens + row * row_tokens_stride + length + depth, token, mask=taken)
        tl.store(report_tokens + depth * report_stride + slot, tl.where(taken, token, 0), mask=present)
        has_next = taken & (code == 0) & (depth + 1 < count)
        draft = tl.load(ids + first + depth + 1, mask=has_next, other=-1)
        counts_next = has_next & (draft == token)

    tl.store(lengths + row, length + number, mask=runs)
    tl.store(active + row, (code == 0).to(tl.int32), mask=runs)
    tl.store(report_code + slot, tl.where(runs, code, -1), mask=present)
    tl.store(report_count + slot, number, mask=present)
    drafts = tl.maximum(count - 1, 0)
    tl.store(report_verified + slot, drafts, mask=present)
    tl.store(report_predicted + slot, tl.where(kind >= FOLLOWED, drafts, 0), mask=present)

    is_known = runs & (kind >= 0) & (code != 3)
    compared = tl.where(drafts > 0, tl.minimum(number, drafts), 1)
    equal = tl.where(drafts > 0, tl.minimum(number - 1, drafts), is_guessed)
    # Integer sums come out the same in any order.
    if OF_EACH:
        one = tl.full([SLOTS], 1, tl.int32)
        for depth in tl.static_range(MOST):
            here = is_known & (depth < compared)
            own = tl.load(each + slot * MOST + depth, mask=here, other=0)
            tl.atomic_add(tally + own, one, mask=here, sem="relaxed")
            tl.atomic_add(tally + KINDS + own, one, mask=here & (depth < equal), sem="relaxed")
    else:
        tl.atomic_add(tally + kind, compared, mask=is_known, sem="relaxed")
        tl.atomic_add(tally + KINDS + kind, equal, mask=is_known, sem="relaxed")
    tl.atomic_add(tally + 2 * KINDS + kind, tl.full([SLOTS], 1, tl.int32), mask=is_known, sem="relaxed")
    fate = tl.where(equal == compared, WHOLLY, tl.where(equal > 0, PARTLY, MISSED))
    tl.store(fates + row, tl.where(is_known, fate, PARTLY), mask=runs)
