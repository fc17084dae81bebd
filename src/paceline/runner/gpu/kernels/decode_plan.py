"""Work list of decode attention, made on the device once per step and shared by all layers of a kind.

A long row is cut into chunks so that every multiprocessor gets the same amount of keys and values to read: with S
visible tokens in the batch and a target of G chunks, a chunk is S / G tokens, rounded up to whole blocks. Full
chunks come first and tails follow, larger before smaller, so that the last to start are the shortest. A row of one
chunk writes its output itself; others write partial results which are merged (`decode_attention`).

It must not know what attention computes; an empty row gets an item of no tokens, so that its output is written too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE

# slot, row, first token, end, first visible token, partial result or -1, chunks of the row, first partial of the row
ITEM_WIDTH = 8
_CLASSES = tl.constexpr(4)  # tails are ordered by their quarter of a chunk
_BITS = tl.constexpr(16)  # of a count when several share one running sum


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """Buffers of one work list. `num_slots` is the batch it is made for, `target_chunks` the G of the docstring."""

    num_slots: int
    target_chunks: int
    min_chunk: int
    items: Tensor  # int32 [num_slots + target_chunks, ITEM_WIDTH]
    counts: Tensor  # int32 [3]: items, partial results, tokens per chunk

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
    window: int = 0,
    first: int = 0,
    shared: Tensor | None = None,
) -> None:
    """Fills the plan for `slot_rows` [num_slots] with the `lengths` of their rows, both int32.

    `window` is how many last tokens a row sees (0: all). `first` is where every row starts: a shared prefix of that
    many tokens, whole blocks, is computed elsewhere. `shared` int32 [rows] says the same of each row.
    """
    assert first % BLOCK_SIZE == 0, "a shared prefix is whole blocks"
    _plan_kernel[(1,)](
        plan.items,
        plan.counts,
        slot_rows,
        lengths,
        plan.num_slots,
        plan.target_chunks,
        plan.min_chunk,
        window,
        first,
        lengths if shared is None else shared,
        HAS_SHARED=shared is not None,
        MAX_SLOTS=256 if plan.num_slots <= 256 else max(1024, triton.next_power_of_2(plan.num_slots)),
        BLOCK=BLOCK_SIZE,
        ITEM=ITEM_WIDTH,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_slots", "target_chunks", "min_chunk", "window", "first"])
def _plan_kernel(
    items,
    counts,
    slot_rows,
    lengths,
    num_slots,
    target_chunks,
    min_chunk,
    window,
    first,
    shared,
    HAS_SHARED: tl.constexpr,
    MAX_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM: tl.constexpr,
):
    slot = tl.arange(0, MAX_SLOTS)
    present = slot < num_slots
    row = tl.load(slot_rows + slot, mask=present, other=0)
    length = tl.load(lengths + row, mask=present, other=0)
    visible_from = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    visible_from = tl.maximum(visible_from, first)
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
