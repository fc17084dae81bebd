"""Attention of decoding rows over the beginnings they share: keys and values of each are read once for its rows.

A group is a run of slots whose rows have the same first blocks. Its queries are packed into tiles, the heads of a kv
head with them; its beginning is cut into chunks, so that few groups and long beginnings occupy the whole card too. With
T tokens to read, counted for each tile, and a target of G chunks, a chunk is T / G tokens, rounded up to whole blocks.
One program takes one chunk, for one tile and one kv head. Every query sees all of it, so nothing is masked.

    group 0, 20 slots      tile 0 (16 slots): chunk 0 | chunk 1 | chunk 2      items 0, 1, 2
                           tile 1 ( 4 slots): chunk 0 | chunk 1 | chunk 2      items 3, 4, 5
    group 1,  2 slots      tile 0 ( 2 slots): chunk 0 | chunk 1                items 6, 7

Each item leaves a result in float32 for every slot of its tile; `merge_shared` joins those of a slot, in order, with
the attention over the rest of its row, which is decode_attention.py's. The list is made on the device once per step and
shared by all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV
from paceline.runner.gpu.kernels.narrow_kv import as_factor

MAX_GROUPS = 32
ITEM_WIDTH = 8  # row, first slot, number of slots, first token, end; padded
_LOG2E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedGroups:
    """int32 columns [MAX_GROUPS]; groups of no slots are skipped."""

    row: Tensor  # any of its rows: its block table begins with what is shared
    first: Tensor  # slot
    count: Tensor  # slots
    length: Tensor  # tokens that are shared: whole blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTuning:
    """How the kernel is launched."""

    query_rows: int = 64  # slots times heads of a kv head in one tile
    num_warps: int = 4
    num_stages: int = 3
    programs_per_multiprocessor: int = 2

    def tile_slots(self, group: int) -> int:
        return self.query_rows // group

    def target_chunks(self, multiprocessors: int, kv_heads: int) -> int:
        return max(1, multiprocessors * self.programs_per_multiprocessor // kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """Buffers of one work list, and room for the results of its items."""

    tile_slots: int
    target_chunks: int  # the G of the docstring
    min_chunk: int
    max_items: int  # those a batch of this size can have
    items: Tensor  # int32 [items, ITEM_WIDTH]
    count: Tensor  # int32 [1]: items
    parts: Tensor  # int32 [slots, 2]: the first result of a slot, and how many it has; 0: it shares nothing
    out: Tensor  # float32 [items * tile_slots, heads, head_dim]
    log_sum: Tensor  # float32 [items * tile_slots, heads]

    def limited(self, slots: int) -> SharedPlan:
        """The same buffers for a smaller batch, of which fewer programs are launched."""
        most = _most_items(slots, self.tile_slots, self.target_chunks)
        return replace(self, max_items=min(most, self.max_items), parts=self.parts[:slots])


def allocate_shared_plan(
    slots: int,
    target_chunks: int,
    *,
    tile_slots: int,
    heads: int,
    head_dim: int,
    min_chunk: int = 256,
    device: torch.device | str = "cuda",
) -> SharedPlan:
    assert min_chunk % BLOCK_SIZE == 0, "chunks are whole blocks"
    most = _most_items(slots, tile_slots, target_chunks)
    return SharedPlan(
        tile_slots=tile_slots,
        target_chunks=target_chunks,
        min_chunk=min_chunk,
        max_items=most,
        items=torch.zeros(most, ITEM_WIDTH, dtype=torch.int32, device=device),
        count=torch.zeros(1, dtype=torch.int32, device=device),
        parts=torch.zeros(slots, 2, dtype=torch.int32, device=device),
        out=torch.empty(most * tile_slots, heads, head_dim, dtype=torch.float32, device=device),
        log_sum=torch.empty(most * tile_slots, heads, dtype=torch.float32, device=device),
    )


def _most_items(slots: int, tile_slots: int, target_chunks: int) -> int:
    """Every tile may have a chunk beyond its share of the target, every group a tile that is not full."""
    return target_chunks + slots // tile_slots + min(MAX_GROUPS, slots)


def plan_shared(plan: SharedPlan, groups: SharedGroups) -> None:
    """Fills the plan: the first programs make the items, the others say where the results of slots will be."""
    slots, per_program = plan.parts.shape[0], 128
    for_items = triton.cdiv(plan.max_items, per_program)
    _plan_kernel[(for_items + triton.cdiv(slots, per_program),)](
        plan.items,
        plan.count,
        plan.parts,
        groups.row,
        groups.first,
        groups.count,
        groups.length,
        slots,
        for_items,
        plan.target_chunks,
        plan.min_chunk,
        GROUPS=MAX_GROUPS,
        TILE=plan.tile_slots,
        BLOCK=BLOCK_SIZE,
        LANES=per_program,
        WIDTH=ITEM_WIDTH,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["slots", "for_items", "target_chunks", "min_chunk"])
def _plan_kernel(
    items,
    total,
    parts,
    rows,
    firsts,
    counts,
    lengths,
    slots,
    for_items,
    target_chunks,
    min_chunk,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    group = tl.arange(0, GROUPS)
    first = tl.load(firsts + group)
    count = tl.load(counts + group)
    length = tl.load(lengths + group)
    num_tiles = tl.cdiv(count, TILE)
    work = tl.sum(num_tiles * length, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(work, target_chunks), BLOCK) * BLOCK, min_chunk)
    # Chunks of a group have equal lengths, so that none is a short rest.
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, tl.maximum(tl.cdiv(length, chunk), 1)), BLOCK) * BLOCK, BLOCK)
    num_chunks = tl.cdiv(length, chunk)
    num_items = num_tiles * num_chunks
    base = tl.cumsum(num_items, 0) - num_items
    program = tl.program_id(0)
    if program < for_items:
        item = program * LANES + tl.arange(0, LANES)
        has = (item[None, :] >= base[:, None]) & (item[None, :] < (base + num_items)[:, None])
        within = item - _of(has, base)
        chunks = tl.maximum(_of(has, num_chunks), 1)
        offset = within // chunks * TILE
        begin = within % chunks * _of(has, chunk)
        exists = item < tl.sum(num_items, 0)
        here = items + item * WIDTH
        tl.store(here, _of(has, tl.load(rows + group)), mask=exists)
        tl.store(here + 1, _of(has, first) + offset, mask=exists)
        tl.store(here + 2, tl.minimum(_of(has, count) - offset, TILE), mask=exists)
        tl.store(here + 3, begin, mask=exists)
        tl.store(here + 4, tl.minimum(begin + _of(has, chunk), _of(has, length)), mask=exists)
        tl.store(total, tl.sum(num_items, 0))
    else:
        slot = (program - for_items) * LANES + tl.arange(0, LANES)
        holds = (slot[None, :] >= first[:, None]) & (slot[None, :] < (first + count)[:, None])
        in_group = slot - _of(holds, first)
        first_item = _of(holds, base) + in_group // TILE * _of(holds, num_chunks)
        tl.store(parts + slot * 2, first_item * TILE + in_group % TILE, mask=slot < slots)
        tl.store(parts + slot * 2 + 1, _of(holds, num_chunks), mask=slot < slots)


@triton.jit
def _of(holds, values):
    """The value of the group that each item or slot belongs to, 0 where there is none."""
    return tl.sum(tl.where(holds, values[:, None], 0), 0)


def shared_attention(
    query: Tensor,
    kv: PagedKV,
    plan: SharedPlan,
    *,
    scale: float,
    tuning: SharedTuning = SharedTuning(),  # noqa: B008 - frozen
) -> None:
    """The results of all items of the plan, for `query` [slots, heads, head_dim]."""
    heads, head_dim = query.shape[1], query.shape[2]
    kv_heads = kv.keys.shape[1]
    assert query.stride(1) == head_dim
    assert plan.tile_slots == tuning.tile_slots(heads // kv_heads), "the plan was made for other tiles"
    box = [BLOCK_SIZE, head_dim]
    _attend_kernel[(plan.max_items * kv_heads,)](
        plan.out,
        plan.log_sum,
        query,
        TensorDescriptor.from_tensor(kv.keys.view(-1, head_dim), box),
        TensorDescriptor.from_tensor(kv.values.view(-1, head_dim), box),
        kv.keys,
        kv.block_table,
        plan.items,
        plan.count,
        query.stride(0),
        kv.block_table.stride(0),
        scale * _LOG2E,
        HEAD_DIM=head_dim,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        TILE=plan.tile_slots,
        ROWS=tuning.query_rows,
        BLOCK=BLOCK_SIZE,
        WIDTH=ITEM_WIDTH,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


@triton.jit
def _attend_kernel(
    part_out,
    part_log_sum,
    query,
    key_boxes,
    value_boxes,
    keys,
    block_table,
    items,
    count,
    query_stride,
    table_stride,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    item = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    if item >= tl.load(count):
        return
    fields = items + item * WIDTH
    table = block_table + tl.load(fields).to(tl.int64) * table_stride
    first = tl.load(fields + 1).to(tl.int64)
    num_slots = tl.load(fields + 2)
    begin = tl.load(fields + 3)
    end = tl.load(fields + 4)

    line = tl.arange(0, ROWS)
    in_head = tl.arange(0, HEAD_DIM)
    slot = line // GROUP
    is_query = slot < num_slots
    query_head = head * GROUP + line % GROUP
    query_at = (first + slot) * query_stride + query_head * HEAD_DIM
    q = tl.load(query + query_at[:, None] + in_head[None, :], mask=is_query[:, None], other=0.0)
    q = as_factor(q, keys.dtype.element_ty)

    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    block = tl.load(table + begin // BLOCK)
    for start in range(begin, end, BLOCK):
        following = tl.load(table + tl.minimum(start + BLOCK, end - 1) // BLOCK)  # one turn ahead
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

    HEADS: tl.constexpr = KV_HEADS * GROUP
    into = (item.to(tl.int64) * TILE + slot) * HEADS + query_head
    tl.store(
        part_out + into[:, None] * HEAD_DIM + in_head[None, :], acc / mass[:, None], mask=is_query[:, None]
    )
    tl.store(part_log_sum + into, (peak + tl.log2(mass)) * 0.6931471805599453, mask=is_query)


_LANES, _CHUNKS = 4, 8  # heads and results a program of the merge takes at once


def merge_shared(out: Tensor, log_sum: Tensor, plan: SharedPlan) -> None:
    """`out` [slots, heads, head_dim] and `log_sum` [slots, heads] of the rest of rows become those of the whole, in
    place. Slots that share nothing stay as they are."""
    assert out.is_contiguous() and log_sum.is_contiguous()
    slots, heads, head_dim = out.shape
    _merge_kernel[(slots, triton.cdiv(heads, _LANES))](
        out,
        log_sum,
        plan.out,
        plan.log_sum,
        plan.parts,
        HEADS=heads,
        HEAD_DIM=head_dim,
        TILE=plan.tile_slots,
        LANES=_LANES,
        CHUNKS=_CHUNKS,
        num_warps=4,
    )


@triton.jit
def _merge_kernel(
    out,
    log_sum,
    part_out,
    part_log_sum,
    parts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    slot = tl.program_id(0).to(tl.int64)
    first = tl.load(parts + slot * 2).to(tl.int64)
    number = tl.load(parts + slot * 2 + 1)
    if number == 0:
        return
    head = tl.program_id(1) * LANES + tl.arange(0, LANES)
    in_head = tl.arange(0, HEAD_DIM)
    is_head = head < HEADS
    log_at = log_sum + slot * HEADS + head
    out_at = out + (slot * HEADS + head)[:, None] * HEAD_DIM + in_head[None, :]
    # The rest of a row that has ended is empty.
    log_rest = tl.load(log_at, mask=is_head, other=float("-inf"))
    peak = tl.maximum(log_rest, -1e30)
    mass = tl.exp(log_rest - peak)
    acc = tl.load(out_at, mask=is_head[:, None], other=0.0).to(tl.float32) * mass[:, None]
    for begin in range(0, number, CHUNKS):
        chunk = begin + tl.arange(0, CHUNKS)
        at = (first + chunk[:, None] * TILE) * HEADS + head[None, :]
        mask = (chunk < number)[:, None] & is_head[None, :]
        logs = tl.load(part_log_sum + at, mask=mask, other=float("-inf"))
        results = tl.load(
            part_out + at[:, :, None] * HEAD_DIM + in_head[None, None, :], mask=mask[:, :, None], other=0.0
        )
        new_peak = tl.maximum(peak, tl.max(logs, 0))
        shrink = tl.exp(peak - new_peak)
        weights = tl.exp(logs - new_peak[None, :])
        acc = acc * shrink[:, None] + tl.sum(results * weights[:, :, None], 0)
        mass = mass * shrink + tl.sum(weights, 0)
        peak = new_peak
    result = acc / tl.where(is_head, mass, 1.0)[:, None]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=is_head[:, None])
    tl.store(log_at, peak + tl.log(mass), mask=is_head)
