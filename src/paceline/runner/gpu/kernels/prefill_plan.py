"""Tile list of prefill attention, made on the device once per step and shared by all layers.

A span is a run of new tokens of one row. It is cut into tiles of query tokens; within a span the last tiles, which
see most keys, come first, so that the last to start are the shortest.

It must not know what attention computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Row, first token in the batch, number of tokens, position of the first, end of the span; padded.
TILE_WIDTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """int32 columns [spans]. Spans of no tokens are skipped, so that a graph may have more than a step uses."""

    row: Tensor
    first: Tensor  # index of the span's first token among the step's tokens
    count: Tensor
    position: Tensor  # of the first token in its sequence: how many tokens are in memory before it


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """`causal`: a query sees what is before it and itself; else all see the `position` tokens of their span's row."""

    tile_tokens: int
    causal: bool
    tiles: Tensor  # int32 [max_tiles, TILE_WIDTH]
    count: Tensor  # int32 [1]

    @property
    def max_tiles(self) -> int:
        return self.tiles.shape[0]


def allocate_prefill_plan(
    max_tokens: int,
    max_spans: int,
    tile_tokens: int,
    *,
    causal: bool = True,
    device: torch.device | str = "cuda",
) -> PrefillPlan:
    """Room for `max_tokens` in any division into `max_spans`: each may have one tile that is not full."""
    max_tiles = max_tokens // tile_tokens + max_spans
    return PrefillPlan(
        tile_tokens=tile_tokens,
        causal=causal,
        tiles=torch.zeros(max_tiles, TILE_WIDTH, dtype=torch.int32, device=device),
        count=torch.zeros(1, dtype=torch.int32, device=device),
    )


def plan_prefill(plan: PrefillPlan, spans: Spans) -> None:
    number = spans.row.shape[0]
    _plan_kernel[(1,)](
        plan.tiles,
        plan.count,
        spans.row,
        spans.first,
        spans.count,
        spans.position,
        number,
        TOKENS=plan.tile_tokens,
        MAX_SPANS=max(128, triton.next_power_of_2(number)),
        WIDTH=TILE_WIDTH,
        CAUSAL=plan.causal,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["number"])
def _plan_kernel(
    tiles,
    total,
    rows,
    firsts,
    counts,
    positions,
    number,
    TOKENS: tl.constexpr,
    MAX_SPANS: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    span = tl.arange(0, MAX_SPANS)
    present = span < number
    row = tl.load(rows + span, mask=present, other=0)
    first = tl.load(firsts + span, mask=present, other=0)
    count = tl.load(counts + span, mask=present, other=0)
    position = tl.load(positions + span, mask=present, other=0)
    num_tiles = tl.cdiv(count, TOKENS)
    place = tl.cumsum(num_tiles, 0) - num_tiles
    for index in range(tl.max(num_tiles, 0)):
        mask = index < num_tiles
        offset = (num_tiles - 1 - index) * TOKENS
        here = tiles + (place + index) * WIDTH
        tl.store(here, row, mask=mask)
        tl.store(here + 1, first + offset, mask=mask)
        tl.store(here + 2, tl.minimum(count - offset, TOKENS), mask=mask)
        tl.store(here + 3, position + offset * CAUSAL, mask=mask)
        tl.store(here + 4, position + count * CAUSAL, mask=mask)
    tl.store(total, tl.sum(num_tiles, 0))
