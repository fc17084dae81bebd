"""Paged attention of one query token per row, or of a few: reads each key and value once, at the speed of the memory.

The work list is made on the device once per step and shared by all layers of a kind. A long row is cut into chunks so
that every multiprocessor gets the same amount of keys and values to read: with S visible tokens in the batch and a
target of G chunks, a chunk is S / G tokens, rounded up to whole blocks. Full chunks come first and tails follow, larger
before smaller, so that the last to start are the shortest. An empty row gets an item of no tokens, so that its output
is written too.

One program takes one item of the list and one kv head; the query heads that share the head
sit in the rows of one 16-row product. A row with drafts has several queries, one behind the other: they sit in the same
product, 16 rows of which cost what four do, and each sees one token more than the one before it. Rows that were cut
leave partial results in float32; whichever program of a row and head arrives last merges them, in the order of the
chunks, so that the result does not depend on which one that is. What lies in a block beyond a row's end is never used,
whatever it is: scores are masked and values are zeroed, since 0 times NaN is NaN. Keys and values of eight bits are
narrow_kv.py's.

It must not know how keys came into their blocks, nor which rows share a prefix: for that it gives out the
log-sum-exp of each head, and shared_attention.py joins the results.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV
from paceline.runner.gpu.kernels.narrow_kv import as_factor, split_pairs
from paceline.runner.gpu.kernels.overlap import wait_and_announce

# slot, row, first token, end, first visible token, partial result or -1, chunks of the row, first partial of the row
ITEM_WIDTH = 8
_CLASSES = tl.constexpr(4)  # tails are ordered by their quarter of a chunk
_BITS = tl.constexpr(16)  # of a count when several share one running sum


@dataclass(frozen=True, slots=True, kw_only=True)
class RowQueries:
    """Where rows have several queries: which of the step's tokens are those of a slot. The last of them sees all of
    its row, each one before it a token less."""

    first: Tensor  # int32 [slots]
    count: Tensor  # int32 [slots], `width` at most
    lengths: Tensor  # int32 [rows]: what the last query of a row sees
    width: int  # 2, 4, 8 or 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Buffers of one work list. `num_slots` is the batch it is made for, `target_chunks` the G of the docstring."""

    num_slots: int
    target_chunks: int
    min_chunk: int
    items: Tensor  # int32 [num_slots + target_chunks, ITEM_WIDTH]
    counts: Tensor  # int32 [3]: items, partial results, tokens per chunk
    queries: RowQueries | None = None  # None: each row has one
    window: int = 0  # how many last tokens a query sees; 0: all

    @property
    def max_items(self) -> int:
        return self.items.shape[0]

    @property
    def max_partials(self) -> int:
        return 2 * self.target_chunks


def allocate_plan(
    num_slots: int, target_chunks: int, *, min_chunk: int = 256, device: torch.device | str = "cuda"
) -> DecodePlan:
    """Room for the largest list a batch can need: every row has a tail, full chunks are at most the target."""
    assert min_chunk % BLOCK_SIZE == 0, "chunks are whole blocks"
    assert num_slots < 2**15 and target_chunks < 2**14, "counts have 16 bits in the kernel's running sums"
    return DecodePlan(
        num_slots=num_slots,
        target_chunks=target_chunks,
        min_chunk=min_chunk,
        items=torch.zeros(num_slots + target_chunks, ITEM_WIDTH, dtype=torch.int32, device=device),
        counts=torch.zeros(3, dtype=torch.int32, device=device),
    )


def plan_decode(
    plan: DecodePlan,
    slot_rows: Tensor,
    lengths: Tensor,
    *,
    shared: Tensor | None = None,
) -> None:
    """Fills the plan for `slot_rows` [num_slots] with the `lengths` of their rows, both int32.

    `shared` int32 [rows]: this many tokens at the beginning of each row, whole blocks, are computed elsewhere.
    """
    _plan_kernel[(1,)](
        plan.items,
        plan.counts,
        slot_rows,
        lengths,
        plan.num_slots,
        plan.target_chunks,
        plan.min_chunk,
        plan.window,
        lengths if shared is None else shared,
        lengths if plan.queries is None else plan.queries.count,
        HAS_SHARED=shared is not None,
        HAS_QUERIES=plan.queries is not None,
        MAX_SLOTS=256 if plan.num_slots <= 256 else max(1024, triton.next_power_of_2(plan.num_slots)),
        BLOCK=BLOCK_SIZE,
        ITEM=ITEM_WIDTH,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_slots", "target_chunks", "min_chunk", "window"])
def _plan_kernel(
    items,
    counts,
    slot_rows,
    lengths,
    num_slots,
    target_chunks,
    min_chunk,
    window,
    shared,
    query_counts,
    HAS_SHARED: tl.constexpr,
    HAS_QUERIES: tl.constexpr,
    MAX_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
):
    slot = tl.arange(0, MAX_SLOTS)
    present = slot < num_slots
    row = tl.load(slot_rows + slot, mask=present, other=0)
    length = tl.load(lengths + row, mask=present, other=0)
    first_sees = length
    if HAS_QUERIES:
        first_sees -= tl.maximum(tl.load(query_counts + slot, mask=present, other=0) - 1, 0)
    visible_from = tl.where(window > 0, tl.maximum(first_sees - window, 0), 0)
    if HAS_SHARED:
        visible_from = tl.maximum(visible_from, tl.load(shared + row, mask=present, other=0))
    visible_from = tl.minimum(visible_from, length)
    start = visible_from // BLOCK * BLOCK
    span = length - start

    total = tl.sum(span.to(tl.int64), 0)
    chunk = ((total + target_chunks - 1) // target_chunks).to(tl.int32)
    chunk = tl.maximum(tl.cdiv(chunk, BLOCK) * BLOCK, min_chunk)
    num_full = span // chunk
    tail = span - num_full * chunk
    has_tail = ((tail > 0) | (span == 0)) & present
    num_chunks = num_full + has_tail.to(tl.int32)
    is_split = num_chunks > 1

    # Two running sums give every place: full chunks and partial results share one, the classes of tails the other.
    split_chunks = tl.where(is_split, num_chunks, 0)
    both = num_full.to(tl.int64) | (split_chunks.to(tl.int64) << 32)
    both_before = tl.cumsum(both, 0) - both
    both_total = tl.sum(both, 0)
    num_items = (both_total & 0xFFFFFFFF).to(tl.int32)
    first_partial = tl.where(is_split, (both_before >> 32).to(tl.int32), -1)
    size_class = _CLASSES - 1 - tl.minimum(tail * _CLASSES // chunk, _CLASSES - 1)
    shift = (size_class * _BITS).to(tl.int64)
    tails = tl.where(has_tail, tl.full([MAX_SLOTS], 1, tl.int64) << shift, 0)
    tails_before = ((tl.cumsum(tails, 0) - tails) >> shift) & 0xFFFF
    tails_total = tl.sum(tails, 0)
    place = num_items + tails_before.to(tl.int32)
    for step in tl.static_range(_CLASSES):
        of_class = ((tails_total >> (step * _BITS)) & 0xFFFF).to(tl.int32)
        place += tl.where(size_class > step, of_class, 0)
        num_items += of_class

    full_place = (both_before & 0xFFFFFFFF).to(tl.int32)
    for index in range(tl.max(num_full, 0)):
        here = items + (full_place + index) * ITEM
        begin = start + index * chunk
        mask = index < num_full
        _store_where(here, slot, row, begin, begin + chunk, mask)
        _store_what(here, visible_from, begin, first_partial, index, num_chunks, mask)
    begin = start + num_full * chunk
    _store_where(items + place * ITEM, slot, row, begin, length, has_tail)
    _store_what(items + place * ITEM, visible_from, begin, first_partial, num_full, num_chunks, has_tail)
    tl.store(counts, num_items)
    tl.store(counts + 1, (both_total >> 32).to(tl.int32))
    tl.store(counts + 2, chunk)


@triton.jit
def _store_where(here, slot, row, begin, end, mask):
    tl.store(here, slot, mask=mask)
    tl.store(here + 1, row, mask=mask)
    tl.store(here + 2, begin, mask=mask)
    tl.store(here + 3, end, mask=mask)


@triton.jit
def _store_what(here, visible_from, begin, first_partial, index, num_chunks, mask):
    tl.store(here + 4, tl.maximum(visible_from, begin), mask=mask)
    tl.store(here + 5, tl.where(first_partial >= 0, first_partial + index, -1), mask=mask)
    tl.store(here + 6, num_chunks, mask=mask)
    tl.store(here + 7, first_partial, mask=mask)


_LOG2E = 1.4426950408889634
_QUERY_ROWS = 16  # least number of rows of a matrix instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTuning:
    """How the kernel is launched; the defaults are what measured best on an H200 (docs/measurements/)."""

    tile: int = 32
    num_warps: int = 2
    num_stages: int = 4
    programs_per_multiprocessor: int = 4
    overlapped: bool = False  # see overlap.py
    waves: int = 2  # chunks per place on the device: more balance better, fewer merge less

    def target_chunks(self, multiprocessors: int, kv_heads: int) -> int:
        return max(1, multiprocessors * self.programs_per_multiprocessor * self.waves // kv_heads)


def decode_tuning(num_slots: int) -> DecodeTuning:
    """Few rows are cut into equal chunks anyway, need no second wave to balance them, and wait for latency."""
    if num_slots >= 16:
        return DecodeTuning()
    return DecodeTuning(tile=64, num_warps=4, num_stages=3, programs_per_multiprocessor=3, waves=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partials:
    """Room for the results of chunks; one serves all layers."""

    out: Tensor  # float32 [partials, kv_heads, queries of one of them, head_dim]
    log_sum: Tensor  # float32 [partials, kv_heads, queries of one of them]
    arrived: Tensor  # int32 [slots, kv_heads]: chunks that are done, zero before and after every call


def allocate_partials(
    plan: DecodePlan, *, heads: int, kv_heads: int, head_dim: int, width: int = 1
) -> Partials:
    device, queries = plan.items.device, heads * width
    return Partials(
        arrived=torch.zeros(plan.num_slots, kv_heads, dtype=torch.int32, device=device),
        out=torch.empty(plan.max_partials, queries, head_dim, dtype=torch.float32, device=device),
        log_sum=torch.empty(plan.max_partials, queries, dtype=torch.float32, device=device),
    )


def decode_attention(
    out: Tensor,
    log_sum: Tensor,
    query: Tensor,
    kv: PagedKV,
    plan: DecodePlan,
    partials: Partials,
    *,
    scale: float,
    tuning: DecodeTuning | None = None,
) -> None:
    """`out` [slots, heads, head_dim] and natural `log_sum` [slots, heads] of `query` [slots, heads, head_dim].

    A row without visible tokens gets zeros and minus infinity. Where rows have several queries, the first size is that
    of the step's tokens.
    """
    tuning = tuning or decode_tuning(plan.num_slots)
    heads, head_dim = query.shape[1], query.shape[2]
    kv_heads, queries = kv.keys.shape[1], plan.queries
    width = 1 if queries is None else queries.width
    query_rows = max(_QUERY_ROWS, triton.next_power_of_2(heads // kv_heads * width))
    nothing = plan.counts  # where a row has one query, none of these is read
    firsts, counts, lengths = (nothing,) * 3
    if queries is not None:
        firsts, counts, lengths = queries.first, queries.count, queries.lengths
    assert query.stride(1) == head_dim and out.stride(1) == head_dim and log_sum.is_contiguous()
    _attend_kernel[(plan.max_items * kv_heads,)](
        out,
        log_sum,
        partials.out,
        partials.log_sum,
        partials.arrived,
        query,
        kv.keys,
        kv.values.view(torch.int16) if kv.values.dtype == torch.float8_e4m3fn else kv.values,
        kv.block_table,
        plan.items,
        plan.counts,
        firsts,
        counts,
        lengths,
        query.stride(0),
        out.stride(0),
        kv.block_table.stride(0),
        plan.window,
        scale * _LOG2E,
        HEAD_DIM=head_dim,
        GROUP=heads // kv_heads,
        WIDTH=width,
        KV_HEADS=kv_heads,
        QUERY_ROWS=query_rows,
        TILE=tuning.tile,
        BLOCK=BLOCK_SIZE,
        ITEM=ITEM_WIDTH,
        OVERLAPPED=tuning.overlapped,
        num_warps=max(tuning.num_warps, query_rows // 16),  # a sum of so many rows must fit the registers
        num_stages=tuning.num_stages,
        launch_pdl=tuning.overlapped,
    )


@triton.jit(do_not_specialize=["query_stride", "out_stride", "table_stride", "window"])
def _attend_kernel(
    out,
    log_sum,
    partial_out,
    partial_log_sum,
    arrived,
    query,
    keys,
    values,
    block_table,
    items,
    counts,
    query_firsts,
    query_counts,
    lengths,
    query_stride,
    out_stride,
    table_stride,
    window,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    item = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    # The item is read before it is known to exist, so that its loads do not wait for the count.
    fields = items + item * ITEM
    slot, row, start, end, visible_from, partial = _item(fields)
    exists = item < tl.load(counts)
    table = block_table + row * table_stride
    # The block id of a tile is loaded one turn ahead: a load that depends on a load of the same turn would halve
    # how far the pipeline runs ahead.
    block = tl.load(table + start // BLOCK, mask=exists, other=0)
    # The list is the step's, written before the kernel whose keys and queries this one waits for.
    wait_and_announce(OVERLAPPED)
    if not exists:
        return

    in_group = tl.arange(0, QUERY_ROWS)
    in_tile = tl.arange(0, TILE)
    in_head = tl.arange(0, HEAD_DIM)
    # Heads of the row's first query, then those of its second, ...
    heads = head * GROUP + (in_group if WIDTH == 1 else in_group % GROUP)
    if WIDTH == 1:
        number = 1
        is_query = in_group < GROUP
        first_token = slot
        query_row = slot * query_stride
    else:
        number = tl.load(query_counts + slot)
        is_query = in_group // GROUP < number
        first_token = tl.load(query_firsts + slot).to(tl.int64)
        token = first_token + in_group // GROUP
        query_row = (token * query_stride)[:, None]
        sees = tl.load(lengths + row) - number + 1 + in_group // GROUP
    into = heads[:, None] * HEAD_DIM + in_head[None, :]
    q = as_factor(tl.load(query + query_row + into, mask=is_query[:, None], other=0.0), keys.dtype.element_ty)
    tile_at = in_tile[:, None] * HEAD_DIM + in_head[None, :]

    peak = tl.full([QUERY_ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([QUERY_ROWS], tl.float32)
    NARROW: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    LANES: tl.constexpr = HEAD_DIM // 2 if NARROW else HEAD_DIM
    acc = tl.zeros([QUERY_ROWS, LANES], tl.float32)
    if NARROW:  # values are words of two entries, each with a separate sum
        second_acc = tl.zeros([QUERY_ROWS, LANES], tl.float32)
        word_at = in_tile[:, None] * LANES + tl.arange(0, LANES)[None, :]
    for begin in range(start, end, TILE):
        following = tl.load(table + tl.minimum(begin + TILE, end - 1) // BLOCK)
        position = begin + in_tile
        visible = (position >= visible_from) & (position < end)
        base = (block.to(tl.int64) * KV_HEADS + head) * (BLOCK * HEAD_DIM) + begin % BLOCK * HEAD_DIM
        k = tl.load(keys + base + tile_at, mask=visible[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        seen = visible[None, :] if WIDTH == 1 else _seen(position, visible, sees, window)
        scores = tl.where(seen, scores, float("-inf"))
        new_peak, shrink, weights = _weights(scores, peak)
        mass = mass * shrink + tl.sum(weights, 1)
        if NARROW:
            words = tl.load(values + base // 2 + word_at, mask=visible[:, None], other=0)
            first, second = split_pairs(words)
            acc = tl.dot(weights.to(q.dtype), first.to(q.dtype), acc * shrink[:, None])
            second_acc = tl.dot(weights.to(q.dtype), second.to(q.dtype), second_acc * shrink[:, None])
        else:
            v = tl.load(values + base + tile_at, mask=visible[:, None], other=0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        peak = new_peak
        block = following

    if NARROW:
        acc = tl.reshape(tl.join(acc, second_acc), [QUERY_ROWS, HEAD_DIM])
    result, log_mass = _normalised(acc, mass, peak)
    QUERIES: tl.constexpr = GROUP * WIDTH  # of one kv head
    if partial < 0:
        out_row = slot * out_stride if WIDTH == 1 else (token * out_stride)[:, None]
        tl.store(out + out_row + into, result.to(out.dtype.element_ty), mask=is_query[:, None])
        log_row = (slot if WIDTH == 1 else token) * (KV_HEADS * GROUP)
        tl.store(log_sum + log_row + heads, log_mass, mask=is_query)
    else:
        partial_row = (partial.to(tl.int64) * KV_HEADS + head) * QUERIES + in_group
        _store_part(partial_out, partial_log_sum, partial_row, in_head, result, log_mass, is_query)
        chunks = tl.load(fields + 6)
        counter = arrived + slot * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == chunks - 1:
            tl.store(counter, 0)
            first_partial = (tl.load(fields + 7).to(tl.int64) * KV_HEADS + head) * QUERIES
            parts = partial_out + first_partial * HEAD_DIM
            logs = partial_log_sum + first_partial
            for index in range(number):
                out_at = out + (first_token + index) * out_stride + head * GROUP * HEAD_DIM
                log_at = log_sum + (first_token + index) * (KV_HEADS * GROUP) + head * GROUP
                behind = index * GROUP
                _merge(out_at, log_at, parts, logs, behind, chunks, KV_HEADS * QUERIES, GROUP, HEAD_DIM)


@triton.jit
def _item(fields):
    slot = tl.load(fields).to(tl.int64)
    row = tl.load(fields + 1).to(tl.int64)
    return (
        slot,
        row,
        tl.load(fields + 2),
        tl.load(fields + 3),
        tl.load(fields + 4),
        tl.load(fields + 5),
    )


@triton.jit
def _seen(position, visible, sees, window):
    """Which tokens each query of a row sees."""
    first = tl.where(window > 0, sees - window, 0)
    is_seen = (position[None, :] < sees[:, None]) & (position[None, :] >= first[:, None])
    return visible[None, :] & is_seen


@triton.jit
def _weights(scores, peak):
    # Every 64 tokens of an item have a visible one, but a smaller tile before the window may have none.
    new_peak = tl.maximum(tl.maximum(peak, tl.max(scores, 1)), -1e30)
    return new_peak, tl.exp2(peak - new_peak), tl.exp2(scores - new_peak[:, None])


@triton.jit
def _store_part(partial_out, partial_log_sum, at, in_head, result, log_mass, is_query):
    into = at[:, None] * result.shape[1] + in_head[None, :]
    tl.store(partial_out + into, result, mask=is_query[:, None])
    tl.store(partial_log_sum + at, log_mass, mask=is_query)
    tl.debug_barrier()  # the stores of every thread come before the one that announces them


@triton.jit
def _normalised(acc, mass, peak):
    is_empty = mass == 0.0
    result = acc / tl.where(is_empty, 1.0, mass)[:, None]
    return result, tl.where(is_empty, float("-inf"), (peak + tl.log2(mass)) * 0.6931471805599453)


@triton.jit
def _merge(
    out,
    log_sum,
    partial_out,
    partial_log_sum,
    first,
    number,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The `number` partial results of one query and kv head, from `first` on, into `out` and `log_sum`."""
    LANES: tl.constexpr = triton.next_power_of_2(GROUP)
    CHUNKS: tl.constexpr = 16 if GROUP <= 2 else 8
    in_group = tl.arange(0, LANES)
    in_head = tl.arange(0, HEAD_DIM)
    is_head = in_group < GROUP
    peak = tl.full([LANES], -1e30, tl.float32)
    mass = tl.zeros([LANES], tl.float32)
    acc = tl.zeros([LANES, HEAD_DIM], tl.float32)
    for begin in range(0, number, CHUNKS):
        chunk = begin + tl.arange(0, CHUNKS)
        at = first + chunk[:, None].to(tl.int64) * STRIDE + in_group[None, :]
        mask = (chunk < number)[:, None] & is_head[None, :]
        # Past the first cache, which may hold what lay here before.
        logs = tl.load(partial_log_sum + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            partial_out + at[:, :, None] * HEAD_DIM + in_head[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(logs, 0))
        shrink = tl.exp(peak - new_peak)
        weights = tl.exp(logs - new_peak[None, :])
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        mass = mass * shrink + tl.sum(weights, 0)
        peak = new_peak
    result = acc / tl.where(is_head, mass, 1.0)[:, None]
    into = in_group[:, None] * HEAD_DIM + in_head[None, :]
    tl.store(out + into, result.to(out.dtype.element_ty), mask=is_head[:, None])
    tl.store(log_sum + in_group, peak + tl.log(mass), mask=is_head)
