"""Guesses of rows' next tokens, made on the device from what lies there.

`propose_ngrams` looks for a row's last tokens earlier in the row, as `runner/drafts.py` does: the latest place of the
last four, or of the last two; how many tokens before that agree, and how the row's last drafts fared, is the guess's
kind. It is one scan of the row's tokens a step, by one program, which reads 4 KB of a row of 1,000 tokens.

`propose_answers` is for tests and measurements: rows come with the answer they are going to give, and each token of it
is spoilt with some chance, by its place alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.drafts import FATES, LONGEST
from paceline.runner.gpu.kernels.draft_layout import Proposals
from paceline.runner.gpu.kernels.step_rows import RowColumns

_CHUNK = 1024  # tokens looked at together
_PER_PROGRAM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftColumns:
    """State of rows, int32 [rows]."""

    may_draft: Tensor  # 0: none is made for this row
    fate: Tensor  # how its last drafts fared


def propose_ngrams(into: Proposals, rows: RowColumns, drafts: DraftColumns, slot_rows: Tensor) -> None:
    """Guesses for the rows of `slot_rows` [slots] from their own tokens."""
    assert rows.tokens.stride(1) == 1
    most = into.guess.shape[1]
    _ngram_kernel[(slot_rows.shape[0],)](
        into.kind,
        into.number,
        into.guess,
        slot_rows,
        rows.length,
        rows.active,
        rows.tokens,
        drafts.may_draft,
        drafts.fate,
        rows.tokens.stride(0),
        MOST=most,
        LANES=triton.next_power_of_2(max(most, LONGEST)),
        LONGEST=LONGEST,
        FATES=FATES,
        CHUNK=_CHUNK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens_stride"])
def _ngram_kernel(
    kinds,
    numbers,
    guesses,
    slot_rows,
    lengths,
    active,
    tokens,
    may_draft,
    fates,
    tokens_stride,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
    LONGEST: tl.constexpr,
    FATES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    slot = tl.program_id(0)
    row = tl.load(slot_rows + slot).to(tl.int64)
    length = tl.load(lengths + row)
    runs = (tl.load(active + row) != 0) & (tl.load(may_draft + row) != 0) & (length > 2)
    length = tl.where(runs, length, 0)
    text = tokens + row * tokens_stride
    last = tl.load(text + length - 1, mask=runs, other=-1)
    second = tl.load(text + length - 2, mask=runs, other=-1)
    third = tl.load(text + length - 3, mask=runs, other=-1)
    fourth = tl.load(text + length - 4, mask=length > 3, other=-2)  # no token

    # Where what follows begins: later places overwrite earlier ones.
    pair = tl.zeros([CHUNK], tl.int32)
    four = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, length, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        has_pair = (place >= 2) & (place < length)
        one = tl.load(text + place - 1, mask=has_pair, other=-1)
        two = tl.load(text + place - 2, mask=has_pair, other=-1)
        is_pair = has_pair & (one == last) & (two == second)
        pair = tl.where(is_pair, place, pair)
        has_four = is_pair & (place >= 4)
        three = tl.load(text + place - 3, mask=has_four, other=-1)
        before = tl.load(text + place - 4, mask=has_four, other=-1)
        four = tl.where(has_four & (three == third) & (before == fourth), place, four)
    found = tl.max(four, 0)
    found = tl.where(found > 0, found, tl.max(pair, 0))

    lane = tl.arange(0, LANES)
    is_before = (lane < LONGEST) & (found > lane)
    there = tl.load(text + found - 1 - lane, mask=is_before, other=-1)
    here = tl.load(text + length - 1 - lane, mask=is_before, other=-1)
    agreed = tl.min(tl.where(is_before & (there == here), LONGEST, lane), 0)
    agreed = tl.minimum(agreed, LONGEST)
    is_found = found > 0
    kind = (agreed - 2) * FATES + tl.load(fates + row)
    tl.store(kinds + slot, tl.where(is_found, kind, -1))
    tl.store(numbers + slot, tl.where(is_found, MOST, 0))
    # Behind the end of what is known the text is taken to repeat itself.
    source = found + lane % tl.maximum(length - found, 1)
    guess = tl.load(text + source, mask=is_found & (lane < MOST), other=0)
    tl.store(guesses + slot * MOST + lane, guess, mask=lane < MOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What rows are going to say, by position."""

    tokens: Tensor  # int32 [rows, longest sequence + 1]
    end: Tensor  # int32 [rows]: where it ends; 0: it is not known
    vocabulary: int
    acceptance: float  # chance that a token is not spoilt


def propose_answers(
    into: Proposals, rows: RowColumns, drafts: DraftColumns, slot_rows: Tensor, answers: Answers
) -> None:
    slots, most = slot_rows.shape[0], into.guess.shape[1]
    _answer_kernel[(triton.cdiv(slots, _PER_PROGRAM),)](
        into.kind,
        into.number,
        into.guess,
        slot_rows,
        rows.length,
        rows.active,
        drafts.may_draft,
        answers.tokens,
        answers.end,
        answers.tokens.stride(0),
        slots,
        answers.vocabulary,
        answers.acceptance,
        MOST=most,
        SLOTS=_PER_PROGRAM,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["answers_stride", "slots", "vocabulary", "acceptance"])
def _answer_kernel(
    kinds,
    numbers,
    guesses,
    slot_rows,
    lengths,
    active,
    may_draft,
    answers,
    ends,
    answers_stride,
    slots,
    vocabulary,
    acceptance,
    MOST: tl.constexpr,
    SLOTS: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0).to(tl.int64)
    runs = present & (tl.load(active + row, mask=present, other=0) != 0)
    runs = runs & (tl.load(may_draft + row, mask=runs, other=0) != 0)
    length = tl.load(lengths + row, mask=runs, other=0)
    left = tl.load(ends + row, mask=runs, other=0) - length
    number = tl.where(runs, tl.minimum(tl.maximum(left, 0), MOST), 0)
    tl.store(kinds + slot, tl.where(number > 0, 0, -1), mask=present)
    tl.store(numbers + slot, number, mask=present)
    for depth in tl.static_range(MOST):
        position = length + depth
        token = tl.load(answers + row * answers_stride + position, mask=depth < number, other=0)
        is_right = tl.rand(1, row.to(tl.int32) * 131_071 + position) < acceptance
        token = tl.where(is_right, token, (token + 1) % vocabulary)
        tl.store(guesses + slot * MOST + depth, token, mask=present)
