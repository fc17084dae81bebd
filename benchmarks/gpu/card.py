"""Timing on the card: graphs of many calls over different memory, the ceilings everything is compared with, and what
the card and its host link give before any of our kernels run.

Each call of a case uses separate buffers, so that the level-2 cache, which would show more than the memory gives, does
not help; a graph leaves the host out of it. `measure_card`: sustained matrix rates at the sizes of mixed steps, random
reads from a pool of the size of a cache, what a graph replay and a launch cost the host, how soon the host sees a
number a kernel stored in pinned memory, and how much a matrix product and a stream of reads hinder each other.
"""

from __future__ import annotations

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 8192  # bf16 numbers in 16 KB: one block of one head


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls one after another in one graph, each made once before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_microseconds(calls: Sequence[Callable[[], object]], *, milliseconds: float = 60.0) -> float:
    """Median microseconds per call, of the calls captured one after another in one graph."""
    graph = captured(calls)
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


def matrix_ceiling() -> float:
    """TFLOP/s of a large bf16 product on random data."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    microseconds = graph_microseconds([lambda: torch.mm(a, b, out=out)] * 4, milliseconds=200)
    return 2 * size**3 / microseconds / 1e6


# (columns, inner) of a layer's products: q, k and v together, output, gate and up together, down
LAYERS = {
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
STEP_TOKENS = (1152, 2048, 4096, 8192)


def measure_card() -> dict[str, float]:
    """All figures by name; the unit is the last word of the name."""
    in_order, at_random = read_ceiling(100.0)
    figures = {
        "read in order from 100 GB, GB/s": in_order,
        "read 16 KB at random from 100 GB, GB/s": at_random,
    }
    torch.cuda.empty_cache()
    for model, shapes in LAYERS.items():
        for tokens in STEP_TOKENS:
            rate = layer_rate(shapes, tokens)
            figures[f"products of a {model} layer at {tokens} tokens, TFLOP/s"] = rate
    return figures | launch_costs() | poll_latency() | overlap()


def layer_rate(shapes: tuple[tuple[int, int], ...], tokens: int) -> float:
    """Rate over the last half of a second of one layer's products after another, different weights each."""
    copies = max(1, min(16, 2**30 // sum(columns * inner * 2 for columns, inner in shapes)))
    calls: list[Callable[[], object]] = []
    flops = 0.0
    for columns, inner in shapes * copies:
        weight = torch.randn(columns, inner, device="cuda").to(torch.bfloat16)
        x = torch.randn(tokens, inner, device="cuda").to(torch.bfloat16)
        out = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
        calls.append(partial(torch.mm, x, weight.T, out=out))
        flops += 2.0 * tokens * columns * inner
    graph = captured(calls)
    each = replay_milliseconds(graph, 2)
    times = max(2, int(500 / each))
    replay_milliseconds(graph, times)
    return flops / replay_milliseconds(graph, times) / 1e9


@triton.jit
def _announce_kernel(mailbox, counter):
    """Adds one to a counter on the device and shows it to the host."""
    number = tl.load(counter) + 1
    tl.store(counter, number)
    tl.atomic_xchg(mailbox, number, sem="release", scope="sys")


@triton.jit
def _tiny_kernel(x):
    tl.store(x, tl.load(x) + 1)


def launch_costs() -> dict[str, float]:
    """Host and device time of graphs of dependent tiny kernels, and of launching one without a graph."""
    x = torch.zeros(1, dtype=torch.int32, device="cuda")
    figures: dict[str, float] = {}
    for nodes in (150, 250):
        graph = captured([lambda: _tiny_kernel[(1,)](x)] * nodes)
        replay_milliseconds(graph, 20)
        figures[f"graph of {nodes} tiny kernels, us"] = replay_milliseconds(graph, 50) * 1000
        host = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            host.append(time.perf_counter() - start)
        figures[f"host time to replay {nodes} nodes, us"] = statistics.median(host) * 1e6
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        _tiny_kernel[(1,)](x)
    figures["host time to launch a Triton kernel, us"] = (time.perf_counter() - start) * 1e3
    return figures


def poll_latency() -> dict[str, float]:
    """From replaying a graph of one kernel until the host knows: by a pinned number it polls, and by waiting."""
    mailbox = torch.zeros(1, dtype=torch.int32).pin_memory()
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    seen = mailbox.numpy()
    graph = captured([lambda: _announce_kernel[(1,)](mailbox, counter)])
    polled, waited = [], []
    for _ in range(300):
        torch.cuda.synchronize()
        expected = int(seen[0]) + 1
        start = time.perf_counter()
        graph.replay()
        while seen[0] != expected:
            if time.perf_counter() - start > 5:
                raise RuntimeError("the number in pinned memory never arrived")
        polled.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        start = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        waited.append(time.perf_counter() - start)
    return {
        "replay until a pinned number is seen, us": statistics.median(polled) * 1e6,
        "replay until synchronize returns, us": statistics.median(waited) * 1e6,
    }


def overlap() -> dict[str, float]:
    """A matrix product and a stream of reads of about the same length: alone, and on two streams at once."""
    tokens, columns, inner = 1024, 28672, 4096
    weight = torch.randn(columns, inner, device="cuda").to(torch.bfloat16)
    x = torch.randn(tokens, inner, device="cuda").to(torch.bfloat16)
    out = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
    pieces = 2**16
    source = torch.randn(pieces * PIECE // 2, device="cuda").view(torch.bfloat16)
    order = torch.randperm(pieces, device="cuda").to(torch.int32)
    sink = torch.zeros(1, device="cuda")
    side = torch.cuda.Stream()

    def product() -> None:
        for _ in range(4):
            torch.mm(x, weight.T, out=out)

    def reads() -> None:
        for _ in range(4):
            read_kernel(sink, source, order)

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            reads()
        product()
        torch.cuda.current_stream().wait_stream(side)

    return {
        "four products of 1,024 tokens alone, us": graph_microseconds([product]),
        "four reads of 1 GB alone, us": graph_microseconds([reads]),
        "both at once on two streams, us": graph_microseconds([both]),
    }
