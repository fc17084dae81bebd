"""What adapters add to a product: x A^T B^T of each token's own adapter, for all parts of the product at once.

Two grouped products over the tiles that `plan_experts` makes of tokens by adapter; a token without one is in no tile.
*Shrink* multiplies with A of every part, the inner dimension split where tokens are few, and leaves float32 parts;
*expand* sums them in a fixed order, multiplies with B and adds to the columns of its part. No atomics: the same bits
on every run. Matrices are read once for each tile and are most of the time spent.

The matrices of all adapters lie in one pool; a table says where those of a part begin, and NOTHING where an adapter
has none. Ranks come in panels of 16: A of a part is [ranks, inner], B follows as [panels, columns, 16].

It must not know adapters beyond their place in the table, nor layers beyond a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.expert_product import TILE_WIDTH, ExpertPlan, max_tiles
from paceline.runner.gpu.kernels.overlap import wait_and_announce

PANEL = 16  # ranks
UNIT = 16  # entries of the pool that an entry of the table counts in
NOTHING = -1
MOST_PARTS = 3  # of a product
MAX_SPLITS = 8
_ENOUGH_PROGRAMS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPool:
    """The matrices of all adapters."""

    entries: Tensor  # flat, in the type of the inputs
    table: Tensor  # int32 [places, layers, parts of a layer]: where a part begins, in UNITs, or NOTHING
    panels: Tensor  # int32 [places]: of the ranks of all parts of the adapter there
    most_panels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedTokens:
    """The tokens of a step by adapter, where the adapters lie, and what shrink leaves to expand."""

    pool: AdapterPool
    plan: ExpertPlan
    low: Tensor  # float32, flat: see `low_entries`


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTuning:
    """Rows (tokens of one adapter) of a tile, inner entries per turn of shrink, columns per program of expand."""

    rows: int
    inner: int
    columns: int
    least_share: int = 1024  # inner entries of a split of shrink
    shrink_warps: int = 2
    shrink_stages: int = 4
    expand_warps: int = 4

    def splits(self, tokens: int, parts: int, inner: int) -> int:
        """Into how many the inner dimension is split: tiles may be as few as the tokens fill."""
        wanted = _ENOUGH_PROGRAMS * self.rows // (tokens * parts)
        most = max(1, min(wanted, MAX_SPLITS, inner // self.least_share))
        share = -(-inner // (most * self.inner)) * self.inner
        return -(-inner // share)


_FEW = AdapterTuning(rows=16, inner=256, columns=512, expand_warps=8)
_MANY = AdapterTuning(rows=64, inner=128, columns=128, shrink_warps=4)
_FLOAT32 = AdapterTuning(rows=16, inner=32, columns=64)
_FEW_TOKENS = 512


def adapter_tuning(tokens: int, dtype: torch.dtype) -> AdapterTuning:
    """By reckoning."""
    if dtype == torch.float32:
        return _FLOAT32
    return _FEW if tokens <= _FEW_TOKENS else _MANY


def low_entries(max_tokens: int, ranks: int) -> int:
    """Room that shrink needs for what it leaves to expand."""
    split = _ENOUGH_PROGRAMS * _MANY.rows
    return max(MOST_PARTS * max_tokens, split) * ranks


def adapter_product(
    out: Tensor,
    x: Tensor,
    adapted: AdaptedTokens,
    *,
    layer: int,
    first: int,
    widths: Sequence[int],
    tuning: AdapterTuning,
    overlapped: bool = False,
) -> None:
    """Add to `out` [tokens, columns], the product of `x` [tokens, inner], what the adapters of its tokens add.

    `widths`: columns of each part of the product; the first of them is number `first` in the pool's table. The plan
    has tiles of `tuning.rows`. `overlapped`: see overlap.py; whatever wrote `x` must be complete when the kernel before
    this call begins, as it is where that kernel is a product of `x`.
    """
    pool, plan, low = adapted.pool, adapted.plan, adapted.low
    tokens, inner = x.shape
    parts, splits = len(widths), tuning.splits(tokens, len(widths), inner)
    assert x.is_contiguous() and out.is_contiguous() and parts <= MOST_PARTS
    assert sum(widths) == out.shape[1] and pool.table.is_contiguous()
    ranks = pool.most_panels * PANEL
    assert splits * parts * tokens * ranks <= low.numel(), "no room for what shrink leaves"
    tiles = max_tiles(tokens, plan.experts, tuning.rows)
    entry, stride = layer * pool.table.shape[2] + first, pool.table.stride(0)
    precision = "ieee" if x.dtype == torch.float32 else "tf32"  # the second is of no effect on narrower types
    share = -(-inner // (splits * tuning.inner)) * tuning.inner
    where = (pool.entries, pool.table, pool.panels, plan.order, plan.tiles, plan.num_tiles, entry, stride)
    _shrink_kernel[(tiles, parts * pool.most_panels, splits)](
        low,
        x,
        *where,
        tokens,
        PARTS=parts,
        PANELS=pool.most_panels,
        INNER=inner,
        SHARE=share,
        PRECISION=precision,
        ROWS=tuning.rows,
        STEP=tuning.inner,
        WIDTH=TILE_WIDTH,
        PANEL=PANEL,
        UNIT=UNIT,
        OVERLAPPED=overlapped,
        num_warps=tuning.shrink_warps,
        num_stages=tuning.shrink_stages,
        launch_pdl=overlapped,
    )
    one, two, three = (*widths, 0, 0)[:MOST_PARTS]
    _expand_kernel[(tiles, sum(triton.cdiv(width, tuning.columns) for width in widths))](
        out,
        low,
        *where,
        tokens,
        PARTS=parts,
        PANELS=pool.most_panels,
        SPLITS=splits,
        INNER=inner,
        ONE=one,
        TWO=two,
        THREE=three,
        PRECISION=precision,
        ROWS=tuning.rows,
        TILE=tuning.columns,
        WIDTH=TILE_WIDTH,
        PANEL=PANEL,
        UNIT=UNIT,
        OVERLAPPED=overlapped,
        num_warps=tuning.expand_warps,
        num_stages=1,
        launch_pdl=overlapped,
    )


@triton.jit(do_not_specialize=["entry", "stride", "tokens"])
def _shrink_kernel(
    low,
    x,
    pool,
    table,
    panels,
    order,
    tiles,
    num_tiles,
    entry,
    stride,
    tokens,
    PARTS: tl.constexpr,
    PANELS: tl.constexpr,
    INNER: tl.constexpr,
    SHARE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    PANEL: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """`low` [splits, parts, places in the order, ranks] = x A^T, float32."""
    tile, split = tl.program_id(0), tl.program_id(2)
    part, panel = tl.program_id(1) // PANELS, tl.program_id(1) % PANELS
    exists = tile < tl.load(num_tiles)
    adapter = tl.load(tiles + tile * WIDTH, mask=exists, other=0)
    begin = tl.load(tiles + tile * WIDTH + 1, mask=exists, other=0)
    end = tl.load(tiles + tile * WIDTH + 2, mask=exists, other=0)
    base = tl.load(table + adapter * stride + entry + part, mask=exists, other=-1)
    exists = (base >= 0) & (panel < tl.load(panels + adapter))
    place = begin + tl.arange(0, ROWS)
    present = (place < end) & exists
    token = tl.load(order + place, mask=present, other=0).to(tl.int64)
    rank = tl.arange(0, PANEL)
    inner = tl.arange(0, STEP)
    x_at = x + token[:, None] * INNER + inner[None, :]
    a_at = pool + base.to(tl.int64) * UNIT + ((panel * PANEL + rank) * INNER)[:, None] + inner[None, :]
    first = split * SHARE
    last = tl.where(exists, tl.minimum(first + SHARE, INNER), first)
    acc = tl.zeros([PANEL, ROWS], tl.float32)
    for start in range(first, last, STEP):
        if INNER % STEP == 0:
            a = tl.load(a_at + start)
            xs = tl.load(x_at + start, mask=present[:, None], other=0.0)
        else:
            inside = (start + inner < INNER)[None, :]
            a = tl.load(a_at + start, mask=inside, other=0.0)
            xs = tl.load(x_at + start, mask=present[:, None] & inside, other=0.0)
        acc = tl.dot(a, tl.trans(xs), acc, input_precision=PRECISION)
    # Also where there is nothing to do: kernels that follow rely on this one having waited.
    wait_and_announce(OVERLAPPED)
    at = ((split * PARTS + part) * tokens + place).to(tl.int64) * (PANELS * PANEL)
    into = low + at[:, None] + (panel * PANEL + rank)[None, :]
    tl.store(into, tl.trans(acc), mask=present[:, None])


@triton.jit(do_not_specialize=["entry", "stride", "tokens"])
def _expand_kernel(
    out,
    low,
    pool,
    table,
    panels,
    order,
    tiles,
    num_tiles,
    entry,
    stride,
    tokens,
    PARTS: tl.constexpr,
    PANELS: tl.constexpr,
    SPLITS: tl.constexpr,
    INNER: tl.constexpr,
    ONE: tl.constexpr,
    TWO: tl.constexpr,
    THREE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    PANEL: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """`out` += low B^T, ONE, TWO and THREE columns of up to three parts."""
    tile, cut = tl.program_id(0), tl.program_id(1)
    SECOND: tl.constexpr = (ONE + TILE - 1) // TILE
    THIRD: tl.constexpr = SECOND + (TWO + TILE - 1) // TILE
    part = (cut >= SECOND).to(tl.int32) + (cut >= THIRD).to(tl.int32)
    width = tl.where(part == 0, ONE, tl.where(part == 1, TWO, THREE))
    origin = tl.where(part == 0, 0, tl.where(part == 1, ONE, ONE + TWO))
    cut -= tl.where(part == 0, 0, tl.where(part == 1, SECOND, THIRD))
    exists = tile < tl.load(num_tiles)
    adapter = tl.load(tiles + tile * WIDTH, mask=exists, other=0)
    begin = tl.load(tiles + tile * WIDTH + 1, mask=exists, other=0)
    end = tl.load(tiles + tile * WIDTH + 2, mask=exists, other=0)
    base = tl.load(table + adapter * stride + entry + part, mask=exists, other=-1)
    count = tl.load(panels + adapter)
    exists = base >= 0
    count = tl.where(exists, count, 0)
    place = begin + tl.arange(0, ROWS)
    present = (place < end) & exists
    token = tl.load(order + place, mask=present, other=0).to(tl.int64)
    column = cut * TILE + tl.arange(0, TILE)
    inside = (column < width) & exists
    rank = tl.arange(0, PANEL)
    b_at = pool + base.to(tl.int64) * UNIT + count * (PANEL * INNER)
    b_at += (column * PANEL)[:, None] + rank[None, :]
    b = tl.load(b_at, mask=inside[:, None], other=0.0)  # requested before anything is waited for
    wait_and_announce(OVERLAPPED)
    if exists:  # there may be twice as many programs as tiles
        into = out + token[:, None] * (ONE + TWO + THREE) + (origin + column)[None, :]
        mask = present[:, None] & inside[None, :]
        before = tl.load(into, mask=mask, other=0.0)
        low_at = low + (part * tokens + place).to(tl.int64)[:, None] * (PANELS * PANEL) + rank[None, :]
        apart = PARTS * PANELS * PANEL * tokens.to(tl.int64)  # from one split to the next
        x = _sum(low_at, apart, present, SPLITS, ROWS, PANEL).to(b.dtype)
        acc = tl.dot(x, tl.trans(b), input_precision=PRECISION)
        if PANELS > 1:
            for panel in range(1, count):
                b = tl.load(b_at + panel * (width * PANEL), mask=inside[:, None], other=0.0)
                x = _sum(low_at + panel * PANEL, apart, present, SPLITS, ROWS, PANEL).to(b.dtype)
                acc = tl.dot(x, tl.trans(b), acc, input_precision=PRECISION)
        tl.store(into, (before.to(tl.float32) + acc).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum(at, apart, present, SPLITS: tl.constexpr, ROWS: tl.constexpr, PANEL: tl.constexpr):
    total = tl.zeros([ROWS, PANEL], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(at + split * apart, mask=present[:, None], other=0.0)
    return total
