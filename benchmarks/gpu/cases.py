"""The shapes that are timed: attention at the workloads' batches, the small kernels, sampling, products.

A case is a list of calls over different buffers, and what one call moves or computes. It must not time anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.runner.gpu.device_layers import packed, quantized
from paceline.runner.gpu.kernels import BLOCK_SIZE, PagedKV
from paceline.runner.gpu.kernels.decode_attention import (
    DecodeTuning,
    allocate_partials,
    allocate_plan,
    decode_attention,
    decode_tuning,
    plan_decode,
)
from paceline.runner.gpu.kernels.gated_product import gated_activation, gated_product, is_worth_gating
from paceline.runner.gpu.kernels.gumbel_sampling import SamplingColumns, allocate_candidates, sample
from paceline.runner.gpu.kernels.packed_product import packed_product, packed_tuning
from paceline.runner.gpu.kernels.place_kv import place_kv
from paceline.runner.gpu.kernels.prefill_attention import (
    PrefillTuning,
    Spans,
    allocate_prefill_plan,
    plan_prefill,
    prefill_attention,
)
from paceline.runner.gpu.kernels.residual_norm import residual_norm
from paceline.runner.gpu.kernels.rope_kv_write import HeadNorm, TokenPlaces, rope_kv_write
from paceline.runner.gpu.kernels.row_product import row_product
from paceline.runner.gpu.kernels.scaled_product import (
    scaled_matrix_product,
    scaled_product,
    scaled_tuning,
)
from paceline.runner.gpu.kernels.scaled_rows import allocate_scaled_rows, quantize_rows
from paceline.runner.gpu.kernels.shared_attention import (
    MAX_GROUPS,
    SharedGroups,
    SharedTuning,
    allocate_shared_plan,
    merge_shared,
    plan_shared,
    shared_attention,
)
from paceline.runner.gpu.kernels.skinny_product import narrow_tuning, skinny_product
from paceline.runner.gpu.kernels.token_logprobs import (
    REPORT_WIDTH,
    LogprobColumns,
    allocate_logprob_parts,
    token_logprobs,
)

BF16 = torch.bfloat16
Call = Callable[[], object]
MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kernel: str
    shape: str
    calls: Sequence[Call]
    num_bytes: float = 0.0  # moved by one call
    flops: float = 0.0  # or computed: the larger decides which ceiling the case is held against


def normal(*sizes: int) -> Tensor:
    out = torch.empty(*sizes, dtype=BF16, device="cuda")
    for part in torch.split(out.view(-1), 2**28):
        part.normal_()
    return out


def skewed_lengths(rows: int, tokens: int) -> list[int]:
    """Log-normal as chat contexts are, one row of an eighth of all tokens, the rest scaled to the sum."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(rows, generator=generator).exp()
    lengths = (weights / weights.sum() * tokens * 7 / 8).long().clamp_min(1)
    lengths[0] = tokens // 8
    return [int(length) for length in lengths]


def decode_case(
    name: str,
    lengths: Sequence[int],
    *,
    group: int = 2,
    layers: int = 8,
    tuning: DecodeTuning | None = None,
    kv_dtype: torch.dtype = BF16,
) -> Case:
    """One decode step's attention over `layers` caches; the plan is made once, as in a step."""
    kv_heads, head_dim = 8, 128
    heads, slots = kv_heads * group, len(lengths)
    tuning = tuning or decode_tuning(slots)
    needed = [(length + BLOCK_SIZE - 1) // BLOCK_SIZE for length in lengths]
    table = torch.zeros(slots, max(needed), dtype=torch.int32)
    blocks = torch.randperm(sum(needed)).to(torch.int32)
    for row in range(slots):
        table[row, : needed[row]] = blocks[sum(needed[:row]) :][: needed[row]]
    table = table.cuda()
    plan = allocate_plan(slots, tuning.target_chunks(MULTIPROCESSORS, kv_heads))
    partials = allocate_partials(plan, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    rows = torch.arange(slots, dtype=torch.int32, device="cuda")
    plan_decode(plan, rows, torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    sizes = (sum(needed), kv_heads, BLOCK_SIZE, head_dim)
    caches = [
        PagedKV(keys=normal(*sizes).to(kv_dtype), values=normal(*sizes).to(kv_dtype), block_table=table)
        for _ in range(layers)
    ]
    query = normal(slots, heads, head_dim)
    out, log_sum = torch.empty_like(query), torch.empty(slots, heads, device="cuda")
    calls = [
        lambda kv=kv: decode_attention(out, log_sum, query, kv, plan, partials, scale=0.088, tuning=tuning)
        for kv in caches
    ]
    moved = sum(lengths) * kv_heads * head_dim * 2 * kv_dtype.itemsize + query.numel() * 4
    shape = (
        f"{name}: {slots} rows, {sum(lengths) / 1e3:.0f}k tokens, {heads}/{kv_heads} heads{_narrow(kv_dtype)}"
    )
    return Case(kernel="decode attention", shape=shape, calls=calls, num_bytes=moved)


def plan_case(slots: int) -> Case:
    plan = allocate_plan(slots, 99)
    rows = torch.arange(slots, dtype=torch.int32, device="cuda")
    lengths = torch.randint(1, 2000, (slots,), dtype=torch.int32, device="cuda")
    return Case(
        kernel="decode plan", shape=f"{slots} slots", calls=[lambda: plan_decode(plan, rows, lengths)] * 20
    )


def shared_case(
    trees: int,
    branches: int,
    length: int,
    *,
    group: int,
    layers: int = 8,
    tuning: SharedTuning = SharedTuning(),  # noqa: B008 - frozen
) -> Case:
    """The beginnings of `trees` for all their branches, and the merge; what each row has behind is not in it."""
    kv_heads, head_dim = 8, 128
    heads, slots, blocks = kv_heads * group, trees * branches, length // BLOCK_SIZE
    table = torch.randperm(trees * blocks).to(torch.int32).view(trees, blocks).cuda()
    sizes = (trees * blocks, kv_heads, BLOCK_SIZE, head_dim)
    caches = [PagedKV(keys=normal(*sizes), values=normal(*sizes), block_table=table) for _ in range(layers)]
    tree = torch.arange(MAX_GROUPS, dtype=torch.int32, device="cuda")
    exists = (tree < trees).to(torch.int32)
    plan = allocate_shared_plan(
        slots,
        tuning.target_chunks(MULTIPROCESSORS, kv_heads),
        tile_slots=tuning.tile_slots(group),
        heads=heads,
        head_dim=head_dim,
    )
    plan_shared(
        plan,
        SharedGroups(
            row=tree, first=tree * branches, count=exists * branches, length=exists * blocks * BLOCK_SIZE
        ),
    )
    query = normal(slots, heads, head_dim)
    out, log_sum = torch.zeros_like(query), torch.zeros(slots, heads, device="cuda")

    def call(kv: PagedKV) -> None:
        shared_attention(query, kv, plan, scale=0.088, tuning=tuning)
        merge_shared(out, log_sum, plan)

    moved = trees * blocks * BLOCK_SIZE * kv_heads * head_dim * 2 * 2
    how = f"{tuning.query_rows} query rows, {tuning.num_warps} warps, {tuning.num_stages} stages"
    shape = f"{trees} x {branches} rows of {length} tokens, {heads}/{kv_heads} heads, {how}, "
    shape += f"{tuning.programs_per_multiprocessor} programs"
    calls = [lambda kv=kv: call(kv) for kv in caches]
    return Case(kernel="shared attention and merge", shape=shape, calls=calls, num_bytes=moved)


def prefill_case(
    tokens: int,
    *,
    group: int,
    context: int = 0,
    spans: int = 1,
    kv_dtype: torch.dtype = BF16,
    tuning: PrefillTuning = PrefillTuning(),  # noqa: B008 - frozen
) -> Case:
    kv_heads, head_dim = 8, 128
    heads, length = kv_heads * group, context + tokens
    needed = (length + BLOCK_SIZE - 1) // BLOCK_SIZE
    blocks = torch.randperm(needed * spans, device="cuda").to(torch.int32)
    kv = PagedKV(
        keys=normal(needed * spans, kv_heads, BLOCK_SIZE, head_dim).to(kv_dtype),
        values=normal(needed * spans, kv_heads, BLOCK_SIZE, head_dim).to(kv_dtype),
        block_table=blocks.view(spans, needed),
    )
    index = torch.arange(spans, dtype=torch.int32, device="cuda")
    plan = allocate_prefill_plan(tokens * spans, spans, tuning.tile_tokens(group))
    columns = Spans(row=index, first=index * tokens, count=index * 0 + tokens, position=index * 0 + context)
    plan_prefill(plan, columns)
    query = normal(tokens * spans, heads, head_dim)
    out, log_sum = torch.empty_like(query), torch.empty(tokens * spans, heads, device="cuda")
    calls = [lambda: prefill_attention(out, log_sum, query, kv, plan, scale=0.088, tuning=tuning)] * 4
    pairs = spans * (tokens * context + tokens * (tokens + 1) / 2)
    shape = f"{spans} x {tokens} tokens after {context}, {heads}/{kv_heads} heads{_narrow(kv_dtype)}"
    if tuning != PrefillTuning():
        shape += f", {tuning.query_rows} rows, {tuning.num_warps} warps, {tuning.num_stages} stages"
    return Case(kernel="prefill attention", shape=shape, calls=calls, flops=4 * heads * head_dim * pairs)


def _narrow(kv_dtype: torch.dtype) -> str:
    return ", fp8 KV" if kv_dtype == torch.float8_e4m3fn else ""


def sdpa_case(tokens: int, *, group: int, backend: torch.nn.attention.SDPBackend) -> Case:
    """torch's dense attention on the same work, without pages."""
    kv_heads, head_dim = 8, 128
    q = normal(1, kv_heads * group, tokens, head_dim)
    k, v = (normal(1, kv_heads, tokens, head_dim) for _ in range(2))

    def call() -> object:
        with torch.nn.attention.sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flops = 2 * kv_heads * group * head_dim * tokens * (tokens + 1)
    shape = f"1 x {tokens} tokens after 0, {kv_heads * group}/{kv_heads} heads"
    return Case(kernel=f"torch SDPA {backend.name.lower()}", shape=shape, calls=[call] * 4, flops=flops)


def small_cases(tokens: int, *, width: int, heads: int, inner: int) -> list[Case]:
    """The kernels between the products, at one model's sizes."""
    kv_heads, head_dim = 8, 128
    copies = max(2, min(16, 2**28 // (tokens * inner * 6)))
    product_width = (heads + 2 * kv_heads) * head_dim
    norms, ropes, gates = [], [], []
    blocks = max(64, tokens // 16)
    keys, values = (normal(blocks, kv_heads, BLOCK_SIZE, head_dim) for _ in range(2))
    weight, head_weight = normal(width), normal(head_dim)
    norm = HeadNorm(query_weight=head_weight, key_weight=head_weight, epsilon=1e-6)
    rotation = torch.rand(4096, head_dim, device="cuda")
    positions = torch.randint(0, 4096, (tokens,), dtype=torch.int32, device="cuda")
    slots = torch.randperm(blocks * BLOCK_SIZE, device="cuda")[:tokens]
    places = TokenPlaces(positions=positions, slots=slots)
    for _ in range(copies):
        x, residual, out = (normal(tokens, width) for _ in range(3))
        norms.append(lambda o=out, r=residual, u=x: residual_norm(o, r, u, weight, epsilon=1e-6))
        product, query = normal(tokens, product_width), normal(tokens, heads, head_dim)
        ropes.append(
            lambda p=product, q=query: rope_kv_write(q, keys, values, p, places, rotation, norm=norm)
        )
        wide, narrow = normal(tokens, 2 * inner), normal(tokens, inner)
        gates.append(lambda o=narrow, p=wide: gated_activation(o, p))
    shape = f"{tokens} tokens, width {width}"
    return [
        Case(kernel="residual + norm", shape=shape, calls=norms, num_bytes=tokens * width * 8),
        Case(kernel="norm + rope + kv write", shape=shape, calls=ropes, num_bytes=tokens * product_width * 4),
        Case(
            kernel="swiglu",
            shape=f"{tokens} tokens, inner {inner}",
            calls=gates,
            num_bytes=tokens * inner * 6,
        ),
    ]


def place_case(tokens: int, *, layers: int = 32) -> Case:
    """Documents of 1,000 tokens into a prompt of an 8B model, one call for each layer."""
    kv_heads, head_dim = 8, 128
    blocks = 2 * (tokens // BLOCK_SIZE + 1)
    pools = [[normal(blocks, kv_heads, BLOCK_SIZE, head_dim) for _ in range(2)] for _ in range(layers)]
    sources = torch.arange(tokens, device="cuda")
    targets = blocks // 2 * BLOCK_SIZE + sources
    turns = (sources // 1000).to(torch.int32)
    rotation = torch.rand(tokens // 1000 + 1, head_dim, device="cuda")
    calls = [partial(place_kv, keys, values, sources, targets, turns, rotation) for keys, values in pools]
    return Case(
        kernel="place kv",
        shape=f"{tokens} tokens, {kv_heads} heads, one layer",
        calls=calls,
        num_bytes=tokens * kv_heads * head_dim * 8,
    )


def sampling_columns(rows: int, temperature: float) -> SamplingColumns:
    numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
    heat = torch.full((rows,), temperature, dtype=torch.float64, device="cuda")
    return SamplingColumns(slot_rows=numbers, temperature=heat, seed=numbers.long(), position=numbers.long())


def logprobs_case(rows: int, vocabulary: int) -> Case:
    """Of all rows."""
    logits = [normal(rows, vocabulary) for _ in range(4)]
    slot_rows = torch.arange(rows, dtype=torch.int32, device="cuda")
    columns = LogprobColumns(slot_rows=slot_rows, wanted=torch.ones_like(slot_rows), tokens=slot_rows * 3)
    parts = allocate_logprob_parts(rows, vocabulary)
    report = torch.zeros(rows, REPORT_WIDTH, dtype=torch.int32, device="cuda")
    calls = [lambda own=own: token_logprobs(report, own, columns, parts) for own in logits]
    shape = f"{rows} rows of {vocabulary} logits"
    return Case(kernel="logprobs", shape=shape, calls=calls, num_bytes=rows * vocabulary * 2)


def sampling_case(rows: int, temperature: float) -> Case:
    vocabulary = 151_936
    logits = [normal(rows, vocabulary) for _ in range(max(1, min(8, 1024 // rows)))]
    columns = sampling_columns(rows, temperature)
    tokens = torch.empty(rows, dtype=torch.int32, device="cuda")
    finite = torch.empty(rows, dtype=torch.uint8, device="cuda")
    room = allocate_candidates(rows, vocabulary)
    calls = [lambda each=each: sample(tokens, finite, each, columns, room) for each in logits]
    shape = f"{rows} x {vocabulary}, temperature {temperature}, turns {room.turns}"
    return Case(kernel="sampling", shape=shape, calls=calls, num_bytes=rows * vocabulary * 2)


def product_cases(rows: int, columns: int, inner: int) -> list[Case]:
    """Our product and cuBLAS's for few rows, over as many matrices as the level-2 cache does not hold."""
    weights = [normal(columns, inner) for _ in range(max(2, min(32, 2**29 // (columns * inner * 2))))]
    x = normal(rows, inner)
    out = torch.empty(rows, columns, device="cuda", dtype=BF16)
    shape = f"{rows} rows, {columns} x {inner}"
    moved = columns * inner * 2
    theirs = [lambda w=w: torch.mm(x, w.T, out=out) for w in weights]
    found = [Case(kernel="cuBLAS", shape=shape, calls=theirs, num_bytes=moved)]
    tuning = narrow_tuning(columns, inner)
    if rows == 1:
        ours = [lambda w=w: row_product(out[0], x[0], w) for w in weights]
        found.append(Case(kernel="row product", shape=shape, calls=ours, num_bytes=moved))
    elif tuning is not None:
        parts = torch.empty(tuning.parts, rows, columns, device="cuda")
        ours = [lambda w=w: skinny_product(parts, x, w, tuning=tuning) for w in weights]
        found.append(Case(kernel="skinny product", shape=shape, calls=ours, num_bytes=moved))
    return found


def quantized_cases(rows: int, columns: int, inner: int) -> list[Case]:
    """Products of few rows with weights of eight and four bits; benchmarks/gpu/scaled.py has all ways to cut them."""
    device, fp8 = torch.device("cuda"), torch.float8_e4m3fn
    dense = [normal(columns, inner) for _ in range(max(2, min(32, 2**28 // (columns * inner))))]
    eight, four = [quantized(matrix, fp8) for matrix in dense], [packed(matrix, BF16) for matrix in dense]
    x, out = normal(rows, inner), torch.empty(rows, columns, device=device, dtype=BF16)
    scaled = allocate_scaled_rows(rows, inner, fp8, device)
    quantize_rows(scaled, x)
    tuning, cut = scaled_tuning(rows, columns, inner), packed_tuning(rows, columns, inner)
    calls: dict[str, list[Call]] = {
        "fp8 product": [partial(scaled_product, out, scaled, weight, tuning=tuning) for weight in eight],
        "fp8 by torch": [partial(scaled_matrix_product, out, scaled, weight) for weight in eight],
        "int4 product": [partial(packed_product, out, x, weight, tuning=cut) for weight in four],
    }
    if rows == 1:
        calls["fp8 row product"] = [partial(row_product, out[0], x[0], weight) for weight in eight]
    shape = f"{rows} rows, {columns} x {inner}"
    sizes = {"int4 product": columns * inner * 0.5}
    return [
        Case(kernel=name, shape=shape, calls=own, num_bytes=sizes.get(name, columns * inner))
        for name, own in calls.items()
    ]


def gated_cases(tokens: int, columns: int, inner: int) -> list[Case]:
    """Gate, up and activation: cuBLAS and a kernel after it, and in one product; `*` marks what a step takes."""
    weights = [
        normal(2 * columns, inner) * inner**-0.5 for _ in range(max(2, 2**29 // (columns * inner * 4)))
    ]
    x, wide, out = normal(tokens, inner), normal(tokens, 2 * columns), normal(tokens, columns)
    shape = f"{tokens} tokens, {columns} x {inner}"
    flops = 4.0 * tokens * columns * inner

    def one_after_the_other(weight: Tensor) -> None:
        torch.mm(x, weight.T, out=wide)
        gated_activation(out, wide)

    theirs = [lambda w=w: one_after_the_other(w) for w in weights]
    ours = [lambda w=w: gated_product(out, x, w) for w in weights]
    marks = ("", " *") if is_worth_gating(tokens, columns, inner, MULTIPROCESSORS) else (" *", "")
    return [
        Case(kernel=f"cuBLAS, swiglu{marks[0]}", shape=shape, calls=theirs, flops=flops),
        Case(kernel=f"gated product{marks[1]}", shape=shape, calls=ours, flops=flops),
    ]
