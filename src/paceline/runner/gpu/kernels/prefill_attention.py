"""Paged causal attention of runs of new tokens, with whatever their rows hold before them.

A span is a run of new tokens of one row. It is cut into tiles of query tokens; within a span the last tiles, which
see most keys, come first, so that the last to start are the shortest. The list of tiles is made on the device once per
step and shared by all layers. One program takes one tile and one kv head; the query heads that share the head are
packed with the tokens into the rows of one product. Blocks that every query of the tile sees whole go through a loop
without masks; the blocks at the diagonal, and all blocks of a sliding window, through one with them; the copy engine
feeds both. The last block of a row, if it is not full, is loaded under a mask: what lies beyond is never used, whatever
it is. Keys and values of the new tokens must be in their slots before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV
from paceline.runner.gpu.kernels.narrow_kv import as_factor

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
    """Buffers of one list of tiles."""

    tile_tokens: int
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
    device: torch.device | str = "cuda",
) -> PrefillPlan:
    """Room for `max_tokens` in any division into `max_spans`: each may have one tile that is not full."""
    max_tiles = max_tokens // tile_tokens + max_spans
    return PrefillPlan(
        tile_tokens=tile_tokens,
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
        tl.store(here + 3, position + offset, mask=mask)
        tl.store(here + 4, position + count, mask=mask)
    tl.store(total, tl.sum(num_tiles, 0))


_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTuning:
    """How the kernel is launched; the defaults are what measured best on an H200 (docs/measurements/)."""

    query_rows: int = 64  # query tokens times heads of a group in one tile
    num_warps: int = 4
    num_stages: int = 3

    def tile_tokens(self, group: int) -> int:
        return self.query_rows // group


def prefill_attention(
    out: Tensor,
    log_sum: Tensor,
    query: Tensor,
    kv: PagedKV,
    plan: PrefillPlan,
    *,
    scale: float,
    window: int = 0,
    tuning: PrefillTuning = PrefillTuning(),  # noqa: B008 - frozen
) -> None:
    """`out`, `query` are [tokens, heads, head_dim], `log_sum` [tokens, heads]; tokens of no tile stay as they are."""
    heads, head_dim = query.shape[1], query.shape[2]
    kv_heads = kv.keys.shape[1]
    assert query.stride(1) == head_dim and out.stride(1) == head_dim and log_sum.is_contiguous()
    assert plan.tile_tokens == tuning.tile_tokens(heads // kv_heads), "the plan was made for other tiles"
    box = [BLOCK_SIZE, head_dim]
    _attend_kernel[(plan.max_tiles * kv_heads,)](
        out,
        log_sum,
        query,
        TensorDescriptor.from_tensor(kv.keys.view(-1, head_dim), box),
        TensorDescriptor.from_tensor(kv.values.view(-1, head_dim), box),
        kv.keys,
        kv.values,
        kv.block_table,
        plan.tiles,
        plan.count,
        query.stride(0),
        out.stride(0),
        kv.block_table.stride(0),
        scale * _LOG2E,
        window,
        HEAD_DIM=head_dim,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        ROWS=tuning.query_rows,
        BLOCK=BLOCK_SIZE,
        WIDTH=TILE_WIDTH,
        HAS_WINDOW=window > 0,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


@triton.jit(do_not_specialize=["query_stride", "out_stride", "table_stride", "window"])
def _attend_kernel(
    out,
    log_sum,
    query,
    key_boxes,
    value_boxes,
    keys,
    values,
    block_table,
    tiles,
    count,
    query_stride,
    out_stride,
    table_stride,
    scale_log2,
    window,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    tile = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    if tile >= tl.load(count):
        return
    fields = tiles + tile * WIDTH
    table = block_table + tl.load(fields).to(tl.int64) * table_stride
    first = tl.load(fields + 1).to(tl.int64)
    num_tokens = tl.load(fields + 2)
    position = tl.load(fields + 3)
    length = tl.load(fields + 4)

    line = tl.arange(0, ROWS)
    in_head = tl.arange(0, HEAD_DIM)
    in_tile = tl.arange(0, BLOCK)
    token = line // GROUP
    is_query = token < num_tokens
    query_head = head * GROUP + line % GROUP
    query_at = (first + token) * query_stride + query_head * HEAD_DIM
    q = tl.load(query + query_at[:, None] + in_head[None, :], mask=is_query[:, None], other=0.0)
    q = as_factor(q, keys.dtype.element_ty)
    sees = position + token + 1  # tokens a query sees
    end = position + num_tokens
    begin = tl.maximum(position + 1 - window, 0) // BLOCK * BLOCK if HAS_WINDOW else 0
    # [begin, whole) is seen by every query, [whole, full) by some, and what is left lies in the row's last block.
    whole = begin if HAS_WINDOW else (position + 1) // BLOCK * BLOCK
    full = tl.minimum(tl.cdiv(end, BLOCK), length // BLOCK) * BLOCK

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    block = tl.load(table + begin // BLOCK)
    for start in range(begin, whole, BLOCK):
        # One turn ahead, as in decode attention; the last entry read is that of a block the row has.
        following = tl.load(table + tl.minimum(start + BLOCK, length - 1) // BLOCK)
        box = (block * KV_HEADS + head) * BLOCK
        scores = tl.dot(q, key_boxes.load([box, 0]).to(q.dtype).T) * scale_log2
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), value_boxes.load([box, 0]).to(q.dtype), acc)
        peak = new_peak
        block = following
    for start in range(whole, full, BLOCK):
        following = tl.load(table + tl.minimum(start + BLOCK, length - 1) // BLOCK)
        box = (block * KV_HEADS + head) * BLOCK
        scores = tl.dot(q, key_boxes.load([box, 0]).to(q.dtype).T) * scale_log2
        scores = _mask(scores, start + in_tile, sees, window, HAS_WINDOW)
        # A query may have seen nothing yet: minus infinity less itself would be no number.
        new_peak = tl.maximum(tl.maximum(peak, tl.max(scores, 1)), -1e30)
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), value_boxes.load([box, 0]).to(q.dtype), acc * shrink[:, None])
        peak = new_peak
        block = following
    if full < end:
        at = (block.to(tl.int64) * KV_HEADS + head) * (BLOCK * HEAD_DIM)
        at += in_tile[:, None] * HEAD_DIM + in_head[None, :]
        exists = (full + in_tile < end)[:, None]
        k = tl.load(keys + at, mask=exists, other=0.0).to(q.dtype)
        v = tl.load(values + at, mask=exists, other=0.0).to(q.dtype)
        scores = _mask(tl.dot(q, tl.trans(k)) * scale_log2, full + in_tile, sees, window, HAS_WINDOW)
        new_peak = tl.maximum(tl.maximum(peak, tl.max(scores, 1)), -1e30)
        shrink = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        mass = mass * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak

    is_empty = mass == 0.0
    result = acc / tl.where(is_empty, 1.0, mass)[:, None]
    log_mass = tl.where(is_empty, float("-inf"), (peak + tl.log2(mass)) * 0.6931471805599453)
    out_at = (first + token) * out_stride + query_head * HEAD_DIM
    tl.store(
        out + out_at[:, None] + in_head[None, :], result.to(out.dtype.element_ty), mask=is_query[:, None]
    )
    tl.store(log_sum + (first + token) * (KV_HEADS * GROUP) + query_head, log_mass, mask=is_query)


@triton.jit
def _mask(scores, key, sees, window, HAS_WINDOW: tl.constexpr):
    """Minus infinity where a query does not see a key."""
    visible = key[None, :] < sees[:, None]
    if HAS_WINDOW:
        visible = visible & (key[None, :] >= sees[:, None] - window)
    return tl.where(visible, scores, float("-inf"))
