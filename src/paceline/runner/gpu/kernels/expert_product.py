"""Feed-forward of a mixture of experts: each token through the experts it chose, and their sum by weight.

Two grouped products over the tiles planned here: gate and up together, with SwiGLU before anything is stored, then
down, whose rows are stored by pair. The last kernel adds the choices of a token in their order, in float32: no
atomics, the same bits on every run. Other tokens of its experts do not change a token's result, as long as the batch
is cut into tiles of the same size. Weights are the tall operand of the matrix instruction, so that experts with few
tokens waste little.

It must not know the router, nor how experts lie on disk. How a batch is cut is a table in this file.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.block_product import widened
from paceline.runner.gpu.kernels.packed_product import COLUMNS_TOGETHER, as_numbers, unpacked, words_of

# Which token goes to which expert, in the order in which a grouped product can read it; made on the device.
#
# A pair is one choice of one token: token times choices per token, plus the choice. Pairs are ordered by expert,
# those of an expert by their number, and cut into tiles of rows of one expert each. A choice that names no expert
# (padding, or an expert of another device) is in no tile.
#
# It must not know what experts compute.


TILE_WIDTH = 3  # expert, first place in the order, end
_PAIRS = 1024  # choices a program looks at at once


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
    pairs: int, experts: int, *, least_rows: int = 8, device: torch.device | str = "cuda"
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


_SUM_COLUMNS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertMatrices:
    """One matrix of every expert, stacked: of 16 bits, of eight with scales, or of four. Inputs keep their type."""

    q: Tensor  # [experts, rows, inner]; of four bits those of `PackedWeight`: [experts, rows / 16, blocks, 16, quarter]
    # [experts, groups, rows]; float32 of eight bits, one group being a row's; of four bits [experts, groups, rows, 2]
    scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        if self.q.dim() == 3:
            return self.q.shape[0], self.q.shape[1], self.q.shape[2]
        experts, several, blocks, together, quarter = self.q.shape
        return experts, several * together, blocks * quarter * 4

    @property
    def bits(self) -> int:
        return 4 if self.q.dim() == 5 else 16 if self.scale is None else 8

    @property
    def group(self) -> int:
        return self.shape[2] // (1 if self.scale is None else self.scale.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The matrices of a layer."""

    gate_up: ExpertMatrices  # 2 * inner rows: an expert's gate comes first
    down: ExpertMatrices


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBuffers:
    """What the kernels leave for each other."""

    plan: ExpertPlan
    inner: Tensor  # [pairs, inner], by place in the order
    product: Tensor  # [pairs, hidden], by pair


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTuning:
    """Rows (pairs of one expert) and columns of a tile, and inner entries per turn."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


_FEW = ExpertTuning(rows=16, columns=64, inner=64, num_warps=4, num_stages=4)
_SOME = ExpertTuning(rows=64, columns=64, inner=64, num_warps=4, num_stages=4)
_MANY = ExpertTuning(rows=128, columns=64, inner=64, num_warps=4, num_stages=3)
_FLOAT32 = ExpertTuning(rows=16, columns=32, inner=32, num_warps=4, num_stages=2)


# Of fewer bits: reading decides, and what unpacks them for eight rows has half the instructions of that for sixteen.
_FEWEST = ExpertTuning(rows=8, columns=64, inner=128, num_warps=4, num_stages=4)


def tuning_for(pairs: int, experts: int, dtype: torch.dtype, bits: int = 16) -> ExpertTuning:
    """By how many pairs an expert has on average. A few sizes, whatever the batch; not measured yet."""
    if dtype == torch.float32:
        return _FLOAT32
    if bits < 16 and pairs <= 6 * experts:
        return _FEWEST
    if pairs <= 16 * experts:
        return _FEW
    return _SOME if pairs <= 96 * experts else _MANY


def allocate_expert_buffers(
    tokens: int,
    per_token: int,
    weights: ExpertWeights,
    device: torch.device | str = "cuda",
    dtype: torch.dtype | None = None,  # of inputs; None: that of the weights, of 16 bits
) -> ExpertBuffers:
    """Room for batches of up to `tokens`, of any layer of these sizes."""
    experts, hidden, inner = weights.down.shape
    pairs, dtype = tokens * per_token, dtype or weights.down.q.dtype
    return ExpertBuffers(
        plan=allocate_expert_plan(pairs, experts, device=device),
        inner=torch.empty(pairs, inner, dtype=dtype, device=device),
        product=torch.empty(pairs, hidden, dtype=dtype, device=device),
    )


def expert_product(
    out: Tensor,
    x: Tensor,
    chosen: Tensor,
    chosen_weight: Tensor,
    weights: ExpertWeights,
    buffers: ExpertBuffers,
    *,
    tuning: ExpertTuning | None = None,
) -> None:
    """`out` [tokens, hidden] of `x` [tokens, hidden], which chose experts, int32 or int64, with float32 weights.

    Both choices and their weights are [tokens, per_token]; a choice outside of the experts adds nothing.
    """
    tokens, per_token = chosen.shape
    experts, hidden, inner = weights.down.shape
    assert weights.gate_up.shape == (experts, 2 * inner, hidden) and buffers.plan.experts == experts
    assert x.is_contiguous() and chosen_weight.is_contiguous() and out.stride(1) == 1
    bits = min(weights.gate_up.bits, weights.down.bits)
    tuning = tuning or tuning_for(tokens * per_token, experts, x.dtype, bits)
    plan_experts(buffers.plan, chosen, tile_rows=tuning.rows)
    _grouped(buffers.inner, x, weights.gate_up, buffers.plan, chosen, tuning, is_gate_up=True)
    _grouped(buffers.product, buffers.inner, weights.down, buffers.plan, chosen, tuning, is_gate_up=False)
    _sum_kernel[(tokens, triton.cdiv(hidden, _SUM_COLUMNS))](
        out,
        buffers.product,
        chosen,
        chosen_weight,
        out.stride(0),
        experts,
        HIDDEN=hidden,
        PER_TOKEN=per_token,
        COLUMNS=_SUM_COLUMNS,
        num_warps=4,
    )


def _grouped(
    out: Tensor,
    x: Tensor,
    matrices: ExpertMatrices,
    plan: ExpertPlan,
    chosen: Tensor,
    tuning: ExpertTuning,
    *,
    is_gate_up: bool,
) -> None:
    """One product over all tiles: from tokens to places in the order, or from places to pairs."""
    q, scale, bits = matrices.q, matrices.scale, matrices.bits
    columns, inner = out.shape[1], matrices.shape[2]
    assert q.is_contiguous() and (scale is None or scale.is_contiguous())
    quarter = q.shape[4] if bits == 4 else 0
    if bits == 4:
        assert scale is not None and scale.dtype == x.dtype
        scale = as_numbers(scale)
    step = tuning.inner if matrices.group == inner else min(tuning.inner, matrices.group)
    tiles = max_tiles(chosen.numel(), plan.experts, tuning.rows)
    _product_kernel[(tiles, triton.cdiv(columns, tuning.columns))](
        out,
        x,
        q,
        q if scale is None else scale,
        plan.order,
        plan.tiles,
        plan.num_tiles,
        PER_TOKEN=chosen.shape[1],
        COLUMNS=columns,
        INNER=inner,
        IS_GATE_UP=is_gate_up,
        BITS=bits,
        GROUP=matrices.group,
        QUARTER=quarter,
        TOGETHER=COLUMNS_TOGETHER,
        PRECISION="ieee"
        if x.dtype == torch.float32
        else "tf32",  # the second is of no effect on narrower types
        ROWS=tuning.rows,
        TILE=tuning.columns,
        STEP=4 * quarter if bits == 4 else step,
        WIDTH=TILE_WIDTH,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


@triton.jit
def _product_kernel(
    out,
    x,
    weight,
    scale,
    order,
    tiles,
    num_tiles,
    PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    IS_GATE_UP: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    QUARTER: tl.constexpr,
    TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # Tiles of one expert are neighbours and start together: they share its weights in the cache.
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tiles + tile * WIDTH).to(tl.int64)
    begin = tl.load(tiles + tile * WIDTH + 1)
    end = tl.load(tiles + tile * WIDTH + 2)
    place = begin + tl.arange(0, ROWS)
    present = place < end
    pair = tl.load(order + place, mask=present, other=0)
    source = (pair // PER_TOKEN if IS_GATE_UP else place).to(tl.int64)
    target = (place if IS_GATE_UP else pair).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    # Columns beyond the last compute its result again and are not stored.
    from_column = tl.minimum(column, COLUMNS - 1).to(tl.int64)
    inner = tl.arange(0, STEP)
    x_at = x + source[:, None] * INNER + inner[None, :]
    TOTAL: tl.constexpr = (2 if IS_GATE_UP else 1) * COLUMNS
    UNIT: tl.constexpr = 4 if BITS == 4 else 1  # inputs of an entry
    NEXT: tl.constexpr = TOGETHER * QUARTER if BITS == 4 else STEP  # from one turn to the next
    if BITS == 4:
        weight_at = words_of(weight + expert * (TOTAL * INNER // 4), from_column, INNER, QUARTER, TOGETHER)
    else:
        weight_at = weight + expert * (TOTAL * INNER) + from_column[:, None] * INNER + inner[None, :]
    UP: tl.constexpr = COLUMNS * INNER // UNIT  # from gate to up
    scale_at = scale + expert * (INNER // GROUP * TOTAL) + from_column
    acc = tl.zeros([TILE, ROWS], tl.float32)
    up = tl.zeros([TILE, ROWS], tl.float32)
    for turn in range(tl.cdiv(INNER, STEP)):
        exists = (turn * STEP + inner < INNER)[None, :]
        if INNER % STEP == 0:
            xs = tl.trans(tl.load(x_at + turn * STEP, mask=present[:, None], other=0.0))
        else:
            xs = tl.trans(tl.load(x_at + turn * STEP, mask=present[:, None] & exists, other=0.0))
        at, of_group = weight_at + turn * NEXT, scale_at + turn * STEP // GROUP * TOTAL
        acc = _added(acc, xs, at, of_group, exists, BITS, INNER, STEP, TOTAL, GROUP, TILE, QUARTER, PRECISION)
        if IS_GATE_UP:
            at, of_group = at + UP, of_group + COLUMNS
            up = _added(
                up, xs, at, of_group, exists, BITS, INNER, STEP, TOTAL, GROUP, TILE, QUARTER, PRECISION
            )
    if BITS == 8 and GROUP == INNER:
        acc = acc * tl.load(scale_at)[:, None]
        if IS_GATE_UP:
            up = up * tl.load(scale_at + COLUMNS)[:, None]
    if IS_GATE_UP:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    into = out + target[:, None] * COLUMNS + column[None, :]
    mask = present[:, None] & (column < COLUMNS)[None, :]
    tl.store(into, tl.trans(acc).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _added(
    acc,
    xs,
    weight_at,
    scale_at,
    exists,
    BITS: tl.constexpr,
    INNER: tl.constexpr,
    STEP: tl.constexpr,
    TOTAL: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    QUARTER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`acc` and the product of a turn's weights and inputs; a scale of a whole row is left to the end."""
    if BITS == 4:
        w = unpacked(weight_at, scale_at, TOTAL, GROUP, TILE, QUARTER, xs.dtype)
    elif INNER % STEP == 0:
        w = tl.load(weight_at)
    else:
        w = tl.load(weight_at, mask=exists, other=0.0)
    if BITS == 8:
        w = widened(w, xs.dtype)
    if BITS == 8 and GROUP < INNER:
        acc += tl.dot(w, xs, input_precision=PRECISION) * tl.load(scale_at)[:, None]
    else:
        acc = tl.dot(w, xs, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["out_stride", "experts"])
def _sum_kernel(
    out,
    product,
    chosen,
    chosen_weight,
    out_stride,
    experts,
    HIDDEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < HIDDEN
    total = tl.zeros([COLUMNS], tl.float32)
    for index in tl.static_range(PER_TOKEN):
        pair = token * PER_TOKEN + index
        expert = tl.load(chosen + pair)
        counts = (expert >= 0) & (expert < experts)
        part = tl.load(product + pair * HIDDEN + column, mask=mask & counts, other=0.0).to(tl.float32)
        # A choice that counts nowhere may come with any weight, NaN too.
        total += tl.where(counts, tl.load(chosen_weight + pair), 0.0) * part
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=mask)
