"""Min-p, top-k and top-p: the lowest logit each row keeps, and minus infinity for what is below it.

The definition is that of `runner/sampling/processors.py`: tokens stay or go by value, equals together. Nothing is
sorted. Floats are compared as integers of the same order, and the one looked for is found digit by digit: a pass adds
what each value of the digit holds, counts for top-k and masses for top-p, and whichever program of a row arrives last
picks the value where the sum from above reaches what is needed. Masses are exp((logit - top) /
temperature) in float64, rounded to units of 2^-44: integers, so that sums do not depend on their order. Against the
definition's float64 sums a token at the edge of top-p may differ where the two meet within about 1e-11.

It must not know penalties or noise. A row without a temperature, or whose logits are not finite, is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GREEDY_BELOW = 1e-5  # temperatures under this take the largest logit, which is never cut
MAX_VOCABULARY = 2**19 - 1  # this number of masses of 1 fits the integers they are added in
# Digits of the 32-bit image as (shift, bits), from the highest. Counting within a program costs by the number of bins;
# masses are added in memory, where many bins keep programs apart. A bf16 has all its bits in the upper half.
_COUNT_DIGITS = ((24, 8), (16, 8), (8, 8), (0, 8))
_MASS_DIGITS = ((21, 11), (10, 11), (0, 10))
_COUNT_DIGITS_BF16 = ((24, 8), (16, 8))
_MASS_DIGITS_BF16 = ((21, 11), (16, 5))
_ROOM = 2048  # bins there is memory for
_TURN = 4096  # logits a program takes at once
_TURNS = 4
_LOWEST = -(2**31)  # image of no float


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationColumns:
    """Per row of the batch's row table; `slot_rows` says which row a slot of the batch is."""

    slot_rows: Tensor  # int32 [slots]
    temperature: Tensor  # float64 [rows]
    top_k: Tensor  # int32 [rows]; 0, or the vocabulary and more: off
    top_p: Tensor  # float64 [rows]; 1: off
    min_p: Tensor  # float64 [rows]; 0: off


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorSearch:
    """What the passes leave for each other, and the floors they find. 16 KB a slot."""

    floor: Tensor  # float32 [slots]: lowest logit kept, minus infinity where nothing is cut
    top: Tensor  # float32 [slots]
    state: Tensor  # int64 [slots, 3]: digits found, sum above them, sum needed
    histogram: Tensor  # int64 [slots, bins], zero before and after every call
    arrived: Tensor  # int32 [slots], zero before and after every call
    peak: Tensor  # int32 [slots], lowest integer before and after every call


def allocate_floor_search(slots: int, device: torch.device | str = "cuda") -> FloorSearch:
    return FloorSearch(
        floor=torch.empty(slots, dtype=torch.float32, device=device),
        top=torch.empty(slots, dtype=torch.float32, device=device),
        state=torch.zeros(slots, 3, dtype=torch.int64, device=device),
        histogram=torch.zeros(slots, _ROOM, dtype=torch.int64, device=device),
        arrived=torch.zeros(slots, dtype=torch.int32, device=device),
        peak=torch.full((slots,), _LOWEST, dtype=torch.int32, device=device),
    )


def truncate(logits: Tensor, columns: TruncationColumns, search: FloorSearch) -> None:
    """`logits` [slots, vocabulary] that their row does not keep become minus infinity."""
    find_floors(logits, columns, search)
    slots, vocabulary = logits.shape
    _mask_kernel[(slots, triton.cdiv(vocabulary, _TURNS * _TURN))](
        logits, search.floor, logits.stride(0), vocabulary, TURN=_TURN, TURNS=_TURNS, num_warps=8
    )


def find_floors(logits: Tensor, columns: TruncationColumns, search: FloorSearch) -> None:
    """Writes `search.floor` of every slot and leaves the logits alone."""
    slots, vocabulary = logits.shape
    assert logits.stride(1) == 1 and slots <= search.floor.shape[0] and vocabulary <= MAX_VOCABULARY
    is_bf16 = logits.dtype == torch.bfloat16
    count_digits = _COUNT_DIGITS_BF16 if is_bf16 else _COUNT_DIGITS
    mass_digits = _MASS_DIGITS_BF16 if is_bf16 else _MASS_DIGITS
    for of_mass, digits in ((False, count_digits), (True, mass_digits)):
        for shift, bits in digits:
            _narrow_kernel[(slots, triton.cdiv(vocabulary, _TURNS * _TURN))](
                search.floor,
                search.top,
                search.state,
                search.histogram,
                search.arrived,
                search.peak,
                logits,
                columns.slot_rows,
                columns.temperature,
                columns.top_k,
                columns.top_p,
                columns.min_p,
                logits.stride(0),
                vocabulary,
                OF_MASS=of_mass,
                IS_LAST=(shift, bits) == digits[-1],
                SHIFT=shift,
                BITS=bits,
                ROOM=_ROOM,
                TURN=_TURN,
                TURNS=_TURNS,
                GREEDY=GREEDY_BELOW,
                LOWEST=_LOWEST,
                num_warps=8,
                enable_fp_fusion=False,  # min-p's bound is a product and a sum, each rounded
            )


@triton.jit
def order_image(x):
    """Unsigned integers in the order of the floats. The zeros are two, but floors are compared as floats again."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _float_of(image):
    signed = (image ^ 0x80000000).to(tl.int32, bitcast=True)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _float_of_digits(digits, SHIFT: tl.constexpr):
    """The float whose lower bits, if there are digits not yet looked at, are zero: those of its image are then ones
    where it is negative."""
    image = digits << SHIFT
    return _float_of(tl.where(image < 0x80000000, image | ((1 << SHIFT) - 1), image))


@triton.jit
def _needed(held, top_p):
    """The mass that the kept tokens have to reach."""
    total = tl.sum(held, 0)
    return tl.minimum(tl.ceil(top_p * total.to(tl.float64)).to(tl.int64), total)


@triton.jit
def _smallest_from(bound):
    """The smallest float32 that is not below a float64."""
    near = bound.to(tl.float32)
    following = _float_of(order_image(near) + 1)
    return tl.where(near.to(tl.float64) < bound, following, near)


@triton.jit
def _units(x, top, temperature):
    """The mass of logits in units of 2^-44."""
    weight = tl.exp((x.to(tl.float64) - top.to(tl.float64)) / temperature)
    return (weight * 17592186044416.0 + 0.5).to(tl.int64)


@triton.jit(do_not_specialize=["logits_stride", "vocabulary"])
def _narrow_kernel(
    floors,
    tops,
    states,
    histograms,
    arrived,
    peaks,
    logits,
    slot_rows,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    logits_stride,
    vocabulary,
    OF_MASS: tl.constexpr,
    IS_LAST: tl.constexpr,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    ROOM: tl.constexpr,
    TURN: tl.constexpr,
    TURNS: tl.constexpr,
    GREEDY: tl.constexpr,
    LOWEST: tl.constexpr,
):
    IS_FIRST: tl.constexpr = SHIFT + BITS == 32
    BINS: tl.constexpr = 1 << BITS
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(slot_rows + slot)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    cuts_k = (top_k > 0) & (top_k < vocabulary)
    cuts_p = top_p < 1.0
    FINDS_TOP: tl.constexpr = IS_FIRST and not OF_MASS  # the very first pass
    if FINDS_TOP:
        cuts = cuts_k | cuts_p | (min_p > 0.0)
        if (temperature < GREEDY) | (cuts == 0):
            if tl.program_id(1) == 0:
                tl.store(floors + slot, float("-inf"))
            return
        top, floor = 0.0, float("-inf")
    else:
        wanted = cuts_p if OF_MASS else cuts_k
        if (temperature < GREEDY) | (wanted == 0):
            return
        top = tl.load(tops + slot)
        floor = tl.load(floors + slot)
        if (top != top) | (top == float("inf")) | (top == float("-inf")):
            return

    found = tl.load(states + slot * 3).to(tl.uint32)
    source = logits + slot * logits_stride
    histogram = histograms + slot * ROOM
    bins = tl.arange(0, BINS)
    peak = tl.full([TURN], LOWEST, tl.int32)
    counts = tl.zeros([BINS], tl.int32)
    begin = tl.program_id(1) * TURNS * TURN
    for start in range(begin, tl.minimum(begin + TURNS * TURN, vocabulary), TURN):
        token = start + tl.arange(0, TURN)
        present = token < vocabulary
        x = tl.load(source + token, mask=present, other=float("-inf")).to(tl.float32)
        image = order_image(x)
        if FINDS_TOP:
            peak = tl.maximum(
                peak, tl.where(present, (image ^ 0x80000000).to(tl.int32, bitcast=True), LOWEST)
            )
        live = present
        if not IS_FIRST:
            live = live & ((image >> (SHIFT + BITS)) == found)
        digit = ((image >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
        if OF_MASS:
            live = live & (x >= floor)
            if tl.max(live.to(tl.int32), 0) > 0:  # few tokens are left after top-k: most tiles have none
                units = _units(x, top, temperature)
                tl.atomic_add(histogram + digit, units, mask=live & (units > 0), sem="relaxed")
        elif cuts_k:
            counts += tl.histogram(digit, BINS, mask=live)
    if FINDS_TOP:
        tl.atomic_max(peaks + slot, tl.max(peak, 0), sem="relaxed")
    if (not OF_MASS) and cuts_k:
        tl.atomic_add(histogram + bins, counts.to(tl.int64), mask=counts > 0, sem="relaxed")

    tl.debug_barrier()  # the sums of every thread come before the one that announces them
    if tl.atomic_add(arrived + slot, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrived + slot, 0)
        if FINDS_TOP:
            signed = tl.atomic_xchg(peaks + slot, LOWEST)
            top = _float_of((signed ^ LOWEST).to(tl.uint32, bitcast=True))
            tl.store(tops + slot, top)
            usable = (top > float("-inf")) & (top < float("inf"))
            if usable & (min_p > 0.0):
                floor = _smallest_from(top.to(tl.float64) + temperature * tl.log(min_p))
            tl.store(floors + slot, floor)
        if OF_MASS or cuts_k:
            held = tl.load(histogram + bins, cache_modifier=".cg")
            tl.store(histogram + bins, tl.zeros([BINS], tl.int64))
            above = tl.load(states + slot * 3 + 1)
            needed = tl.load(states + slot * 3 + 2)
            if IS_FIRST:
                above = tl.zeros([], tl.int64)
                needed = _needed(held, top_p) if OF_MASS else top_k.to(tl.int64)
            best = tl.max(tl.where(above + tl.cumsum(held, 0, reverse=True) >= needed, bins, 0), 0)
            digits = best.to(tl.uint32)
            if not IS_FIRST:
                digits = digits | (found << BITS)
            tl.store(states + slot * 3, digits.to(tl.int64))
            tl.store(states + slot * 3 + 1, above + tl.sum(tl.where(bins > best, held, 0), 0))
            tl.store(states + slot * 3 + 2, needed)
            if IS_LAST:
                tl.store(floors + slot, tl.maximum(floor, _float_of_digits(digits, SHIFT)))


@triton.jit(do_not_specialize=["logits_stride", "vocabulary"])
def _mask_kernel(logits, floors, logits_stride, vocabulary, TURN: tl.constexpr, TURNS: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    floor = tl.load(floors + slot)
    if floor == float("-inf"):
        return
    begin = tl.program_id(1) * TURNS * TURN
    for start in range(begin, tl.minimum(begin + TURNS * TURN, vocabulary), TURN):
        token = start + tl.arange(0, TURN)
        here = logits + slot * logits_stride + token
        x = tl.load(here, mask=token < vocabulary, other=float("inf"))
        # A NaN is not below the floor: it stays for the draw to find.
        tl.store(here, tl.full([TURN], float("-inf"), tl.float32).to(x.dtype), mask=x.to(tl.float32) < floor)
