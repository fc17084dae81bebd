"""What is timed of encoders: attention of sequences of real sizes, the kernels between products, and the products.

A case is a list of calls over different buffers, as in cases.py. It must not time anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.cases import BF16, Call, Case, normal
from paceline.runner.gpu.kernels.inner_activation import inner_activation
from paceline.runner.gpu.kernels.layer_norm import layer_norm
from paceline.runner.gpu.kernels.ragged_attention import (
    RaggedTuning,
    ragged_attention,
    ragged_tiles,
    ragged_tuning,
)
from paceline.runner.gpu.kernels.span_sums import span_sums
from paceline.runner.gpu.kernels.token_inputs import NO_VECTOR, PicturePages, token_inputs

# Queries of a tile, keys, warps, stages.
TILES = ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 4, 2), (64, 128, 4, 2))
COPIES = 4


def attention_case(
    name: str, lengths: Sequence[int], heads: int, head_dim: int, tuning: RaggedTuning | None = None
) -> Case:
    counts = np.array(lengths)
    starts = np.cumsum(counts) - counts
    tuning = tuning or ragged_tuning(head_dim)
    tiles = torch.from_numpy(ragged_tiles(starts, counts, tuning.query_rows)).cuda()
    calls = []
    for _ in range(COPIES):
        query, key, value = normal(int(counts.sum()), 3, heads, head_dim).unbind(1)
        out = torch.empty(len(query), heads, head_dim, dtype=BF16, device="cuda")
        calls.append(
            partial(
                ragged_attention,
                out,
                query,
                key,
                value,
                tiles,
                scale=head_dim**-0.5,
                tuning=tuning,
            )
        )
    how = f"{tuning.query_rows} x {tuning.keys}, {tuning.num_warps} warps, {tuning.num_stages} stages"
    flops = 4.0 * heads * head_dim * float(np.square(counts.astype(float)).sum())
    return Case(kernel="ragged attention", shape=f"{name}, {how}", calls=calls, flops=flops)


def attention_cases() -> Iterator[Case]:
    """Texts, SigLIP's tiles, and pictures of Qwen2.5-VL: full layers and windows."""
    yield attention_case("64 tokens x 256, heads 12 x 64", [64] * 256, 12, 64)
    yield attention_case("512 tokens x 32, heads 12 x 64", [512] * 32, 12, 64)
    yield attention_case("729 patches x 16, heads 16 x 72", [729] * 16, 16, 72)
    yield attention_case("1,024 patches x 16, heads 12 x 64", [1024] * 16, 12, 64)
    for patches in (1024, 4096, 16_384):
        yield attention_case(f"{patches} patches, heads 16 x 80", [patches], 16, 80)
    yield attention_case("windows of 64 patches x 256, heads 16 x 80", [64] * 256, 16, 80)


def tuned_cases() -> Iterator[Case]:
    """The same with other tiles."""
    for rows, keys, warps, stages in TILES:
        tuning = RaggedTuning(query_rows=rows, keys=keys, num_warps=warps, num_stages=stages)
        yield attention_case("512 tokens x 32, heads 12 x 64", [512] * 32, 12, 64, tuning)
        yield attention_case("4,096 patches, heads 16 x 80", [4096], 16, 80, tuning)


def small_cases(tokens: int = 16_384, width: int = 768, inner: int = 3072) -> Iterator[Case]:
    weight, bias = normal(width).float(), normal(width).float()
    norms, activations, sums = [], [], []
    runs = torch.tensor([[at, at * 512, 512, 0] for at in range(tokens // 512)], dtype=torch.int32)
    for _ in range(COPIES):
        x, update, wide = normal(tokens, width), normal(tokens, width), normal(tokens, inner)
        norms.append(partial(layer_norm, x, x, update, weight, bias, epsilon=1e-6))
        activations.append(partial(inner_activation, wide, wide, activation="gelu"))
        into = torch.zeros(runs.shape[0], width, device="cuda")
        sums.append(partial(span_sums, into, x, runs.T.contiguous().cuda()))
    shape = f"{tokens} tokens"
    yield Case(
        kernel="layer norm", shape=f"{shape}, width {width}", calls=norms, num_bytes=tokens * width * 6
    )
    yield Case(
        kernel="gelu", shape=f"{shape}, inner {inner}", calls=activations, num_bytes=tokens * inner * 4
    )
    yield Case(kernel="span sums", shape=f"{shape}, width {width}", calls=sums, num_bytes=tokens * width * 2)


def input_cases(tokens: int = 12_288, width: int = 4096) -> Iterator[Case]:
    """What the first layer of a decoder reads, beside the gather that it was before."""
    table, vectors = normal(128_256, width), normal(8192, width)
    slots = (torch.arange(tokens, dtype=torch.int32, device="cuda") % 16_384 - 8192).clamp_(min=NO_VECTOR)
    pages = PicturePages(vectors=vectors, slots=slots)
    for name in ("text", "a third pictures", "index_select"):
        calls: list[Call] = []
        for _ in range(COPIES):
            ids = torch.randint(0, len(table), (tokens,), dtype=torch.int32, device="cuda")
            out = torch.empty(tokens, width, dtype=BF16, device="cuda")
            if name == "index_select":
                calls.append(partial(torch.index_select, table, 0, ids, out=out))
            elif name == "text":
                calls.append(partial(token_inputs, out, table, ids))
            else:
                calls.append(partial(token_inputs, out, table, ids, pages=pages))
        shape = f"{tokens} tokens, width {width}, {name}"
        yield Case(kernel="token inputs", shape=shape, calls=calls, num_bytes=tokens * width * 4)


def product_cases(tokens: int = 16_384, width: int = 768, inner: int = 3072) -> Iterator[Case]:
    """cuBLAS with the bias in it, at the sizes of a layer."""
    for columns, rows in ((3 * width, width), (width, width), (inner, width), (width, inner)):
        calls = []
        for _ in range(COPIES):
            x, weight, bias = normal(tokens, rows), normal(columns, rows), normal(columns)
            out = torch.empty(tokens, columns, dtype=BF16, device="cuda")
            calls.append(partial(torch.addmm, bias, x, weight.T, out=out))
        yield Case(
            kernel="product",
            shape=f"{tokens} x {rows} x {columns}",
            calls=calls,
            flops=2.0 * tokens * rows * columns,
        )


def encoder_cases() -> Iterator[Case]:
    yield from attention_cases()
    yield from small_cases()
    yield from input_cases()
    yield from product_cases()
