"""Draws a token per row from its logits: the largest, or the largest of logit / temperature + Gumbel noise.

One pass over the logits, no softmax. The definition (docs/reference/sampling.md) is in float64. The pass scores in
float32 with the device's fast logarithm, which errs by about 1e-5, and keeps two candidates of every tile; the second
kernel scores those few by the definition and takes the largest, lowest id among equals. A winner is missed only where
three scores of a tile, or two of one lane of a tile, lie that close together: by estimate less than once in 1e8 draws.
(Below a temperature of 0.01 float32 is coarser, and so is that bound where many logits are equal.)

It must not know penalties, masks, top-k or top-p: what it is given is drawn from. The noise is that of
`runner/sampling/noise.py`, word for word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GREEDY_BELOW = 1e-5  # temperatures under this take the largest logit
_TURN = 1024  # logits a program takes at once
_LANES = tl.constexpr(4)  # tokens served by one call of Philox
_KEPT = 2  # candidates of a tile


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingColumns:
    """Per row of the batch's row table; `slot_rows` says which row a slot of the batch is."""

    slot_rows: Tensor  # int32 [slots]
    temperature: Tensor  # float64 [rows]
    seed: Tensor  # int64 [rows]: the seed modulo 2^64, as bits
    position: Tensor  # int64 or int32 [rows]: index of the token to be drawn in its sequence
    by_slot: bool = False  # `position` is [slots] instead: a row may have several of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What the first kernel leaves for the second."""

    turns: int  # of a program: a tile is that many times 1,024 logits
    token: Tensor  # int32 [slots, tiles, 2]
    flags: Tensor  # int32 [slots, tiles]: 1 where a tile holds NaN or plus infinity


def allocate_candidates(
    slots: int, vocabulary: int, device: torch.device | str = "cuda", *, turns: int = 0
) -> Candidates:
    """Large batches fill the device with large tiles; a few rows need small ones for that."""
    turns = turns or (8 if slots >= 64 else 2)
    tiles = triton.cdiv(vocabulary, turns * _TURN)
    return Candidates(
        turns=turns,
        token=torch.empty(slots, tiles, _KEPT, dtype=torch.int32, device=device),
        flags=torch.empty(slots, tiles, dtype=torch.int32, device=device),
    )


def sample(
    tokens: Tensor, finite: Tensor, logits: Tensor, columns: SamplingColumns, candidates: Candidates
) -> None:
    """`tokens` int32 and `finite` uint8 [slots] of `logits` [slots, vocabulary]. A row not finite gets token 0."""
    slots, vocabulary = logits.shape
    assert logits.stride(1) == 1
    tiles = candidates.flags.shape[1]
    _score_kernel[(slots, tiles)](
        candidates.token,
        candidates.flags,
        logits,
        columns.slot_rows,
        columns.temperature,
        columns.seed,
        columns.position,
        logits.stride(0),
        vocabulary,
        TURN=_TURN,
        TURNS=candidates.turns,
        BY_SLOT=columns.by_slot,
        GREEDY=GREEDY_BELOW,
        FAST_LOG=not triton.knobs.runtime.interpret,
        num_warps=4,
    )
    _settle_kernel[(slots,)](
        tokens,
        finite,
        candidates.token,
        candidates.flags,
        logits,
        columns.slot_rows,
        columns.temperature,
        columns.seed,
        columns.position,
        logits.stride(0),
        tiles,
        LANES=triton.next_power_of_2(tiles * _KEPT),
        BY_SLOT=columns.by_slot,
        GREEDY=GREEDY_BELOW,
        num_warps=max(1, min(8, triton.next_power_of_2(tiles * _KEPT) // 32)),
    )


@triton.jit
def noise_words(seed, position, group):
    """The four words of each group of four tokens."""
    zero = group.to(tl.uint32) * 0
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, zero + low, zero + high, group.to(tl.uint32), zero, 10)


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def noise_in_bits(word, FAST: tl.constexpr):
    """-log2(-log2(u)): the noise over log(2), but for a constant. Near 1 it comes from v = 1 - u, of which float32
    knows more digits than of u."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    v = ((4294967295 - word).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    near_one = v * (1.4426950 + v * (0.7213475 + v * (0.4808983 + v * 0.3606738)))
    return -_log2(tl.where(v < 0.03, near_one, -_log2(u, FAST)), FAST)


@triton.jit
def _noise_float64(word):
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(u))


@triton.jit
def _load(source, token, vocabulary):
    return tl.load(source + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)


@triton.jit
def _is_bad(x):
    return ((x != x) | (x == float("inf"))).to(tl.int32)


@triton.jit
def _better(best, best_token, score, token):
    is_better = score > best  # the first of equals stays
    return tl.where(is_better, score, best), tl.where(is_better, token, best_token)


@triton.jit(do_not_specialize=["logits_stride", "vocabulary"])
def _score_kernel(
    candidate_token,
    candidate_flags,
    logits,
    slot_rows,
    temperatures,
    seeds,
    positions,
    logits_stride,
    vocabulary,
    TURN: tl.constexpr,
    TURNS: tl.constexpr,
    BY_SLOT: tl.constexpr,
    GREEDY: tl.constexpr,
    FAST_LOG: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = tl.load(slot_rows + slot)
    temperature = tl.load(temperatures + row)
    seed = tl.load(seeds + row)
    position = tl.load(positions + (slot if BY_SLOT else row)).to(tl.int64)
    per_bit = (1.4426950408889634 / tl.maximum(temperature, GREEDY)).to(tl.float32)
    GROUPS: tl.constexpr = TURN // _LANES
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    best_token = tl.zeros([GROUPS], tl.int32)
    bad = tl.zeros([GROUPS], tl.int32)
    source = logits + slot * logits_stride
    for turn in range(TURNS):
        # A thread has whole groups of four: no words move between threads.
        group = (tile * TURNS + turn) * GROUPS + tl.arange(0, GROUPS)
        x0 = _load(source, group * _LANES, vocabulary)
        x1 = _load(source, group * _LANES + 1, vocabulary)
        x2 = _load(source, group * _LANES + 2, vocabulary)
        x3 = _load(source, group * _LANES + 3, vocabulary)
        bad = bad | _is_bad(x0) | _is_bad(x1) | _is_bad(x2) | _is_bad(x3)
        if temperature >= GREEDY:
            w0, w1, w2, w3 = noise_words(seed, position, group)
            x0 = x0 * per_bit + noise_in_bits(w0, FAST_LOG)
            x1 = x1 * per_bit + noise_in_bits(w1, FAST_LOG)
            x2 = x2 * per_bit + noise_in_bits(w2, FAST_LOG)
            x3 = x3 * per_bit + noise_in_bits(w3, FAST_LOG)
        best, best_token = _better(best, best_token, x0, group * _LANES)
        best, best_token = _better(best, best_token, x1, group * _LANES + 1)
        best, best_token = _better(best, best_token, x2, group * _LANES + 2)
        best, best_token = _better(best, best_token, x3, group * _LANES + 3)

    place = slot * tl.num_programs(1) + tile
    NO_TOKEN: tl.constexpr = 2147483647
    winner = tl.min(tl.where(best == tl.max(best, 0), best_token, NO_TOKEN), 0)
    rest = tl.where(best_token == winner, float("-inf"), best)
    second = tl.min(tl.where(rest == tl.max(rest, 0), best_token, NO_TOKEN), 0)
    tl.store(candidate_token + place * 2, winner)
    tl.store(candidate_token + place * 2 + 1, second)
    tl.store(candidate_flags + place, tl.max(bad, 0))


@triton.jit(do_not_specialize=["logits_stride", "tiles"])
def _settle_kernel(
    tokens,
    finite,
    candidate_token,
    candidate_flags,
    logits,
    slot_rows,
    temperatures,
    seeds,
    positions,
    logits_stride,
    tiles,
    LANES: tl.constexpr,
    BY_SLOT: tl.constexpr,
    GREEDY: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(slot_rows + slot)
    temperature = tl.load(temperatures + row)
    lane = tl.arange(0, LANES)
    present = lane < tiles * 2
    token = tl.load(candidate_token + slot * tiles * 2 + lane, mask=present, other=0)
    logit = tl.load(logits + slot * logits_stride + token, mask=present, other=float("-inf")).to(tl.float32)
    bad = tl.load(candidate_flags + slot * tiles + lane, mask=lane < tiles, other=0)
    top = tl.max(logit, 0)
    is_finite = (tl.max(bad, 0) == 0) & (top > float("-inf"))
    score = logit.to(tl.float64)
    if temperature >= GREEDY:
        position = tl.load(positions + (slot if BY_SLOT else row)).to(tl.int64)
        w0, w1, w2, w3 = noise_words(tl.load(seeds + row), position, token // _LANES)
        in_group = token % _LANES
        word = tl.where(in_group == 0, w0, tl.where(in_group == 1, w1, tl.where(in_group == 2, w2, w3)))
        # The definition subtracts the row's largest logit, which may have lost in its tile; taking the same
        # constant off every score changes the order of none.
        score = (score - top.to(tl.float64)) / temperature + _noise_float64(word)
    winner = tl.min(tl.where(present & (score == tl.max(score, 0)), token, 2147483647), 0)
    tl.store(tokens + slot, tl.where(is_finite, winner, 0))
    tl.store(finite + slot, is_finite.to(tl.uint8))
