"""Timing on the card: graphs of many calls over different memory, and the ceilings everything is compared with.

Each call of a case uses its own buffers, so that the level-2 cache, which would show more than the memory gives,
does not help; a graph leaves the host out of it.
"""

from __future__ import annotations

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
import statistics
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 8192  # bf16 numbers in 16 KB: one block of one head


def graph_microseconds(calls: Sequence[Callable[[], object]], *, milliseconds: float = 60.0) -> float:
    """Median microseconds per call, of the calls captured one after another in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    first = replay_milliseconds(graph, 2)
    times = [replay_milliseconds(graph, 1) for _ in range(max(5, min(200, int(milliseconds / first))))]
    return statistics.median(times) * 1000 / len(calls)


def replay_milliseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / times


@triton.jit(do_not_specialize=["pieces"])
def _read_kernel(sink, source, order, pieces, PER_PROGRAM: tl.constexpr, PIECE: tl.constexpr):
    lane = tl.arange(0, PIECE)
    total = tl.zeros([PIECE], tl.float32)
    for index in range(PER_PROGRAM):
        piece = tl.load(order + tl.program_id(0) * PER_PROGRAM + index).to(tl.int64)
        total += tl.load(source + piece * PIECE + lane).to(tl.float32)
    if tl.sum(total, 0) == 12345.678:  # never, but the compiler does not know
        tl.store(sink, 1.0)


def read_kernel(sink: Tensor, source: Tensor, order: Tensor) -> None:
    """Reads the 16 KB pieces of `source` that `order` names."""
    per_program = 8
    _read_kernel[(len(order) // per_program,)](
        sink, source, order, len(order), PER_PROGRAM=per_program, PIECE=PIECE, num_warps=8
    )


def read_gigabytes_per_second(source: Tensor, order: Tensor) -> float:
    sink = torch.zeros(1, device=source.device)
    microseconds = graph_microseconds([lambda: read_kernel(sink, source, order)])
    return len(order) // 8 * 8 * PIECE * 2 / microseconds / 1e3


def read_ceiling(gigabytes: float = 8.0) -> tuple[float, float]:
    """GB/s of reading in order and of reading 16 KB pieces at random from a pool of this size, random data."""
    pieces = int(gigabytes * 2**30) // (PIECE * 2)
    source = torch.empty(pieces * PIECE, dtype=torch.bfloat16, device="cuda")
    for part in torch.split(source, 2**28):
        part.normal_()
    used = min(pieces, 4 * 2**30 // (PIECE * 2))
    in_order = torch.arange(used, dtype=torch.int32, device="cuda")
    at_random = torch.randperm(pieces, device="cuda")[:used].to(torch.int32)
    return read_gigabytes_per_second(source, in_order), read_gigabytes_per_second(source, at_random)


def matrix_ceiling(size: int = 8192) -> float:
    """TFLOP/s of a large bf16 product on random data."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    microseconds = graph_microseconds([lambda: torch.mm(a, b, out=out)] * 4, milliseconds=200)
    return 2 * size**3 / microseconds / 1e6
