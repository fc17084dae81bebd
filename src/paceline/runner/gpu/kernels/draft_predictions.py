"""Drafts from what a request is expected to say, on the device: where its row is in that text is found here.

The same as `Prediction` of `runner/drafts.py`: a row is followed token by token, and looked for by its last two tokens
where it says something else. Steps without drafts do not follow; the next one with drafts takes in what came since. Of
a row that is far behind only the last tokens are looked at, so that no step waits long: it is found again by its pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.drafts import FOLLOWED, FOUND
from paceline.runner.gpu.kernels.draft_layout import TRUST, Proposals
from paceline.runner.gpu.kernels.drafters import DraftColumns
from paceline.runner.gpu.kernels.step_rows import RowColumns

# Words of a row's state: its tokens that were followed, the place that is expected next, the place behind the last
# token that was expected and came, and whether the row's last token was one.
SEEN, EXPECTED, REACHED, IS_FOLLOWED = 0, 1, 2, 3
STATE_WORDS = 4
MOST_BEHIND = 64  # tokens of a row that a step takes in
_CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Texts that rows are expected to say, int32."""

    tokens: Tensor  # [places, longest]
    place: Tensor  # [rows]: where a row's text is
    count: Tensor  # [rows]: its tokens; 0: the row has none
    state: Tensor  # [rows, STATE_WORDS]
    num_prompt: Tensor  # [rows]


def propose_predictions(
    into: Proposals,
    rows: RowColumns,
    drafts: DraftColumns,
    slot_rows: Tensor,
    predictions: Predictions,
    limits: Tensor,
) -> None:
    """Guesses from predictions replace those that rows of `slot_rows` [slots] have: while a row says what is expected,
    and where they are trusted as much. `limits` as in draft_layout.py."""
    most = into.guess.shape[1]
    _prediction_kernel[(slot_rows.shape[0],)](
        into.kind,
        into.number,
        into.guess,
        slot_rows,
        rows.length,
        rows.active,
        rows.tokens,
        drafts.may_draft,
        predictions.tokens,
        predictions.place,
        predictions.count,
        predictions.state,
        predictions.num_prompt,
        limits,
        rows.tokens.stride(0),
        predictions.tokens.stride(0),
        MOST=most,
        LANES=triton.next_power_of_2(most),
        CHUNK=_CHUNK,
        MOST_BEHIND=MOST_BEHIND,
        FOLLOWED=FOLLOWED,
        FOUND=FOUND,
        TRUST_AT=TRUST,
        STATE=STATE_WORDS,
        num_warps=1,  # one warp could write a row's state before another has read it
    )


@triton.jit
def _place_behind(expected, count, before, token, reached, CHUNK: tl.constexpr):
    """Where a pair of tokens ends: first behind `reached`, or else last; `count`: nowhere."""
    nearest = count + 1
    last = 0
    for begin in range(0, count + 1, CHUNK):
        end = begin + tl.arange(0, CHUNK)
        is_pair = (end >= 2) & (end <= count)
        is_pair = is_pair & (tl.load(expected + end - 1, mask=is_pair, other=-1) == token)
        is_pair = is_pair & (tl.load(expected + end - 2, mask=is_pair, other=-1) == before)
        nearest = tl.minimum(nearest, tl.min(tl.where(is_pair & (end >= reached), end, count + 1), 0))
        last = tl.maximum(last, tl.max(tl.where(is_pair, end, 0), 0))
    return tl.where(nearest <= count, nearest, tl.where(last > 0, last, count))


@triton.jit(do_not_specialize=["tokens_stride", "predictions_stride"])
def _prediction_kernel(
    kinds,
    numbers,
    guesses,
    slot_rows,
    lengths,
    active,
    tokens,
    may_draft,
    predictions,
    places,
    counts,
    states,
    num_prompts,
    limits,
    tokens_stride,
    predictions_stride,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_BEHIND: tl.constexpr,
    FOLLOWED: tl.constexpr,
    FOUND: tl.constexpr,
    TRUST_AT: tl.constexpr,
    STATE: tl.constexpr,
):
    slot = tl.program_id(0)
    row = tl.load(slot_rows + slot).to(tl.int64)
    count = tl.load(counts + row)
    if (count == 0) | (tl.load(active + row) == 0) | (tl.load(may_draft + row) == 0):
        return
    length = tl.load(lengths + row)
    num_prompt = tl.load(num_prompts + row)
    state = states + row * STATE
    seen = tl.load(state)
    place = tl.load(state + 1)
    reached = tl.load(state + 2)
    is_followed = tl.load(state + 3)
    text = tokens + row * tokens_stride
    expected = predictions + tl.load(places + row).to(tl.int64) * predictions_stride
    if length - seen > MOST_BEHIND:
        seen = length - MOST_BEHIND
        place = count
    for at in range(seen, length):
        token = tl.load(text + at)
        next_token = tl.load(expected + place, mask=place < count, other=-1)
        if next_token == token:
            place += 1
            reached = place
            is_followed = 1
        else:
            before = tl.load(text + at - 1, mask=at > num_prompt, other=-2)
            place = _place_behind(expected, count, before, token, reached, CHUNK)
            is_followed = 0
    tl.store(state, length)
    tl.store(state + 1, place)
    tl.store(state + 2, reached)
    tl.store(state + 3, is_followed)

    kind = tl.where(is_followed != 0, FOLLOWED, FOUND)
    own = tl.load(kinds + slot)
    trust = tl.load(limits + TRUST_AT + kind).to(tl.float32, bitcast=True)
    own_trust = tl.load(limits + TRUST_AT + own, mask=own >= 0, other=0).to(tl.float32, bitcast=True)
    taken = (place < count) & ((is_followed != 0) | (own < 0) | (trust >= own_trust))
    lane = tl.arange(0, LANES)
    guess = tl.load(expected + place + lane, mask=taken & (place + lane < count) & (lane < MOST), other=0)
    tl.store(guesses + slot * MOST + lane, guess, mask=taken & (lane < MOST))
    tl.store(numbers + slot, tl.minimum(count - place, MOST), mask=taken)
    tl.store(kinds + slot, kind, mask=taken)
