"""Texts that have ended well, on the device: a ring of their tokens, and a hash of their threes and sixes.

The same as `History` of `runner/drafts.py`: the tenant is in the hash, each place of the ring knows whose text it is,
and what is found is compared with the ring, so that a collision, or a text that was written over, is never drafted
from. A text enters when its row leaves, by one program, if the row has come to its end; where two of its places have
the same hash either may stay.

It must not know why a row left: the host leaves out those that failed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.drafts import FATES, LONGEST, OF_HISTORY, SIX, THREE
from paceline.runner.gpu.kernels.draft_layout import TRUST, Proposals
from paceline.runner.gpu.kernels.drafters import DraftColumns
from paceline.runner.gpu.kernels.step_rows import RowColumns

TOKENS = 1 << 20  # of the ring, and entries of the hash
_PRIME = tl.constexpr(0x9E3779B97F4A7C15)
_FOLD = tl.constexpr(29)
_CHUNK = 1024
_PER_PROGRAM = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The newest texts; `size` is a power of two."""

    tokens: Tensor  # int32 [size]; -1 behind each text
    owners: Tensor  # int64 [size]: the number that each text was added with
    keys: Tensor  # int32 [size]: upper half of a hash, as bits
    places: Tensor  # int32 [size]: behind the tokens that have this hash
    end: Tensor  # int32 [1]: of the newest text


def allocate_ring(size: int = TOKENS, device: torch.device | str = "cuda") -> Ring:
    assert size & (size - 1) == 0, "the hash is cut to its lowest bits"

    def room(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    return Ring(
        tokens=room(size).fill_(-1),
        owners=room(size, torch.int64),
        keys=room(size),
        places=room(size),
        end=room(1),
    )


def remember(ring: Ring, rows: RowColumns, texts: Tensor, row: int) -> None:
    """Takes the tokens of `row` in, if it has ended. `texts` int64 [rows]: texts of one number are found by rows of
    the same number alone."""
    _remember_kernel[(1,)](
        ring.tokens,
        ring.owners,
        ring.keys,
        ring.places,
        ring.end,
        rows.length,
        rows.active,
        rows.tokens,
        texts,
        row,
        rows.tokens.stride(0),
        SIZE=ring.tokens.shape[0],
        CHUNK=_CHUNK,
        THREE=THREE,
        SIX=SIX,
        num_warps=4,
    )


@triton.jit
def _folded(value, token):
    value = (value ^ token.to(tl.uint64)) * _PRIME
    return value ^ (value >> _FOLD)


@triton.jit
def _high(value):
    return (value >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["row", "tokens_stride"])
def _remember_kernel(
    ring,
    owners,
    keys,
    places,
    ends,
    lengths,
    active,
    tokens,
    texts,
    row,
    tokens_stride,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    THREE: tl.constexpr,
    SIX: tl.constexpr,
):
    length = tl.load(lengths + row)
    if (tl.load(active + row) != 0) | (length < 1):
        return
    count = tl.minimum(length, SIZE // 4)
    text = tokens + tl.cast(row, tl.int64) * tokens_stride + length - count
    owner = tl.load(texts + row)
    start = tl.load(ends)
    start = tl.where(start + count + 1 > SIZE, 0, start)
    for begin in range(0, count, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        here = at < count
        tl.store(ring + start + at, tl.load(text + at, mask=here), mask=here)
        tl.store(owners + start + at, owner + tl.zeros([CHUNK], tl.int64), mask=here)
        three = tl.zeros([CHUNK], tl.uint64) + (owner + THREE).to(tl.uint64)
        six = tl.zeros([CHUNK], tl.uint64) + (owner + SIX).to(tl.uint64)
        for back in tl.static_range(SIX):
            token = tl.load(text + at - SIX + back, mask=here & (at >= SIX - back), other=0)
            six = _folded(six, token)
            if back >= SIX - THREE:
                three = _folded(three, token)
        _place(keys, places, three, start + at, here & (at >= THREE), SIZE)
        _place(keys, places, six, start + at, here & (at >= SIX), SIZE)
    tl.store(ring + start + count, -1)
    tl.store(ends, start + count + 1)


@triton.jit
def _place(keys, places, value, place, mask, SIZE: tl.constexpr):
    slot = (value % SIZE).to(tl.int64)
    tl.store(keys + slot, _high(value), mask=mask)
    tl.store(places + slot, place, mask=mask)


def propose_history(
    into: Proposals,
    rows: RowColumns,
    drafts: DraftColumns,
    slot_rows: Tensor,
    ring: Ring,
    texts: Tensor,
    limits: Tensor,
    fates: int = FATES,
) -> None:
    """Guesses from earlier texts replace those that rows of `slot_rows` [slots] have, where they are trusted more;
    `limits` as in draft_layout.py. `fates`: of a row's last drafts, how many are told apart."""
    slots, most = slot_rows.shape[0], into.guess.shape[1]
    _history_kernel[(triton.cdiv(slots, _PER_PROGRAM),)](
        into.kind,
        into.number,
        into.guess,
        slot_rows,
        rows.length,
        rows.active,
        rows.tokens,
        drafts.may_draft,
        drafts.fate,
        ring.tokens,
        ring.owners,
        ring.keys,
        ring.places,
        texts,
        limits,
        rows.tokens.stride(0),
        slots,
        MOST=most,
        SLOTS=_PER_PROGRAM,
        SIZE=ring.tokens.shape[0],
        THREE=THREE,
        SIX=SIX,
        LONGEST=LONGEST,
        FATES=fates,
        OF_HISTORY=OF_HISTORY,
        TRUST_AT=TRUST,
        num_warps=1,
    )


@triton.jit
def _find(text, length, owner, ring, owners, keys, places, runs, SIZE: tl.constexpr, GRAM: tl.constexpr):
    """Where the last GRAM tokens of each row stood last; 0: nowhere."""
    has = runs & (length >= GRAM)
    value = (owner + GRAM).to(tl.uint64)
    for back in tl.static_range(GRAM):
        value = _folded(value, tl.load(text + length - GRAM + back, mask=has, other=0))
    slot = (value % SIZE).to(tl.int64)
    place = tl.load(places + slot, mask=has, other=0)
    has = has & (tl.load(keys + slot, mask=has, other=0) == _high(value)) & (place >= GRAM)
    has = has & (tl.load(owners + place - 1, mask=has, other=-1) == owner)
    for back in tl.static_range(GRAM):
        there = tl.load(ring + place - GRAM + back, mask=has, other=-1)
        has = has & (there == tl.load(text + length - GRAM + back, mask=has, other=-2))
    return tl.where(has, place, 0)


@triton.jit(do_not_specialize=["tokens_stride", "slots"])
def _history_kernel(
    kinds,
    numbers,
    guesses,
    slot_rows,
    lengths,
    active,
    tokens,
    may_draft,
    fates,
    ring,
    owners,
    keys,
    places,
    texts,
    limits,
    tokens_stride,
    slots,
    MOST: tl.constexpr,
    SLOTS: tl.constexpr,
    SIZE: tl.constexpr,
    THREE: tl.constexpr,
    SIX: tl.constexpr,
    LONGEST: tl.constexpr,
    FATES: tl.constexpr,
    OF_HISTORY: tl.constexpr,
    TRUST_AT: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0).to(tl.int64)
    runs = present & (tl.load(active + row, mask=present, other=0) != 0)
    runs = runs & (tl.load(may_draft + row, mask=runs, other=0) != 0)
    length = tl.load(lengths + row, mask=runs, other=0)
    owner = tl.load(texts + row, mask=runs, other=0)
    text = tokens + row * tokens_stride
    place = _find(text, length, owner, ring, owners, keys, places, runs, SIZE, SIX)
    short = _find(text, length, owner, ring, owners, keys, places, runs & (place == 0), SIZE, THREE)
    place = tl.where(place > 0, place, short)
    found = place > 0

    agreed = tl.zeros([SLOTS], tl.int32)
    agrees = found
    for back in tl.static_range(1, LONGEST + 1):
        agrees = agrees & (place >= back) & (length >= back)
        there = tl.load(ring + place - back, mask=agrees, other=-1)
        agrees = agrees & (there == tl.load(text + length - back, mask=agrees, other=-2))
        agreed += agrees.to(tl.int32)
    fate = tl.load(fates + row, mask=found, other=0) % FATES
    kind = OF_HISTORY + tl.minimum(agreed - THREE, 3) * FATES + fate
    own = tl.load(kinds + slot, mask=present, other=-1)
    trust = tl.load(limits + TRUST_AT + kind, mask=found, other=0).to(tl.float32, bitcast=True)
    own_trust = tl.load(limits + TRUST_AT + own, mask=found & (own >= 0), other=0).to(
        tl.float32, bitcast=True
    )
    first = tl.load(ring + place, mask=found, other=-1)
    taken = found & (first >= 0) & ((own < 0) | (trust > own_trust))

    number = tl.zeros([SLOTS], tl.int32)
    goes_on = taken
    for depth in tl.static_range(MOST):
        token = tl.load(ring + place + depth, mask=goes_on & (place + depth < SIZE), other=-1)
        goes_on = goes_on & (token >= 0)
        number += goes_on.to(tl.int32)
        tl.store(guesses + slot * MOST + depth, tl.maximum(token, 0), mask=taken)
    tl.store(kinds + slot, kind, mask=taken)
    tl.store(numbers + slot, number, mask=taken)
