"""What adapters add to a product: x A^T B^T of each token's own adapter, for all parts of the product at once.

Two grouped products over the tiles that `plan_experts` makes of tokens by adapter. *Shrink* multiplies with A of every
part, the inner dimension split where tokens are few, and leaves float32 parts; it is launched before the product of
the same inputs. *Expand* sums the parts in a fixed order, multiplies with B and adds to the columns of its
part; of gate and up it goes on to the activation, for which a token without an adapter is in a tile too, of an adapter
that has nothing. No atomics: the same bits on every run. Matrices are read once for each tile and are most of the time
spent; their first are requested before a program waits for the kernel in front (overlap.py).

The matrices of all adapters lie in one pool; a table says where those of a part begin, and NOTHING where an adapter
has none. Ranks come in panels of 16: A of a part is [ranks, inner], B follows as [panels, columns, 16].

It must not know adapters beyond their place in the table, nor layers beyond a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels.expert_product import (
    TILE_WIDTH,
    ExpertPlan,
    allocate_expert_plan,
    max_tiles,
    plan_experts,
)
from paceline.runner.gpu.kernels.gated_product import Activation, activate
from paceline.runner.gpu.kernels.overlap import wait_and_announce

PANEL = 16  # ranks
UNIT = 16  # entries of the pool that an entry of the table counts in
NOTHING = -1
LEAST_ROWS = 8  # of a tile
MOST_PARTS = 3  # of a product
MAX_SPLITS = 32
_ENOUGH_PROGRAMS = 1024


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
    # int32 [parts of all layers, tiles]: where a part of a tile's adapter begins, as in the table; then its panels. By
    # tile, because a program would otherwise have to know the adapter first.
    bases: Tensor
    low: Tensor  # float32, flat: see `low_entries`


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedProduct:
    """A product of a layer: inner entries, columns of each part, and which number the first part has in the table."""

    layer: int
    first: int
    inner: int
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterTuning:
    """Rows (tokens of one adapter) of a tile, inner entries per turn of shrink, columns of expand, and of a turn of
    expand with the activation (of gate, and as many of up). At most `abreast` tiles are computed at once: a program
    that has none costs a launch all the same."""

    rows: int
    inner: int
    columns: int
    gated_columns: int
    gated_turns: int = 1
    abreast: int = 1 << 15
    shrink_warps: int = 4
    shrink_stages: int = 3
    expand_warps: int = 4
    gated_warps: int = 4

    def splits(self, tokens: int, parts: int, inner: int) -> int:
        """Into how many the inner dimension is split: tiles may be as few as the tokens fill."""
        wanted = _ENOUGH_PROGRAMS * self.rows // (tokens * parts)
        most = max(1, min(wanted, MAX_SPLITS))
        return -(-inner // self.share(most, inner))

    def share(self, splits: int, inner: int) -> int:
        """Inner entries of a split."""
        return -(-inner // (splits * self.inner)) * self.inner


# Chosen on an H200 (docs/decisions/0049-adapters-on-the-gpu.md).
_FEW = AdapterTuning(
    rows=LEAST_ROWS,
    inner=1024,
    columns=512,
    gated_columns=256,
    gated_turns=8,
    abreast=48,
    expand_warps=8,
    gated_warps=8,
)
_MANY = AdapterTuning(rows=64, inner=128, columns=128, gated_columns=64)
_FLOAT32 = AdapterTuning(rows=16, inner=32, columns=64, gated_columns=32, shrink_warps=2)
_FEW_TOKENS = 512


def adapter_tuning(tokens: int, dtype: torch.dtype) -> AdapterTuning:
    """By reckoning, but for few tokens."""
    if dtype == torch.float32:
        return _FLOAT32
    return _FEW if tokens <= _FEW_TOKENS else _MANY


def low_entries(max_tokens: int, ranks: int) -> int:
    """Room that shrink needs for what it leaves to expand."""
    split = _ENOUGH_PROGRAMS * _MANY.rows
    return max(MOST_PARTS * max_tokens, split) * ranks


def allocate_adapted(pool: AdapterPool, max_tokens: int) -> AdaptedTokens:
    """Room for steps of up to `max_tokens`; every token has a place in the table."""
    places, layers, parts = pool.table.shape
    device = pool.table.device
    plan = allocate_expert_plan(max_tokens, places, least_rows=LEAST_ROWS, device=device)
    return AdaptedTokens(
        pool=pool,
        plan=plan,
        bases=torch.zeros(layers * parts + 1, len(plan.tiles), dtype=torch.int32, device=device),
        low=torch.zeros(low_entries(max_tokens, pool.most_panels * PANEL), device=device),
    )


def plan_adapters(adapted: AdaptedTokens, of_tokens: Tensor, *, tuning: AdapterTuning) -> None:
    """Group the tokens of a step by their places in the table, int32 [tokens]."""
    pool, plan, bases = adapted.pool, adapted.plan, adapted.bases
    assert pool.table.is_contiguous()
    plan_experts(plan, of_tokens.view(-1, 1), tile_rows=tuning.rows)
    entries = len(bases) - 1
    _bases_kernel[(max_tiles(len(of_tokens), plan.experts, tuning.rows),)](
        bases,
        pool.table,
        pool.panels,
        plan.tiles,
        plan.num_tiles,
        bases.stride(0),
        ENTRIES=entries,
        LANES=triton.next_power_of_2(entries),
        WIDTH=TILE_WIDTH,
        num_warps=4,
    )


def shrink(
    x: Tensor,
    adapted: AdaptedTokens,
    product: AdaptedProduct,
    *,
    tuning: AdapterTuning,
    overlapped: bool = False,
) -> None:
    """Leave in `adapted` what `expand` needs of `x` [tokens, inner]. The plan has tiles of `tuning.rows`.
    `overlapped`: see overlap.py."""
    tokens, inner = x.shape
    parts, panels = len(product.widths), adapted.pool.most_panels
    splits = tuning.splits(tokens, parts, inner)
    assert x.is_contiguous() and inner == product.inner
    assert splits * parts * tokens * panels * PANEL <= adapted.low.numel(), "no room for what shrink leaves"
    tiles, where, constants = _launch(adapted, product, tokens, tuning)
    _shrink_kernel[(parts * panels, splits, tiles)](
        adapted.low,
        x,
        *where,
        SHARE=tuning.share(splits, inner),
        STEP=tuning.inner,
        WARPS=min(tuning.shrink_warps, tuning.inner // 16),
        OVERLAPPED=overlapped,
        num_warps=tuning.shrink_warps,
        num_stages=tuning.shrink_stages,
        launch_pdl=overlapped,
        **constants,
    )


def expand(
    out: Tensor,
    adapted: AdaptedTokens,
    product: AdaptedProduct,
    *,
    tuning: AdapterTuning,
    overlapped: bool = False,
) -> None:
    """Add to `out` [tokens, columns], a product, what the adapters of its tokens add, after `shrink` of its inputs."""
    widths, tokens = product.widths, len(out)
    assert out.is_contiguous() and sum(widths) == out.shape[1] and len(widths) <= MOST_PARTS
    tiles, where, constants = _launch(adapted, product, tokens, tuning)
    one, two, three = (*widths, 0, 0)[:MOST_PARTS]
    _expand_kernel[(sum(triton.cdiv(width, tuning.columns) for width in widths), tiles)](
        out,
        adapted.low,
        *where,
        SPLITS=tuning.splits(tokens, len(widths), product.inner),
        ONE=one,
        TWO=two,
        THREE=three,
        TILE=tuning.columns,
        OVERLAPPED=overlapped,
        num_warps=tuning.expand_warps,
        num_stages=1,
        launch_pdl=overlapped,
        **constants,
    )


def expand_gated(
    out: Tensor,
    wide: Tensor,
    adapted: AdaptedTokens,
    product: AdaptedProduct,
    *,
    activation: Activation,
    tuning: AdapterTuning,
    overlapped: bool = False,
) -> None:
    """`out` [tokens, width] = activation(gate) * up of `wide` [tokens, 2 * width], a product, gate first, and of what
    the adapters of its tokens add to it. Every token is in a tile of the plan."""
    tokens, width = out.shape
    assert out.is_contiguous() and wide.is_contiguous() and product.widths == (width, width)
    tiles, where, constants = _launch(adapted, product, tokens, tuning)
    _gated_kernel[(triton.cdiv(width, tuning.gated_columns * tuning.gated_turns), tiles)](
        out,
        wide,
        adapted.low,
        *where,
        SPLITS=tuning.splits(tokens, 2, product.inner),
        COLUMNS=width,
        TILE=tuning.gated_columns,
        TURNS=tuning.gated_turns,
        IS_SILU=activation == "silu",
        OVERLAPPED=overlapped,
        num_warps=tuning.gated_warps,
        num_stages=1,
        launch_pdl=overlapped,
        **constants,
    )


def _launch(
    adapted: AdaptedTokens, product: AdaptedProduct, tokens: int, tuning: AdapterTuning
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """What launches of all kernels have: tiles at once, arguments and constants."""
    pool, plan = adapted.pool, adapted.plan
    entry = product.layer * pool.table.shape[2] + product.first
    where = (pool.entries, adapted.bases, plan.order, plan.tiles, plan.num_tiles)
    precision = "ieee" if pool.entries.dtype == torch.float32 else "tf32"  # of no effect on narrower types
    constants = {
        "ENTRIES": len(adapted.bases) - 1,
        "PARTS": len(product.widths),
        "PANELS": pool.most_panels,
        "INNER": product.inner,
        "PRECISION": precision,
        "ROWS": tuning.rows,
        "WIDTH": TILE_WIDTH,
        "PANEL": PANEL,
        "UNIT": UNIT,
    }
    tiles = min(max_tiles(tokens, plan.experts, tuning.rows), tuning.abreast)
    return tiles, (*where, entry, adapted.bases.stride(0), tokens), constants


@triton.jit(do_not_specialize=["entry", "room", "tokens"])
def _shrink_kernel(
    low,
    x,
    pool,
    bases,
    order,
    tiles,
    num_tiles,
    entry,
    room,
    tokens,
    ENTRIES: tl.constexpr,
    PARTS: tl.constexpr,
    PANELS: tl.constexpr,
    INNER: tl.constexpr,
    SHARE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    WARPS: tl.constexpr,
    WIDTH: tl.constexpr,
    PANEL: tl.constexpr,
    UNIT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """`low` [splits, parts, places in the order, ranks] = x A^T, float32. Each warp has a stretch of the inner entries:
    warps that share one would all read the same operands."""
    part, panel = tl.program_id(0) // PANELS, tl.program_id(0) % PANELS
    split = tl.program_id(1)
    STRETCH: tl.constexpr = STEP // WARPS
    rank = tl.arange(0, PANEL)
    inner = split * SHARE + (tl.arange(0, WARPS) * STRETCH)[:, None] + tl.arange(0, STRETCH)[None, :]
    of_part = bases + (entry + part) * room
    base, count, begin, end = _tile(tl.program_id(2), of_part, bases, tiles, room, ENTRIES, WIDTH)
    for tile in tl.range(tl.program_id(2), tl.load(num_tiles), tl.num_programs(2), num_stages=1):
        following = tl.minimum(tile + tl.num_programs(2), room - 1)
        next_base, next_count, next_begin, next_end = _tile(
            following, of_part, bases, tiles, room, ENTRIES, WIDTH
        )
        exists = (base >= 0) & (panel < count)
        # One tile waits in any case: kernels that follow rely on this one having waited.
        if exists | (tile == 0):
            place = begin + tl.arange(0, ROWS)
            present = (place < end) & exists
            token = tl.load(order + place, mask=present, other=0).to(tl.int64)
            x_at = x + token[None, :, None] * INNER + inner[:, None, :]
            a_at = (
                pool
                + base.to(tl.int64) * UNIT
                + ((panel * PANEL + rank) * INNER)[None, :, None]
                + inner[:, None, :]
            )
            a = tl.load(a_at, mask=((inner < INNER) & exists)[:, None, :], other=0.0)
            wait_and_announce(OVERLAPPED)
            xs = tl.load(x_at, mask=present[None, :, None] & (inner < INNER)[:, None, :], other=0.0)
            a = _requested(a, OVERLAPPED)
            acc = tl.dot(a, tl.permute(xs, (0, 2, 1)), input_precision=PRECISION)
            if SHARE > STEP:
                last = tl.where(exists, tl.minimum(SHARE, INNER - split * SHARE), 0)
                for start in range(STEP, last, STEP):
                    inside = (inner + start < INNER)[:, None, :]
                    a = tl.load(a_at + start, mask=inside, other=0.0)
                    xs = tl.load(x_at + start, mask=present[None, :, None] & inside, other=0.0)
                    acc = tl.dot(a, tl.permute(xs, (0, 2, 1)), acc, input_precision=PRECISION)
            at = ((split * PARTS + part) * tokens + place).to(tl.int64) * (PANELS * PANEL)
            into = low + at[None, :] + (panel * PANEL + rank)[:, None]
            tl.store(into, tl.sum(acc, 0), mask=present[None, :])
        base, count, begin, end = next_base, next_count, next_begin, next_end


@triton.jit(do_not_specialize=["entry", "room", "tokens"])
def _expand_kernel(
    out,
    low,
    pool,
    bases,
    order,
    tiles,
    num_tiles,
    entry,
    room,
    tokens,
    ENTRIES: tl.constexpr,
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
    cut = tl.program_id(0)
    SECOND: tl.constexpr = (ONE + TILE - 1) // TILE
    THIRD: tl.constexpr = SECOND + (TWO + TILE - 1) // TILE
    part = (cut >= SECOND).to(tl.int32) + (cut >= THIRD).to(tl.int32)
    width = tl.where(part == 0, ONE, tl.where(part == 1, TWO, THREE))
    origin = tl.where(part == 0, 0, tl.where(part == 1, ONE, ONE + TWO))
    cut -= tl.where(part == 0, 0, tl.where(part == 1, SECOND, THIRD))
    column = cut * TILE + tl.arange(0, TILE)
    apart = PARTS * PANELS * PANEL * tokens.to(tl.int64)  # from one split to the next
    of_part = bases + (entry + part) * room
    base, count, begin, end = _tile(tl.program_id(1), of_part, bases, tiles, room, ENTRIES, WIDTH)
    for tile in tl.range(tl.program_id(1), tl.load(num_tiles), tl.num_programs(1), num_stages=1):
        following = tl.minimum(tile + tl.num_programs(1), room - 1)
        next_base, next_count, next_begin, next_end = _tile(
            following, of_part, bases, tiles, room, ENTRIES, WIDTH
        )
        exists = base >= 0
        if exists | (tile == 0):  # as in shrink
            place = begin + tl.arange(0, ROWS)
            present = (place < end) & exists
            token = tl.load(order + place, mask=present, other=0).to(tl.int64)
            b_at = _b_at(pool, base, count, column, INNER, PANEL, UNIT)
            inside = (column < width) & exists
            b = _requested(tl.load(b_at, mask=inside[:, None], other=0.0), OVERLAPPED)
            wait_and_announce(OVERLAPPED)
            into = out + token[None, :] * (ONE + TWO + THREE) + (origin + column)[:, None]
            mask = present[None, :] & inside[:, None]
            before = tl.load(into, mask=mask, other=0.0)
            low_at = _low_at(low, part, place, tokens, PANELS, PANEL)
            x = _splits(low_at, apart, present, SPLITS)
            before = _requested(before, OVERLAPPED).to(tl.float32)
            x = tl.sum(_requested(x, OVERLAPPED), 0).to(b.dtype)
            acc = tl.dot(b, tl.trans(x), input_precision=PRECISION)
            if PANELS > 1:
                for panel in range(1, tl.where(exists, count, 0)):
                    b = tl.load(b_at + panel * (width * PANEL), mask=inside[:, None], other=0.0)
                    x = tl.sum(_splits(low_at + panel * PANEL, apart, present, SPLITS), 0).to(b.dtype)
                    acc = tl.dot(b, tl.trans(x), acc, input_precision=PRECISION)
            tl.store(into, (before + acc).to(out.dtype.element_ty), mask=mask)
        base, count, begin, end = next_base, next_count, next_begin, next_end


@triton.jit(do_not_specialize=["entry", "room", "tokens"])
def _gated_kernel(
    out,
    wide,
    low,
    pool,
    bases,
    order,
    tiles,
    num_tiles,
    entry,
    room,
    tokens,
    ENTRIES: tl.constexpr,
    PARTS: tl.constexpr,
    PANELS: tl.constexpr,
    SPLITS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TURNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PANEL: tl.constexpr,
    UNIT: tl.constexpr,
    IS_SILU: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """`out` = activation(gate) * up, COLUMNS of each, with what adapters add to both. While a turn is computed, what
    the next one needs is on its way."""
    first = tl.program_id(0) * (TILE * TURNS)
    column = first + tl.arange(0, TILE)
    second = PANELS * PANEL * tokens.to(tl.int64)  # from gate to up
    apart = PARTS * second
    of_part = bases + entry * room
    gate_base, count, begin, end = _tile(tl.program_id(1), of_part, bases, tiles, room, ENTRIES, WIDTH)
    up_base = tl.load(of_part + room + tl.program_id(1))
    for tile in tl.range(tl.program_id(1), tl.load(num_tiles), tl.num_programs(1), num_stages=1):
        following = tl.minimum(tile + tl.num_programs(1), room - 1)
        next_gate_base, next_count, next_begin, next_end = _tile(
            following, of_part, bases, tiles, room, ENTRIES, WIDTH
        )
        next_up_base = tl.load(of_part + room + following)
        has_gate, has_up = gate_base >= 0, up_base >= 0
        place = begin + tl.arange(0, ROWS)
        present = place < end
        token = tl.load(order + place, mask=present, other=0).to(tl.int64)
        gate_at = _b_at(pool, gate_base, count, column, INNER, PANEL, UNIT)
        up_at = _b_at(pool, up_base, count, column, INNER, PANEL, UNIT)
        inside = column < COLUMNS
        gate_b = tl.load(gate_at, mask=(inside & has_gate)[:, None], other=0.0)
        up_b = tl.load(up_at, mask=(inside & has_up)[:, None], other=0.0)
        gate_b, up_b = _requested(gate_b, OVERLAPPED), _requested(up_b, OVERLAPPED)
        wait_and_announce(OVERLAPPED)
        wide_at = wide + token[None, :] * (2 * COLUMNS) + column[:, None]
        into = out + token[None, :] * COLUMNS + column[:, None]
        gate = tl.load(wide_at, mask=present[None, :] & inside[:, None], other=0.0)
        up = tl.load(wide_at + COLUMNS, mask=present[None, :] & inside[:, None], other=0.0)
        low_at = _low_at(low, 0, place, tokens, PANELS, PANEL)
        has_gates, has_ups = present & has_gate, present & has_up
        gate_x = _splits(low_at, apart, has_gates, SPLITS)
        up_x = _splits(low_at + second, apart, has_ups, SPLITS)
        gate, up = _requested(gate, OVERLAPPED), _requested(up, OVERLAPPED)
        gate_x = tl.trans(tl.sum(_requested(gate_x, OVERLAPPED), 0).to(gate_b.dtype))
        up_x = tl.trans(tl.sum(_requested(up_x, OVERLAPPED), 0).to(gate_b.dtype))
        for turn in tl.range(0, TURNS, num_stages=1):
            start = turn * TILE
            mask = present[None, :] & (column + start < COLUMNS)[:, None]
            next_inside = (column + start + TILE < COLUMNS) & (turn + 1 < TURNS)
            next_at = (start + TILE) * PANEL
            next_gate_b = tl.load(gate_at + next_at, mask=(next_inside & has_gate)[:, None], other=0.0)
            next_up_b = tl.load(up_at + next_at, mask=(next_inside & has_up)[:, None], other=0.0)
            next_mask = present[None, :] & next_inside[:, None]
            next_gate = tl.load(wide_at + start + TILE, mask=next_mask, other=0.0)
            next_up = tl.load(wide_at + COLUMNS + start + TILE, mask=next_mask, other=0.0)
            gate_sum = tl.dot(gate_b, gate_x, input_precision=PRECISION)
            up_sum = tl.dot(up_b, up_x, input_precision=PRECISION)
            if PANELS > 1:
                inside = column + start < COLUMNS
                for panel in range(1, tl.where(has_gate | has_up, count, 0)):
                    at = start * PANEL + panel * (COLUMNS * PANEL)
                    b = tl.load(gate_at + at, mask=(inside & has_gate)[:, None], other=0.0)
                    x = tl.sum(_splits(low_at + panel * PANEL, apart, has_gates, SPLITS), 0).to(b.dtype)
                    gate_sum = tl.dot(b, tl.trans(x), gate_sum, input_precision=PRECISION)
                    b = tl.load(up_at + at, mask=(inside & has_up)[:, None], other=0.0)
                    x = tl.sum(_splits(low_at + second + panel * PANEL, apart, has_ups, SPLITS), 0).to(
                        b.dtype
                    )
                    up_sum = tl.dot(b, tl.trans(x), up_sum, input_precision=PRECISION)
            active = activate(gate.to(tl.float32) + gate_sum, IS_SILU) * (up.to(tl.float32) + up_sum)
            tl.store(into + start, active.to(out.dtype.element_ty), mask=mask)
            gate_b, up_b = _requested(next_gate_b, OVERLAPPED), _requested(next_up_b, OVERLAPPED)
            gate, up = _requested(next_gate, OVERLAPPED), _requested(next_up, OVERLAPPED)
        gate_base, up_base = next_gate_base, next_up_base
        count, begin, end = next_count, next_begin, next_end


@triton.jit(do_not_specialize=["room"])
def _bases_kernel(
    bases,
    table,
    panels,
    tiles,
    num_tiles,
    room,
    ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        adapter = tl.load(tiles + tile * WIDTH)
        lane = tl.arange(0, LANES)
        base = tl.load(table + adapter * ENTRIES + lane, mask=lane < ENTRIES, other=0)
        tl.store(bases + lane * room + tile, base, mask=lane < ENTRIES)
        tl.store(bases + ENTRIES * room + tile, tl.load(panels + adapter))


@triton.jit
def _tile(tile, of_part, bases, tiles, room, ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    """Where a part of a tile's adapter begins, the adapter's panels, and the tile's places in the order. One that does
    not exist has room, and is not computed: nothing has to be known before these are asked for."""
    at = tiles + tile * WIDTH
    return (
        tl.load(of_part + tile),
        tl.load(bases + ENTRIES * room + tile),
        tl.load(at + 1),
        tl.load(at + 2),
    )


@triton.jit
def _b_at(pool, base, count, column, INNER: tl.constexpr, PANEL: tl.constexpr, UNIT: tl.constexpr):
    """The first panel of B of some columns, behind A of `count` panels."""
    behind = pool + base.to(tl.int64) * UNIT + count * (PANEL * INNER)
    return behind + (column * PANEL)[:, None] + tl.arange(0, PANEL)[None, :]


@triton.jit
def _low_at(low, part, place, tokens, PANELS: tl.constexpr, PANEL: tl.constexpr):
    """What the first split of shrink left of a part."""
    at = (part * tokens + place).to(tl.int64) * (PANELS * PANEL)
    return low + at[:, None] + tl.arange(0, PANEL)[None, :]


@triton.jit
def _splits(at, apart, present, SPLITS: tl.constexpr):
    """What each split of shrink left, to be summed: all of it is requested at once."""
    LANES: tl.constexpr = triton.next_power_of_2(SPLITS)
    split = tl.arange(0, LANES)
    return tl.load(
        at[None, :, :] + (split * apart)[:, None, None],
        mask=present[None, :, None] & (split < SPLITS)[:, None, None],
        other=0.0,
    )


@triton.jit
def _requested(x, OVERLAPPED: tl.constexpr):
    """`x` as it is. The compiler moves what it does with a load next to it, and would wait for one before it requests
    the next: it does not move anything beyond this."""
    if OVERLAPPED:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [x],
            dtype=x.dtype,
            is_pure=False,
            pack=32 // x.dtype.primitive_bitwidth,
        )
    return x
