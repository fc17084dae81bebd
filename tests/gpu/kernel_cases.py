"""Random inputs for kernels and the comparison with their references; used on the GPU and through the interpreter.

Memory that no row owns is NaN in every case, so that whatever a kernel reads beyond a row's end shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV
from paceline.runner.gpu.kernels.decode_attention import (
    DecodeTuning,
    RowQueries,
    allocate_partials,
    allocate_plan,
    decode_attention,
    plan_decode,
)
from paceline.runner.gpu.kernels.place_kv import place_kv
from paceline.runner.gpu.kernels.prefill_attention import (
    PrefillTuning,
    Spans,
    allocate_prefill_plan,
    plan_prefill,
    prefill_attention,
)
from paceline.runner.gpu.kernels.rope_kv_write import HeadNorm, TokenPlaces, rope_kv_write
from paceline.runner.gpu.kernels.row_product import RowNorm, row_product
from paceline.runner.gpu.kernels.shared_attention import (
    MAX_GROUPS,
    SharedGroups,
    SharedTuning,
    allocate_shared_plan,
    merge_shared,
    plan_shared,
    shared_attention,
)
from tests.gpu.kernel_references import (
    reference_decode_attention,
    reference_placed,
    reference_prefill_attention,
    reference_rope_kv_write,
    reference_row_product,
)

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Heads of a layer and where the case lives."""

    device: str
    dtype: torch.dtype
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    num_blocks: int = 0  # of the pool; 0: as few as needed
    kv_dtype: torch.dtype | None = None  # what keys and values are kept in; None: as queries

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def stored(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def tolerance(self) -> float:
        return 1e-2 if self.dtype == torch.bfloat16 else 2e-3

    def random(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, device=self.device).to(self.dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-30))


def assert_close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = relative_error(found, expected)
    assert error < tolerance, f"relative error {error:.2e} against {tolerance:.0e}"


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    """Numbers of eight bits are the nearest ones: rounded to 16 bits first, one in some 20 would be its neighbour."""
    nearest = exact.float().clamp(-LARGEST, LARGEST).to(FP8).double()
    wrong = found.double() != nearest
    # float32 is less exact than the reference: a number in the middle of two may fall to either side.
    assert int(wrong.sum()) <= 2e-3 * wrong.numel(), (
        f"{int(wrong.sum())} of {wrong.numel()} are not the nearest"
    )
    assert_close(found, nearest, 1e-2)


def paged_kv(shape: Shape, lengths: Sequence[int], *, live_from: Sequence[int] | None = None) -> PagedKV:
    """Rows of these lengths in blocks drawn at random; blocks before `live_from` are given back (the null block)."""
    needed = [(length + BLOCK_SIZE - 1) // BLOCK_SIZE for length in lengths]
    num_blocks = max(shape.num_blocks, sum(needed) + 3)
    sizes = (num_blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    keys = torch.empty(sizes, dtype=shape.dtype, device=shape.device)
    values = torch.empty(sizes, dtype=shape.dtype, device=shape.device)
    if not shape.num_blocks:
        keys.fill_(float("nan"))
        values.fill_(float("nan"))
    table = torch.zeros(len(lengths) + 1, max(needed, default=0) + 2, dtype=torch.int32)
    # The highest blocks of a large pool are used: their offsets are the ones that overflow.
    drawn = num_blocks - 1 - torch.randperm(sum(needed) + 1)
    keys[drawn], values[drawn], keys[0], values[0] = (float("nan"),) * 4
    for row, length in enumerate(lengths):
        dead = (live_from[row] if live_from else 0) // BLOCK_SIZE
        for index in range(dead, needed[row]):
            block = int(drawn[sum(needed[:row]) + index])
            used = min(BLOCK_SIZE, length - index * BLOCK_SIZE)
            table[row, index] = block
            for part in (keys, values):
                part[block, :, :used] = shape.random(shape.kv_heads, used, shape.head_dim)
    # Rounded to what is stored, with what is no number as before: a reference reads the very same.
    keys, values = keys.to(shape.stored), values.to(shape.stored)
    return PagedKV(keys=keys, values=values, block_table=table.to(shape.device))


def check_decode(
    shape: Shape,
    lengths: Sequence[int],
    *,
    window: int = 0,
    target_chunks: int = 16,
    tuning: DecodeTuning | None = None,
) -> None:
    live = [max(0, length - window) if window else 0 for length in lengths]
    kv = paged_kv(shape, lengths, live_from=live)
    device = shape.device
    # One row more than slots in use: the last slot is padding and points to it.
    all_lengths = torch.tensor([*lengths, 0], dtype=torch.int32, device=device)
    slot_rows = torch.randperm(len(lengths) + 1).to(torch.int32).to(device)
    slots = len(slot_rows)
    query = shape.random(slots, shape.heads, shape.head_dim)
    out = torch.full_like(query, float("nan"))
    log_sum = torch.full((slots, shape.heads), float("nan"), device=device)
    plan = allocate_plan(slots, target_chunks, min_chunk=BLOCK_SIZE, device=device)
    plan = replace(plan, window=window)
    plan_decode(plan, slot_rows, all_lengths)
    partials = allocate_partials(plan, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    scale = shape.head_dim**-0.5
    decode_attention(out, log_sum, query, kv, plan, partials, scale=scale, tuning=tuning)
    expected, expected_log = reference_decode_attention(
        query, kv, slot_rows, all_lengths, scale=scale, window=window
    )
    assert_close(out, expected, shape.tolerance)
    empty = expected_log == float("-inf")
    assert torch.equal(log_sum == float("-inf"), empty)
    assert_close(log_sum[~empty], expected_log[~empty], shape.tolerance)
    for slot, row in enumerate(slot_rows.tolist()):
        if all_lengths[row]:  # each row alone too: a long row must not hide a short one
            assert_close(out[slot], expected[slot], 3 * shape.tolerance)


def check_wide_decode(
    shape: Shape,
    rows: Sequence[tuple[int, int]],
    *,
    width: int,
    window: int = 0,
    target_chunks: int = 16,
    tuning: DecodeTuning | None = None,
) -> None:
    """`rows` are (tokens before the queries, queries) of one row each: each query sees what a prompt's token would."""
    lengths = [before + count for before, count in rows]
    live = [max(0, before + 1 - window) if window else 0 for before, _ in rows]
    kv = paged_kv(shape, lengths, live_from=live)
    # The last row is empty, as one that has ended.
    device, order = (
        shape.device,
        torch.randperm(len(rows) + 1),
    )

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    all_lengths, slot_rows = column([*lengths, 0]), order.to(torch.int32).to(device)
    counts = [rows[row][1] if row < len(rows) else 0 for row in order.tolist()]
    firsts = [sum(counts[:slot]) for slot in range(len(counts))]
    queries = RowQueries(first=column(firsts), count=column(counts), lengths=all_lengths, width=width)
    total, slots = sum(counts), len(counts)
    query = shape.random(total + 2, shape.heads, shape.head_dim)  # two tokens that belong to no row
    out = torch.full_like(query, float("nan"))
    log_sum = torch.full((total + 2, shape.heads), float("nan"), device=device)
    plan = allocate_plan(slots, target_chunks, min_chunk=BLOCK_SIZE, device=device)
    plan = replace(plan, queries=queries, window=window)
    plan_decode(plan, slot_rows, all_lengths)
    sizes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
    partials = allocate_partials(plan, **sizes, width=width)
    scale = shape.head_dim**-0.5
    decode_attention(out, log_sum, query, kv, plan, partials, scale=scale, tuning=tuning)
    for slot, row in enumerate(order.tolist()):
        part = slice(firsts[slot], firsts[slot] + counts[slot])
        if counts[slot]:
            expected, expected_log = reference_prefill_attention(
                query[part], kv, row, rows[row][0], scale=scale, window=window
            )
            assert_close(out[part], expected, shape.tolerance)
            assert_close(log_sum[part], expected_log, shape.tolerance)
    assert out[total:].isnan().all() and log_sum[total:].isnan().all(), "another token was written"
    assert not partials.arrived.any()


def check_plan(lengths: Sequence[int], device: str, *, window: int = 0, target: int = 16) -> None:
    """The items cover every visible token exactly once and name each partial result once."""
    slots = len(lengths)
    plan = allocate_plan(slots, target, min_chunk=BLOCK_SIZE, device=device)
    rows = torch.randperm(slots).to(torch.int32)
    columns = torch.zeros(slots, dtype=torch.int32)
    columns[rows.long()] = torch.tensor(lengths, dtype=torch.int32)
    plan = replace(plan, window=window)
    plan_decode(plan, rows.to(device), columns.to(device))
    num_items, num_partials, chunk = plan.counts.tolist()
    assert num_items <= plan.max_items and num_partials <= plan.max_partials
    covered: dict[int, list[tuple[int, int, int]]] = {slot: [] for slot in range(slots)}
    belongs: dict[int, tuple[int, int]] = {}
    for slot, row, start, end, visible_from, partial, number, first in plan.items[:num_items].tolist():
        assert row == int(rows[slot]) and end - start <= chunk and visible_from >= start
        covered[slot].append((visible_from, end, partial))
        belongs[slot] = (first, number)
    partials: list[int] = []
    for slot, pieces in covered.items():
        length = lengths[slot]
        pieces.sort()
        assert pieces[0][0] == (max(0, length - window) if window else 0) and pieces[-1][1] == length
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
        first, number = belongs[slot]
        assert number == len(pieces)
        own = [partial for _, _, partial in pieces]
        assert own == (list(range(first, first + number)) if number > 1 else [-1])
        partials += own if number > 1 else []
    assert sorted(partials) == list(range(num_partials))


def check_prefill(
    shape: Shape, spans: Sequence[tuple[int, int]], *, window: int = 0, tuning: PrefillTuning | None = None
) -> None:
    """`spans` are (tokens already in memory, new tokens) of one row each."""
    tuning, device = tuning or PrefillTuning(), shape.device
    lengths = [position + count for position, count in spans]
    live = [max(0, position + 1 - window) if window else 0 for position, _ in spans]
    kv = paged_kv(shape, lengths, live_from=live)
    counts = [count for _, count in spans]
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    columns = [list(range(len(spans))), firsts, counts, [position for position, _ in spans]]
    row, first, count, position = (
        torch.tensor(column, dtype=torch.int32, device=shape.device) for column in columns
    )
    tile_tokens = tuning.tile_tokens(shape.group)
    plan = allocate_prefill_plan(sum(counts), len(counts), tile_tokens, device=device)
    plan_prefill(plan, Spans(row=row, first=first, count=count, position=position))
    query = shape.random(sum(counts), shape.heads, shape.head_dim)
    out = torch.full_like(query, float("nan"))
    log_sum = torch.full((sum(counts), shape.heads), float("nan"), device=shape.device)
    scale = shape.head_dim**-0.5
    prefill_attention(out, log_sum, query, kv, plan, scale=scale, window=window, tuning=tuning)
    for index, (begin, number) in enumerate(spans):
        part = slice(firsts[index], firsts[index] + number)
        if number:
            expected, expected_log = reference_prefill_attention(
                query[part], kv, index, begin, scale=scale, window=window
            )
            assert_close(out[part], expected, shape.tolerance)
            assert_close(log_sum[part], expected_log, shape.tolerance)


def check_shared_plan(
    groups: Sequence[tuple[int, int]], device: str, *, group: int = 4, target: int = 33
) -> None:
    """Of `groups` (slots, tokens): every slot reads every token of its beginning once, in the order of its results, and
    no chunk is longer than it has to be."""
    tile = SharedTuning().tile_slots(group)
    counts, lengths = ([own[index] for own in groups] for index in (0, 1))
    slots = sum(counts) + 3
    plan = allocate_shared_plan(slots, target, tile_slots=tile, heads=1, head_dim=16, device=device)
    plan.items.fill_(-1)
    rest = [0] * (MAX_GROUPS - len(groups))
    columns = {
        "row": [7 + number for number in range(len(groups))] + rest,
        "first": [1 + sum(counts[:number]) for number in range(len(groups))] + rest,
        "count": counts + rest,
        "length": lengths + rest,
    }
    sent = {name: torch.tensor(own, dtype=torch.int32, device=device) for name, own in columns.items()}
    plan_shared(plan, SharedGroups(**sent))
    items, parts = plan.items[: int(plan.count)].tolist(), plan.parts.tolist()
    assert len(items) <= plan.max_items
    for slot in range(slots):
        number = next((n for n in range(len(groups)) if 0 <= slot - columns["first"][n] < counts[n]), None)
        first, chunks = parts[slot]
        if number is None:
            assert chunks == 0
            continue
        reached = 0
        for index in range(chunks):
            row, first_slot, count, begin, end, *_ = items[first // tile + index]
            assert row == 7 + number and begin == reached and first_slot + first % tile == slot
            assert 0 < count <= tile and first % tile < count and begin < end and begin % BLOCK_SIZE == 0
            reached = end
        assert reached == lengths[number]
    work = sum(-(-count // tile) * length for count, length in groups)
    longest = max((item[4] - item[3] for item in items), default=0)
    assert longest <= max(plan.min_chunk, work / target + BLOCK_SIZE)


def check_cascade(
    shape: Shape, groups: Sequence[tuple[int, Sequence[int]]], *, alone: Sequence[int] = (), target: int = 5
) -> None:
    """Beginnings that the rows of each of `groups` share (tokens, and what each row has behind them), computed once for
    its rows and joined with each row's rest; rows `alone` share nothing. `target`: of the chunks of beginnings."""
    shared = [(number, prefix) for number, (prefix, rests) in enumerate(groups) for _ in rests]
    lengths = [prefix + rest for prefix, rests in groups for rest in rests] + list(alone)
    kv = paged_kv(shape, lengths)
    slots, device = len(lengths), shape.device
    # Slots are not rows: groups stand in the order of slots.
    slot_rows = torch.randperm(slots).to(torch.int32)
    columns = {
        name: torch.zeros(MAX_GROUPS, dtype=torch.int32) for name in ("row", "first", "count", "length")
    }
    of_row, shared_tokens = torch.zeros(slots, dtype=torch.int32), torch.zeros(slots, dtype=torch.int32)
    table = kv.block_table.clone()
    for slot, row in enumerate(slot_rows.tolist()):
        kv.block_table[row] = table[slot]
        of_row[row] = lengths[slot]
        if slot < len(shared):
            number, prefix = shared[slot]
            if columns["count"][number] == 0:
                columns["row"][number], columns["first"][number] = row, slot
                columns["length"][number] = prefix
            kv.block_table[row, : prefix // BLOCK_SIZE] = table[
                int(columns["first"][number]), : prefix // BLOCK_SIZE
            ]
            columns["count"][number] += 1
            shared_tokens[row] = prefix
    rows, visible = slot_rows.to(device), of_row.to(device)
    query = shape.random(slots, shape.heads, shape.head_dim)
    scale = shape.head_dim**-0.5
    out = torch.empty_like(query)
    log_sum = torch.empty(slots, shape.heads, device=device)
    plan = allocate_plan(slots, 8, min_chunk=BLOCK_SIZE, device=device)
    plan_decode(plan, rows, visible, shared=shared_tokens.to(device))
    partials = allocate_partials(plan, heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim)
    decode_attention(out, log_sum, query, kv, plan, partials, scale=scale)
    together = allocate_shared_plan(
        slots + 5,
        target,
        tile_slots=SharedTuning().tile_slots(shape.group),
        heads=shape.heads,
        head_dim=shape.head_dim,
        min_chunk=BLOCK_SIZE,
        device=device,
    ).limited(slots)
    plan_shared(together, SharedGroups(**{name: column.to(device) for name, column in columns.items()}))
    assert int(together.count) <= together.max_items
    shared_attention(query, kv, together, scale=scale)
    merge_shared(out, log_sum, together)
    expected, expected_log = reference_decode_attention(query, kv, rows, visible, scale=scale)
    assert_close(out, expected, shape.tolerance)
    assert_close(log_sum, expected_log, shape.tolerance)


def check_rope_kv_write(shape: Shape, tokens: int, *, rotary_dim: int, has_norm: bool) -> None:
    positions = torch.randint(0, 500, (tokens,), dtype=torch.int32, device=shape.device)
    num_blocks = max(shape.num_blocks, tokens // BLOCK_SIZE + 3)
    # The highest slots, each at most once, and one token that is stored nowhere.
    slots = num_blocks * BLOCK_SIZE - 1 - torch.randperm(tokens + 5)[:tokens]
    slots[0] = -1
    sizes = (num_blocks, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    keys, values = (torch.zeros(sizes, dtype=shape.stored, device=shape.device) for _ in range(2))
    product = shape.random(tokens, (shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    angles = torch.rand(500, rotary_dim // 2, device=shape.device) * 6
    rotation = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = [shape.random(shape.head_dim) for _ in range(2)]
    norm = HeadNorm(query_weight=weights[0], key_weight=weights[1], epsilon=1e-6) if has_norm else None
    places = TokenPlaces(positions=positions, slots=slots.to(shape.device))
    query = torch.full((tokens, shape.heads, shape.head_dim), float("nan"), device=shape.device)
    query = query.to(shape.dtype)
    rope_kv_write(query, keys, values, product, places, rotation, norm=norm)
    q, k, v = reference_rope_kv_write(
        product, places, rotation, heads=shape.heads, kv_heads=shape.kv_heads, norm=norm
    )
    assert_close(query, q, shape.tolerance)
    block, place = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    stored = slots >= 0
    for pool, wide in ((keys, k), (values, v)):
        part, expected = pool.to(shape.dtype), wide[stored.to(shape.device)]
        found = part[block[stored], :, place[stored]]
        if shape.stored == FP8:
            assert_rounded_once(found, expected)
        else:
            assert_close(found, expected, shape.tolerance)
        total = int(torch.count_nonzero(part[num_blocks - tokens // BLOCK_SIZE - 3 :].abs().sum((1, 3))))
        assert total == int(stored.sum()), "a slot was written that was not asked for"
        assert not part[0].any(), "the null block was written"


def check_place_kv(shape: Shape, tokens: int, *, rotary_dim: int) -> None:
    """From slots of one half of the pool to slots of the other, one token nowhere; nothing else is written."""
    half_of_it = max(shape.num_blocks // 2, tokens // BLOCK_SIZE + 2) * BLOCK_SIZE
    sources = half_of_it - 1 - torch.randperm(tokens + 5)[:tokens]
    targets = 2 * half_of_it - 1 - torch.randperm(tokens + 5)[:tokens]
    targets[0] = -1
    sizes = (2 * half_of_it // BLOCK_SIZE, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    keys, values = (torch.zeros(sizes, dtype=shape.dtype, device=shape.device) for _ in range(2))
    block, place = sources // BLOCK_SIZE, sources % BLOCK_SIZE
    old = [shape.random(tokens, shape.kv_heads, shape.head_dim) for _ in range(2)]
    for pool, part in zip((keys, values), old, strict=True):
        pool[block, :, place] = part
    angles = torch.rand(3, rotary_dim // 2, device=shape.device) * 6
    turns = torch.randint(0, 3, (tokens,), dtype=torch.int32, device=shape.device)
    slots = (sources.to(shape.device), targets.to(shape.device))
    place_kv(keys, values, *slots, turns, torch.cat([angles.cos(), angles.sin()], dim=1))
    new = reference_placed(old[0], old[1], angles[turns.long()])
    block, place = targets[1:] // BLOCK_SIZE, targets[1:] % BLOCK_SIZE
    assert_close(keys[block, :, place], new[0][1:], shape.tolerance)
    assert torch.equal(values[block, :, place], new[1][1:])
    first = half_of_it // BLOCK_SIZE
    for pool, part in zip((keys, values), old, strict=True):
        assert torch.equal(pool[sources // BLOCK_SIZE, :, sources % BLOCK_SIZE], part), "a source was written"
        written = int(torch.count_nonzero(pool[first:].abs().sum((1, 3))))
        assert written == tokens - 1, "a slot was written that was not asked for"


def check_saturation(shape: Shape) -> None:
    """Keys and values beyond eight bits become the largest they have, and what is no number stays so."""
    row = torch.tensor(
        [0.0, 447.0, 449.0, 463.0, 465.0, 1e4, 3e4, float("inf"), float("nan"), 2.0**-10, 2.0**-9]
    )
    head = torch.cat([row, -row, torch.zeros(shape.head_dim - 2 * len(row))]).to(shape.dtype)
    product = head.repeat(1, shape.heads + 2 * shape.kv_heads).to(shape.device)
    sizes = (2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
    keys, values = (torch.zeros(sizes, dtype=FP8, device=shape.device) for _ in range(2))
    query = torch.zeros(1, shape.heads, shape.head_dim, dtype=shape.dtype, device=shape.device)
    one = torch.ones(1, dtype=torch.int32, device=shape.device)
    still = torch.tensor([[1.0, 0.0], [1.0, 0.0]], device=shape.device)  # one pair, turned by nothing
    rope_kv_write(query, keys, values, product, TokenPlaces(positions=one, slots=one * BLOCK_SIZE + 7), still)
    assert torch.equal(query.nan_to_num(), head.expand_as(query).to(shape.device).nan_to_num())
    expected = head.float().clamp(-LARGEST, LARGEST).to(FP8).float()  # clamp keeps what is no number
    assert expected.isnan().sum() == 2 and expected.nan_to_num().abs().max() == LARGEST
    for pool in (keys, values):
        found = pool.float()[1, :, 7].cpu()
        assert torch.equal(found.isnan(), expected.isnan().expand_as(found))
        assert torch.equal(found.nan_to_num(), expected.expand_as(found).nan_to_num())


def check_row_product(shape: Shape, columns: int, inner: int, *, has_norm: bool, gated: bool) -> None:
    x, residual, norm_weight = (shape.random(inner) for _ in range(3))
    weight = shape.random(columns * (2 if gated else 1), inner)
    nan = float("nan")
    norm = None
    if has_norm:
        new = torch.full_like(residual, nan)
        norm = RowNorm(residual=residual, new_residual=new, weight=norm_weight, epsilon=1e-6)
    out = torch.full((columns,), nan, dtype=shape.dtype, device=shape.device)
    row_product(out, x, weight, norm=norm, gated=gated)
    expected, total = reference_row_product(x, weight, norm=norm, gated=gated)
    assert_close(out, expected, shape.tolerance)
    if norm is not None:
        assert_close(norm.new_residual, total, shape.tolerance)
