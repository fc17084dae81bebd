# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Which token goes to which expert, in the order in which a grouped product can read it; made on the device.

A pair is one choice of one token: token times choices per token, plus the choice. Pairs are ordered by expert, those
of an expert by their number, and cut into tiles of rows of one expert each. A choice that names no expert (padding,
or an expert of another device) is in no tile.

It must not know what experts compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_WIDTH = 3  # expert, first place in the order, end
_PAIRS = 1024  # a program looks at so many choices at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """Buffers of one order and its tiles; a batch may be smaller than what they are made for."""

    experts: int
    order: Tensor  # int32 [pairs]: pair at each place
    counts: Tensor  # int32 [experts]: pairs of each
    tiles: Tensor  # int32 [max tiles, TILE_WIDTH]
    num_tiles: Tensor  # int32 [1]
    arrived: Tensor  # int32 [1], zero before and after every call


def max_tiles(pairs: int, experts: int, tile_rows: int) -> int:
    """Every expert has at most one tile that is not full."""
    return pairs // tile_rows + min(experts, pairs)


def allocate_expert_plan(
    pairs: int, experts: int, *, least_rows: int = 16, device: torch.device | str = "cuda"
) -> ExpertPlan:
    """Room for batches of up to `pairs`, cut into tiles of `least_rows` or more."""

    def empty(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=torch.int32, device=device)

    return ExpertPlan(
        experts=experts,
        order=empty(pairs),
        counts=empty(experts),
        tiles=empty(max_tiles(pairs, experts, least_rows), TILE_WIDTH),
        num_tiles=empty(1),
        arrived=torch.zeros(1, dtype=torch.int32, device=device),
    )


def plan_experts(plan: ExpertPlan, chosen: Tensor, *, tile_rows: int) -> None:
    """Fills the plan for `chosen`, int32 or int64 [tokens, choices], in tiles of at most `tile_rows`."""
    pairs = chosen.numel()
    assert chosen.is_contiguous() and pairs <= plan.order.shape[0]
    assert max_tiles(pairs, plan.experts, tile_rows) <= plan.tiles.shape[0], (
        "the plan has no room for the tiles"
    )
    _order_kernel[(plan.experts,)](
        plan.order,
        plan.counts,
        plan.tiles,
        plan.num_tiles,
        plan.arrived,
        chosen,
        pairs,
        tile_rows,
        EXPERTS=triton.next_power_of_2(plan.experts),
        PAIRS=_PAIRS,
        WIDTH=TILE_WIDTH,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["pairs", "tile_rows"])
def _order_kernel(
    order,
    counts,
    tiles,
    num_tiles,
    arrived,
    chosen,
    pairs,
    tile_rows,
    EXPERTS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    expert = tl.program_id(0)
    lane = tl.arange(0, PAIRS)
    lower = tl.zeros([PAIRS], tl.int32)
    own = tl.zeros([PAIRS], tl.int32)
    for start in range(0, pairs, PAIRS):
        choice = tl.load(chosen + start + lane, mask=start + lane < pairs, other=-1).to(tl.int32)
        lower += ((choice >= 0) & (choice < expert)).to(tl.int32)
        own += (choice == expert).to(tl.int32)
    place = tl.sum(lower, 0)
    number = tl.sum(own, 0)
    if number > 0:
        for start in range(0, pairs, PAIRS):
            choice = tl.load(chosen + start + lane, mask=start + lane < pairs, other=-1).to(tl.int32)
            is_own = (choice == expert).to(tl.int32)
            rank = tl.cumsum(is_own, 0)
            tl.store(order + place + rank - 1, start + lane, mask=is_own != 0)
            place += tl.sum(is_own, 0)
    tl.store(counts + expert, number)

    experts = tl.num_programs(0)
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel") == experts - 1:
        tl.store(arrived, 0)
        every = tl.arange(0, EXPERTS)
        rows = tl.load(counts + every, mask=every < experts, other=0, cache_modifier=".cg")
        first = tl.cumsum(rows, 0) - rows
        cuts = tl.cdiv(rows, tile_rows)
        first_tile = tl.cumsum(cuts, 0) - cuts
        for index in range(tl.max(cuts, 0)):
            mask = index < cuts
            here = tiles + (first_tile + index) * WIDTH
            begin = first + index * tile_rows
            tl.store(here, every, mask=mask)
            tl.store(here + 1, begin, mask=mask)
            tl.store(here + 2, tl.minimum(begin + tile_rows, first + rows), mask=mask)
        tl.store(num_tiles, tl.sum(cuts, 0))


def reference_order(chosen: Tensor, experts: int) -> tuple[list[int], list[int]]:
    """The definition on the host: pairs in order, and how many each expert has."""
    choices = chosen.flatten().tolist()
    pairs = [pair for pair, expert in enumerate(choices) if 0 <= expert < experts]
    pairs.sort(key=lambda pair: choices[pair])  # keeps the order of equals
    return pairs, [choices.count(expert) for expert in range(experts)]
