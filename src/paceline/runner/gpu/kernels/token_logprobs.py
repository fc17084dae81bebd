"""How likely drawn tokens were: their log-probability, their rank, and the likeliest tokens, for rows that ask.

Of the raw logits, before any rule (docs/reference/sampling.md). One pass reads them once: it counts the logits above
the drawn one, adds up the mass, and keeps the largest of every 64 (a group). The likeliest 20 tokens lie in the 20
groups with the largest maxima, since each of these has a token that comes before all those of other groups; so a
second kernel, one program for each row, picks 20 groups and then 20 of their tokens, one after the other. Both are
picked by an integer that has the order of the floats in its upper half and the id, lower first, in its lower half:
what is picked once is never picked again, and equal logits come in the order of their ids.

It must not know rules, temperatures or noise. Rows that do not ask cost a program that ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.truncation import order_image

MOST_LOGPROBS = 20  # likeliest tokens that are reported
REPORT_WIDTH = 2 + 2 * MOST_LOGPROBS  # words: logprob, rank, tokens, their logprobs; floats as bits
_GROUP = 64
_TILE = 4096  # logits a program takes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobColumns:
    """Which draws are reported."""

    slot_rows: Tensor  # int32 [draws]: the row of each
    wanted: Tensor  # int32 [rows]: 0 where a row does not ask
    tokens: Tensor  # int32 [draws]: what was drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobParts:
    """What the first kernel leaves for the second."""

    peak: Tensor  # float32 [draws, tiles]
    mass: Tensor  # float32 [draws, tiles]: the sum of exp(logit - peak)
    above: Tensor  # int32 [draws, tiles]: logits larger than that of the drawn token
    largest: Tensor  # float32 [draws, groups]


def allocate_logprob_parts(draws: int, vocabulary: int, device: torch.device | str = "cuda") -> LogprobParts:
    tiles = triton.cdiv(vocabulary, _TILE)
    return LogprobParts(
        peak=torch.zeros(draws, tiles, device=device),
        mass=torch.zeros(draws, tiles, device=device),
        above=torch.zeros(draws, tiles, dtype=torch.int32, device=device),
        largest=torch.zeros(draws, tiles * (_TILE // _GROUP), device=device),
    )


def token_logprobs(report: Tensor, logits: Tensor, columns: LogprobColumns, parts: LogprobParts) -> None:
    """`report` int32 [draws, REPORT_WIDTH] of raw `logits` [draws, vocabulary], where a draw's row asks.

    Of a vocabulary that is smaller than what is reported, the tokens past its end mean nothing; so does the report of
    a row whose logits are not finite.
    """
    draws, vocabulary = logits.shape
    tiles, groups = parts.peak.shape[1], parts.largest.shape[1]
    assert logits.stride(1) == 1 and report.is_contiguous() and report.shape[1] == REPORT_WIDTH
    assert tiles == triton.cdiv(vocabulary, _TILE), "the parts are those of another vocabulary"
    _part_kernel[(draws, tiles)](
        parts.peak,
        parts.mass,
        parts.above,
        parts.largest,
        logits,
        columns.slot_rows,
        columns.wanted,
        columns.tokens,
        logits.stride(0),
        vocabulary,
        TILE=_TILE,
        GROUP=_GROUP,
        num_warps=4,
    )
    _report_kernel[(draws,)](
        report,
        parts.peak,
        parts.mass,
        parts.above,
        parts.largest,
        logits,
        columns.slot_rows,
        columns.wanted,
        columns.tokens,
        logits.stride(0),
        vocabulary,
        tiles,
        groups,
        MOST=MOST_LOGPROBS,
        PLACES=triton.next_power_of_2(MOST_LOGPROBS),
        WIDTH=REPORT_WIDTH,
        TILES=triton.next_power_of_2(tiles),
        GROUPS=triton.next_power_of_2(groups),
        GROUP=_GROUP,
        num_warps=8,
    )


@triton.jit
def _picking_order(x, number):
    """Integers that are larger for larger floats and, among equal ones, for lower numbers; none is negative."""
    image = order_image(tl.where(x == 0.0, 0.0, x))  # the zeros are equal
    return (image.to(tl.int64) << 31) | (2147483647 - number).to(tl.int64)


@triton.jit
def _number_of(order):
    return 2147483647 - (order & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _part_kernel(
    peaks,
    masses,
    aboves,
    largest,
    logits,
    slot_rows,
    wanted,
    tokens,
    logits_stride,
    vocabulary,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    if tl.load(wanted + tl.load(slot_rows + draw)) == 0:
        return
    source = logits + draw * logits_stride
    own = tl.load(source + tl.load(tokens + draw)).to(tl.float32)
    GROUPS: tl.constexpr = TILE // GROUP
    group = tl.arange(0, GROUPS)
    token = tile * TILE + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(source + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    of_group = tl.max(x, 1)
    peak = tl.max(of_group, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)  # nothing but minus infinity has no mass
    mass = tl.sum(tl.sum(tl.exp(x - base), 1), 0)
    above = tl.sum(tl.sum((x > own).to(tl.int32), 1), 0)
    place = draw * tl.num_programs(1) + tile
    tl.store(peaks + place, peak)
    tl.store(masses + place, mass)
    tl.store(aboves + place, above)
    tl.store(largest + place * GROUPS + group, of_group)


@triton.jit
def _report_kernel(
    report,
    peaks,
    masses,
    aboves,
    largest,
    logits,
    slot_rows,
    wanted,
    tokens,
    logits_stride,
    vocabulary,
    tiles,
    groups,
    MOST: tl.constexpr,
    PLACES: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + tl.load(slot_rows + draw)) == 0:
        return
    source = logits + draw * logits_stride
    into = report + draw * WIDTH

    tile = tl.arange(0, TILES)
    is_tile = tile < tiles
    peak = tl.load(peaks + draw * tiles + tile, mask=is_tile, other=float("-inf"))
    mass = tl.load(masses + draw * tiles + tile, mask=is_tile, other=0.0)
    above = tl.load(aboves + draw * tiles + tile, mask=is_tile, other=0)
    top = tl.max(peak, 0)
    log_total = tl.log(tl.sum(mass.to(tl.float64) * tl.exp((peak - top).to(tl.float64)), 0)) + top.to(
        tl.float64
    )
    own = tl.load(source + tl.load(tokens + draw)).to(tl.float64)
    tl.store(into, (own - log_total).to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(into + 1, 1 + tl.sum(above, 0))

    group = tl.arange(0, GROUPS)
    exists = group < groups
    order = _picking_order(tl.load(largest + draw * groups + group, mask=exists, other=float("-inf")), group)
    order = tl.where(exists, order, -1)
    place = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    for index in range(MOST):
        best = tl.max(order, 0)
        chosen = tl.where(place == index, _number_of(best), chosen)
        order = tl.where(order == best, -1, order)

    token = chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    present = (place < tl.minimum(groups, MOST))[:, None] & (token < vocabulary)
    x = tl.load(source + token, mask=present, other=float("-inf")).to(tl.float32)
    order = tl.where(present, _picking_order(x, token), -1)
    likeliest = tl.zeros([PLACES], tl.int32)
    for index in range(MOST):
        best = tl.max(tl.max(order, 1), 0)
        likeliest = tl.where(place == index, _number_of(best), likeliest)
        order = tl.where(order == best, -1, order)
    is_told = place < tl.minimum(vocabulary, MOST)
    logit = tl.load(source + likeliest, mask=is_told, other=0.0).to(tl.float64)
    tl.store(into + 2 + place, likeliest, mask=is_told)
    tl.store(
        into + 2 + MOST + place,
        (logit - log_total).to(tl.float32).to(tl.int32, bitcast=True),
        mask=is_told,
    )
