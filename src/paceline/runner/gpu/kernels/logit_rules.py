"""Rules that change logits in place before the draw: allowed and banned ids, min_tokens, bias and penalties.

Order and arithmetic are those of `runner/sampling/processors.py`: float32, one rounding per operation. Logits of a
narrower type are rounded to it after the lists and once more after the penalties. Only few rows have rules, so their
state is a pool of places which rows point into. A logit that is NaN or plus infinity is never hidden by a rule: the
draw has to find it.

It must not know words of several ids, nor lists longer than a place holds: those rows are the host's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LIST_ENTRIES = 512  # of all lists of a place together
NO_PLACE = -1  # of a row without rules
EVERYTHING = -1  # number of allowed ids of a row that may draw any
IN_PROMPT = 1 << 30  # added to a count: the token is in the prompt
_TILE = 4096  # vocabulary entries a program takes at once
_CHUNK = 1024  # tokens of a row that a program counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePool:
    """Rules and memory of `places` rows. The lists of a place follow each other: allowed, banned, ends, biased."""

    seen: Tensor  # int32 [places, vocabulary]: count in the output, plus IN_PROMPT for a token of the prompt
    penalties: Tensor  # float32 [places, 3]: repetition, frequency, presence; neutral: 1, 0, 0
    tokens: Tensor  # int32 [places, LIST_ENTRIES]
    bias: Tensor  # float32 [places, LIST_ENTRIES], beside the tokens that are biased
    counts: Tensor  # int32 [places, 4]: allowed (EVERYTHING: no such rule), banned, ends, biased
    stop_from: Tensor  # int32 [places]: ends are banned at positions before it


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleColumns:
    """Per row of the batch's row table; `slot_rows` says which row a slot of the batch is."""

    slot_rows: Tensor  # int32 [slots]
    place: Tensor  # int32 [rows]: in the pool, or NO_PLACE; no two rows have the same
    position: Tensor  # int64 or int32 [rows]: index of the token to be drawn in its sequence
    by_slot: bool = False  # `position` is [slots] instead: a row may have several of them


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTokens:
    """The sequences of rows as they are on the device."""

    tokens: Tensor  # int32 [rows, width]
    length: Tensor  # int32 [rows]: tokens known so far
    num_prompt: Tensor  # int32 [rows]: how many of them are the prompt; the others are output


def allocate_rule_pool(places: int, vocabulary: int, device: torch.device | str = "cuda") -> RulePool:
    """A pool in which no place has a rule; 64 places of a vocabulary of 152 k are 39 MB."""

    def zeros(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(sizes, dtype=dtype, device=device)

    pool = RulePool(
        seen=zeros(places, vocabulary),
        penalties=zeros(places, 3, dtype=torch.float32),
        tokens=zeros(places, LIST_ENTRIES),
        bias=zeros(places, LIST_ENTRIES, dtype=torch.float32),
        counts=zeros(places, 4),
        stop_from=zeros(places),
    )
    pool.penalties[:, 0] = 1.0
    pool.counts[:, 0] = EVERYTHING
    return pool


def fill_seen(pool: RulePool, rows: Tensor, place: Tensor, known: KnownTokens) -> None:
    """Counts anew what each of `rows`, int32 [n], knows; rows without a place are passed over.

    Tokens outside the vocabulary count nowhere.
    """
    vocabulary = pool.seen.shape[1]
    assert pool.seen.is_contiguous() and known.tokens.stride(1) == 1
    _clear_kernel[(rows.shape[0], triton.cdiv(vocabulary, _TILE))](
        pool.seen, rows, place, vocabulary, TILE=_TILE, num_warps=4
    )
    _count_kernel[(rows.shape[0], triton.cdiv(known.tokens.shape[1], _CHUNK))](
        pool.seen,
        rows,
        place,
        known.tokens,
        known.length,
        known.num_prompt,
        known.tokens.stride(0),
        vocabulary,
        CHUNK=_CHUNK,
        IN_PROMPT=IN_PROMPT,
        num_warps=4,
    )


def note_drawn(pool: RulePool, columns: RuleColumns, tokens: Tensor) -> None:
    """Adds the drawn `tokens`, int32 [slots], to the output of their rows; negative ones are skipped."""
    slots = tokens.shape[0]
    per_program = 128
    _note_kernel[(triton.cdiv(slots, per_program),)](
        pool.seen,
        columns.slot_rows,
        columns.place,
        tokens,
        slots,
        pool.seen.shape[1],
        SLOTS=per_program,
        num_warps=4,
    )


def apply_rules(logits: Tensor, pool: RulePool, columns: RuleColumns) -> None:
    """Changes `logits` [slots, vocabulary] of the slots whose row has a place."""
    slots, vocabulary = logits.shape
    assert logits.stride(1) == 1 and pool.seen.shape[1] == vocabulary and pool.seen.is_contiguous()
    _list_kernel[(slots,)](
        logits,
        pool.tokens,
        pool.bias,
        pool.counts,
        pool.stop_from,
        columns.slot_rows,
        columns.place,
        columns.position,
        logits.stride(0),
        vocabulary,
        ENTRIES=LIST_ENTRIES,
        TILE=_TILE,
        BY_SLOT=columns.by_slot,
        num_warps=8,
    )
    _penalty_kernel[(slots, triton.cdiv(vocabulary, 2 * _TILE))](
        logits,
        pool.seen,
        pool.penalties,
        columns.slot_rows,
        columns.place,
        logits.stride(0),
        vocabulary,
        TILE=_TILE,
        TURNS=2,
        IN_PROMPT=IN_PROMPT,
        num_warps=8,
        enable_fp_fusion=False,  # a product and a difference are two roundings
    )


def mask_logits(logits: Tensor, masks: Tensor, mask_of: Tensor) -> None:
    """Hides what guides do not allow: `masks` int32 [n, words] has a bit for each token, `mask_of` int32 [rows of
    `logits`] says which one is a row's, negative: none."""
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and masks.stride(1) == 1 and masks.shape[1] * 32 >= vocabulary
    _mask_kernel[(rows, triton.cdiv(vocabulary, _TILE))](
        logits, masks, mask_of, logits.stride(0), masks.stride(0), vocabulary, TILE=_TILE, num_warps=8
    )


@triton.jit(do_not_specialize=["logits_stride", "masks_stride", "vocabulary"])
def _mask_kernel(logits, masks, mask_of, logits_stride, masks_stride, vocabulary, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(mask_of + row).to(tl.int64)
    if number < 0:
        return
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    present = token < vocabulary
    word = tl.load(masks + number * masks_stride + token // 32, mask=present, other=-1)
    at = logits + row * logits_stride + token
    value = tl.load(at, mask=present, other=0.0)
    is_hidden = ((word >> (token % 32)) & 1) == 0
    is_usable = value < float("inf")  # neither NaN nor infinity, which the draw has to find
    tl.store(at, tl.full([TILE], float("-inf"), value.dtype), mask=present & is_hidden & is_usable)


@triton.jit(do_not_specialize=["vocabulary"])
def _clear_kernel(seen, rows, places, vocabulary, TILE: tl.constexpr):
    place = tl.load(places + tl.load(rows + tl.program_id(0))).to(tl.int64)
    if place < 0:
        return
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(seen + place * vocabulary + token, tl.zeros([TILE], tl.int32), mask=token < vocabulary)


@triton.jit(do_not_specialize=["tokens_stride", "vocabulary"])
def _count_kernel(
    seen,
    rows,
    places,
    tokens,
    lengths,
    prompts,
    tokens_stride,
    vocabulary,
    CHUNK: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    place = tl.load(places + row).to(tl.int64)
    length = tl.load(lengths + row)
    if (place < 0) | (tl.program_id(1) * CHUNK >= length):
        return
    index = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(tokens + row * tokens_stride + index, mask=index < length, other=-1)
    counts = (token >= 0) & (token < vocabulary)
    is_prompt = index < tl.load(prompts + row)
    at = seen + place * vocabulary + token
    # Integer sums and bits come out the same in any order.
    tl.atomic_or(at, tl.full([CHUNK], IN_PROMPT, tl.int32), mask=counts & is_prompt, sem="relaxed")
    tl.atomic_add(
        at, tl.full([CHUNK], 1, tl.int32), mask=counts & (index >= tl.load(prompts + row)), sem="relaxed"
    )


@triton.jit(do_not_specialize=["slots", "vocabulary"])
def _note_kernel(seen, slot_rows, places, tokens, slots, vocabulary, SLOTS: tl.constexpr):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    present = slot < slots
    row = tl.load(slot_rows + slot, mask=present, other=0)
    place = tl.load(places + row, mask=present, other=-1).to(tl.int64)
    token = tl.load(tokens + slot, mask=present, other=-1)
    counts = (place >= 0) & (token >= 0) & (token < vocabulary)
    # A row has one slot, and a place one row: nothing else adds here. Padding slots may share a row without a place.
    at = seen + place * vocabulary + token
    tl.store(at, tl.load(at, mask=counts, other=0) + 1, mask=counts)


@triton.jit
def _is_usable(x):
    return (x == x) & (x != float("inf"))


@triton.jit(do_not_specialize=["logits_stride", "vocabulary"])
def _list_kernel(
    logits,
    list_tokens,
    list_bias,
    list_counts,
    stop_from,
    slot_rows,
    places,
    positions,
    logits_stride,
    vocabulary,
    ENTRIES: tl.constexpr,
    TILE: tl.constexpr,
    BY_SLOT: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(slot_rows + slot)
    place = tl.load(places + row).to(tl.int64)
    if place < 0:
        return
    allowed = tl.load(list_counts + place * 4)
    banned = tl.load(list_counts + place * 4 + 1)
    ends = tl.load(list_counts + place * 4 + 2)
    biased = tl.load(list_counts + place * 4 + 3)
    entry = tl.arange(0, ENTRIES)
    first = tl.maximum(allowed, 0)
    is_allowed = entry < first
    too_early = tl.load(positions + (slot if BY_SLOT else row)).to(tl.int64) < tl.load(stop_from + place)
    num_bans = tl.where(too_early, banned + ends, banned)
    is_ban = (entry >= first) & (entry < first + num_bans)
    first_biased = first + banned + ends
    is_biased = (entry >= first_biased) & (entry < first_biased + biased)
    token = tl.load(list_tokens + place * ENTRIES + entry)
    source = logits + slot * logits_stride
    here = source + token
    if allowed >= 0:
        kept = tl.load(here, mask=is_allowed)
        tl.debug_barrier()  # every thread has read before one writes; the same below
        for start in range(0, vocabulary, TILE):
            at = start + tl.arange(0, TILE)
            x = tl.load(source + at, mask=at < vocabulary, other=float("inf"))
            tl.store(source + at, tl.full([TILE], float("-inf"), tl.float32).to(x.dtype), mask=_is_usable(x))
        tl.debug_barrier()
        tl.store(here, kept, mask=is_allowed)
        tl.debug_barrier()
    if num_bans > 0:
        before = tl.load(here, mask=is_ban, other=float("inf"))
        tl.debug_barrier()
        tl.store(
            here, tl.full([ENTRIES], float("-inf"), tl.float32).to(before.dtype), mask=_is_usable(before)
        )
        tl.debug_barrier()
        # What would leave no token at all is not banned.
        left = num_bans > 0
        if allowed >= 0:
            left = tl.max(tl.load(here, mask=is_allowed, other=float("-inf")).to(tl.float32), 0) > float(
                "-inf"
            )
        elif num_bans >= vocabulary:
            left = _largest(source, vocabulary, TILE) > float("-inf")
        tl.debug_barrier()
        tl.store(here, before, mask=is_ban & (left == 0))
        tl.debug_barrier()
    x = tl.load(here, mask=is_biased, other=0.0).to(tl.float32)
    x += tl.load(list_bias + place * ENTRIES + entry, mask=is_biased, other=0.0)
    tl.store(here, x.to(logits.dtype.element_ty), mask=is_biased)


@triton.jit
def _largest(source, vocabulary, TILE: tl.constexpr):
    best = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocabulary, TILE):
        at = start + tl.arange(0, TILE)
        best = tl.maximum(
            best, tl.load(source + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        )
    return tl.max(best, 0)


@triton.jit(do_not_specialize=["logits_stride", "vocabulary"])
def _penalty_kernel(
    logits,
    seen,
    penalties,
    slot_rows,
    places,
    logits_stride,
    vocabulary,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
    IN_PROMPT: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    place = tl.load(places + tl.load(slot_rows + slot)).to(tl.int64)
    if place < 0:
        return
    repetition = tl.load(penalties + place * 3)
    frequency = tl.load(penalties + place * 3 + 1)
    presence = tl.load(penalties + place * 3 + 2)
    if (repetition == 1.0) & (frequency == 0.0) & (presence == 0.0):
        return
    for turn in range(TURNS):
        token = (tl.program_id(1) * TURNS + turn) * TILE + tl.arange(0, TILE)
        state = tl.load(seen + place * vocabulary + token, mask=token < vocabulary, other=0)
        here = logits + slot * logits_stride + token
        x = tl.load(here, mask=state != 0, other=0.0).to(tl.float32)
        if repetition != 1.0:
            x = tl.where(x > 0, tl.math.div_rn(x, repetition), x * repetition)
        count = state & (IN_PROMPT - 1)
        x -= frequency * count.to(tl.float32)
        x = tl.where(count > 0, x - presence, x)
        tl.store(here, x.to(logits.dtype.element_ty), mask=state != 0)
