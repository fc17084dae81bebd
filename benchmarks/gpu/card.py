"""What the card and its host link give before any of our kernels run: the figures the engine's plan rests on.

Sustained matrix rates at the sizes of mixed steps, random reads from a pool of the size of a cache, what a graph
replay and a launch cost the host, how soon the host sees a number a kernel stored in pinned memory, and how much a
matrix product and a stream of reads hinder each other.
"""

from __future__ import annotations

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.gpu.measure import PIECE, graph_microseconds, read_ceiling, read_kernel, replay_milliseconds

# (columns, inner) of a layer's products: q, k and v together, output, gate and up together, down
LAYERS = {
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
STEP_TOKENS = (1152, 2048, 4096, 8192)


def measure_card(*, seconds: float = 1.0, pool_gigabytes: float = 100.0) -> dict[str, float]:
    """All figures by name; the unit is the last word of the name."""
    figures: dict[str, float] = {}
    in_order, at_random = read_ceiling(pool_gigabytes)
    figures[f"read in order from {pool_gigabytes:.0f} GB, GB/s"] = in_order
    figures[f"read 16 KB at random from {pool_gigabytes:.0f} GB, GB/s"] = at_random
    torch.cuda.empty_cache()
    for model, shapes in LAYERS.items():
        for tokens in STEP_TOKENS:
            rate = layer_rate(shapes, tokens, seconds)
            figures[f"products of a {model} layer at {tokens} tokens, TFLOP/s"] = rate
    figures.update(launch_costs())
    figures.update(poll_latency())
    figures.update(overlap())
    return figures


def layer_rate(shapes: tuple[tuple[int, int], ...], tokens: int, seconds: float) -> float:
    """Rate over the last half of `seconds` of one layer's products after another, different weights each."""
    copies = max(1, min(16, 2**30 // sum(columns * inner * 2 for columns, inner in shapes)))
    calls: list[Callable[[], object]] = []
    flops = 0.0
    for columns, inner in shapes * copies:
        weight = torch.randn(columns, inner, device="cuda").to(torch.bfloat16)
        x = torch.randn(tokens, inner, device="cuda").to(torch.bfloat16)
        out = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
        calls.append(partial(torch.mm, x, weight.T, out=out))
        flops += 2.0 * tokens * columns * inner
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    each = replay_milliseconds(graph, 2)
    times = max(2, int(seconds * 500 / each))
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
        _tiny_kernel[(1,)](x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(nodes):
                _tiny_kernel[(1,)](x)
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
    _announce_kernel[(1,)](mailbox, counter)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _announce_kernel[(1,)](mailbox, counter)
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
