"""Adapters on one card: decode steps of rows that have them, against steps without, and what the kernels take.

    python -m benchmarks.gpu.adapters [--shape llama-3.1-8b] [--rows 64,256] [--adapters 32] [--rank 16]
                                      [--places 64] [--registered 1000]
    python -m benchmarks.gpu.adapters --kernels

The first loads a shape with made-up weights twice, without adapters and with made-up ones on all seven matrices, and
lets rows decode in turns: *off* is the engine without, *unused* the other one with rows that name none, *one* rows of
the same adapter, *half* every second row with one of the others, *all* every row. Shares are of the speed of *off*.
Then requests name adapters of which more are registered than there are places, by Zipf's law, against requests for one
of them: images are in host memory, no folder is read. A profile says what a step with adapters takes longer for. The
second times ways to cut the kernels.
"""

from __future__ import annotations

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.card import graph_microseconds
from benchmarks.gpu.engine import kernels_of
from benchmarks.harness import Benchmark, Found, Given, flag, in_turns, no_garbage_collection, row, table
from paceline import LLM, SamplingParams
from paceline.core.adapter import NO_ADAPTER
from paceline.engine.engine import Engine
from paceline.lab.bench.shapes import SHAPES, write_shape
from paceline.models.files.adapter_files import Adapter, LowRank
from paceline.models.spec import ModelSpec
from paceline.runner.gpu.adapters import products_of
from paceline.runner.gpu.compile import compiling_only
from paceline.runner.gpu.kernels.adapter_product import (
    PANEL,
    UNIT,
    AdaptedProduct,
    AdapterPool,
    AdapterTuning,
    adapter_tuning,
    allocate_adapted,
    expand,
    expand_gated,
    plan_adapters,
    shrink,
)

bench = Benchmark(__doc__)
OPTIONS = {
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 16 << 30,
    "speculative_config": "off",  # a step gives each row one token
}
PROMPT_TOKENS = 16
REQUESTS = 1024  # for adapters by Zipf's law
DRAWN = SamplingParams(ignore_eos=True, detokenize=False, temperature=1.0, seed=1)
PROFILED_STEPS = 48  # tokens of each row
KERNEL_LAYERS = 4  # matrices of as many layers: more than a cache holds


def made_up(spec: ModelSpec, rank: int) -> Adapter:
    """Random matrices for every part of every layer, small enough to change little."""
    draw, parts = np.random.default_rng(0), {}
    for layer in range(spec.num_layers):
        for each in (part for parts_of in products_of(spec).values() for part in parts_of):
            a = draw.standard_normal((rank, each.inputs), np.float32) * each.inputs**-0.5
            b = draw.standard_normal((each.outputs, rank), np.float32) * 0.01
            parts[layer, each.name] = LowRank(a, b)
    return Adapter(identity="", rank=rank, parts=parts)


@contextmanager
def loaded(given: Given, *, has_adapters: bool) -> Iterator[LLM]:
    more = {"enable_lora": True, "max_loras": given.places, "max_lora_rank": given.rank}
    with tempfile.TemporaryDirectory() as folder:
        options = write_shape(given.shape, Path(folder)) | OPTIONS | {"max_num_seqs": max(sizes_of(given))}
        llm = LLM(**options | (more if has_adapters else {}))
        try:
            yield llm
        finally:
            llm.shutdown()


def sizes_of(given: Given) -> list[int]:
    return [int(size) for size in given.rows.split(",")]


def load_adapters(llm: LLM, given: Given) -> list[int]:
    """The numbers of the adapters that are registered, whose places hold the same matrices."""
    adapters = llm.loaded.engine.adapters
    memory: Any = adapters._memory
    image = memory.prepare(made_up(llm.loaded.checkpoint.spec, given.rank))
    adapters._read = lambda folder: replace(image, identity=folder.name.zfill(64))
    return [adapters.load("made up", Path(str(number))).number for number in range(given.registered)]


def tokens_per_second(llm: LLM, rows: list[int], tokens: int) -> float:
    """Of requests for these adapters, all at once."""
    engine, vocabulary = llm.loaded.engine, llm.loaded.checkpoint.spec.vocab_size
    draw = random.Random(time.perf_counter_ns())
    for number in rows:
        prompt = [draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        engine.add(prompt, replace(DRAWN, max_tokens=tokens), adapter=number)
    started_s = time.perf_counter()
    with no_garbage_collection():
        while engine.has_requests or not engine.is_idle:
            engine.step_overlapped()
    return len(rows) * tokens / (time.perf_counter() - started_s)


def show_zipf(llm: LLM, numbers: list[int], given: Given) -> Found:
    """Tokens per second of requests for all that are registered, of requests for one, and the share."""
    places = llm.loaded.engine.scheduler.state.adapters
    chances = 1.0 / np.arange(1, len(numbers) + 1)
    draw = np.random.default_rng(0)
    drawn = draw.choice(numbers, size=REQUESTS, p=chances / chances.sum()).tolist()
    one = tokens_per_second(llm, numbers[:1] * REQUESTS, given.tokens)
    before = places.evicted
    many = tokens_per_second(llm, drawn, given.tokens)
    table("registered", "places", "named", "evictions", "one, tok/s", "all, tok/s", "share")
    row(len(numbers), given.places, len(set(drawn)), places.evicted - before, one, many, many / one)
    return {"one": one, "all": many, "share": many / one, "evictions": places.evicted - before}


def step_ms(engine: Engine, vocabulary: int, rows: list[int], tokens: int) -> float:
    """Milliseconds of a step in which all rows decode; `rows`: the adapter of each."""
    draw = random.Random(time.perf_counter_ns())
    for number in rows:
        prompt = [draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]
        engine.add(prompt, replace(DRAWN, max_tokens=tokens), adapter=number)
    ends_s = []
    with no_garbage_collection():
        while engine.has_requests or not engine.is_idle:
            events = engine.step_overlapped()
            if sum(len(batch.tokens) for batch in events.tokens) == len(rows):
                ends_s.append(time.perf_counter())
    assert len(ends_s) > tokens // 2, f"{len(ends_s)} steps had all {len(rows)} rows"
    taken_s: list[float] = np.diff(ends_s[2:]).tolist()
    return 1e3 * statistics.median(taken_s)


@bench.part(
    flag("--shape", "llama-3.1-8b", choices=tuple(SHAPES)),
    flag("--rows", "64,256", "rows that decode, separated by commas"),
    flag("--adapters", 32),
    flag("--rank", 16),
    flag("--places", 64, "adapters in memory at once"),
    flag("--registered", 1000),
    flag("--tokens", 128, "of each row in a run"),
    flag("--rounds", 3),
    flag("--kernels", False, "time the kernels instead"),
)
def steps(given: Given) -> Found:
    """Decode steps of rows with adapters against steps without."""
    if given.kernels:
        return kernels(given)
    found: Found = {}
    with ExitStack() as opened:
        started_s = time.perf_counter()
        plain, adapted = (
            opened.enter_context(loaded(given, has_adapters=has_adapters)) for has_adapters in (False, True)
        )
        print(f"two engines started in {time.perf_counter() - started_s:.0f} s", flush=True)
        registered = load_adapters(adapted, given)
        numbers = registered[: given.adapters]
        print(f"adapters loaded by {time.perf_counter() - started_s:.0f} s", flush=True)
        vocabulary = plain.loaded.checkpoint.spec.vocab_size
        table("rows", "adapters", "ms a step", "share of the speed without")
        for size in sizes_of(given):
            every = [numbers[index % len(numbers)] for index in range(size)]
            ways = {
                "off": (plain, [NO_ADAPTER] * size),
                "unused": (adapted, [NO_ADAPTER] * size),
                "one": (adapted, numbers[:1] * size),
                "half": (
                    adapted,
                    [number if index % 2 else NO_ADAPTER for index, number in enumerate(every)],
                ),
                "all": (adapted, every),
            }
            works = {
                name: partial(step_ms, llm.loaded.engine, vocabulary, rows, given.tokens)
                for name, (llm, rows) in ways.items()
            }
            for work in works.values():
                work()
            taken = in_turns(works, given.rounds)
            for name, times in taken.items():
                share = statistics.median(a / b for a, b in zip(taken["off"], times, strict=True))
                found[f"{size} rows, {name}"] = {"ms": statistics.median(times), "share": share}
                row(size, name, statistics.median(times), share)
        found["zipf"] = show_zipf(adapted, registered, given)
        for size in sizes_of(given):
            every = [numbers[index % len(numbers)] for index in range(size)]
            show_profile(plain, [NO_ADAPTER] * size, f"{size} rows, off")
            show_profile(adapted, every, f"{size} rows, all")
    return found


def show_profile(llm: LLM, rows: list[int], name: str) -> None:
    """What a step's time goes to, by kernel."""
    engine, vocabulary = llm.loaded.engine, llm.loaded.checkpoint.spec.vocab_size
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        step_ms(engine, vocabulary, rows, PROFILED_STEPS)
    ran = kernels_of(recorded)
    ran = ran[len(ran) // 2 :]  # without prompts
    steps_ran = sum("_settle_kernel" in kernel.name for kernel in ran)
    shares: Counter[str] = Counter()
    for kernel in ran:
        shares[kernel.name[:60]] += kernel.end_ns - kernel.start_ns
    wall_us = (ran[-1].end_ns - ran[0].start_ns) / 1e3 / steps_ran
    print(f"{name}: {wall_us:.0f} us a step, {len(ran) / steps_ran:.0f} kernels", flush=True)
    for kernel_name, taken in shares.most_common(9):
        print(f"    {taken / 1e3 / steps_ran:8.1f} us  {kernel_name}")


# -- kernels -------------------------------------------------------------------------------------------------

CUTS = [
    replace(
        adapter_tuning(1, torch.bfloat16),
        inner=inner,
        columns=columns,
        gated_turns=turns,
        shrink_warps=warps,
    )
    for inner, warps, columns, turns in product((512, 1024), (2, 4), (256, 512), (4, 8))
]
# Inner entries, and columns of each part, of the products of a layer of 8B.
PRODUCTS = {
    "qkv": (4096, (4096, 1024, 1024)),
    "output": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}


def kernels(given: Given) -> Found:
    """Microseconds of shrink and expand together, for each product: the fastest cuts, then the one that is chosen."""
    found: Found = {}
    table("product", "tokens", "inner", "columns", "warps", "shrink warps", "us", "GB/s")
    for name, (inner, widths) in PRODUCTS.items():
        for tokens in sizes_of(given):
            calls = kernel_calls(given, tokens, inner, widths)
            with compiling_only():
                for cut in CUTS:
                    calls(cut)[0]()
            chosen = adapter_tuning(tokens, torch.bfloat16)
            times = {cut: graph_microseconds(calls(cut), milliseconds=5) for cut in (*CUTS, chosen)}
            size = 2 * PANEL * (len(widths) * inner + sum(widths)) * min(tokens, given.adapters)
            for cut in (*sorted(CUTS, key=times.__getitem__)[:4], chosen):
                row(name, tokens, cut.inner, cut.columns, cut.expand_warps, cut.shrink_warps, times[cut],
                    size / times[cut] / 1e3)  # fmt: skip
            found[f"{name}, {tokens}"] = times[chosen]
    return found


def kernel_calls(given: Given, tokens: int, inner: int, widths: tuple[int, ...]):
    """Calls on the matrices of some layers, for a cut."""
    each = PANEL * (len(widths) * inner + sum(widths))
    count, device = given.adapters * KERNEL_LAYERS, "cuda"
    offsets = torch.arange(count, dtype=torch.int64).view(given.adapters, KERNEL_LAYERS, 1) * each
    within = torch.tensor(
        [sum(inner + width for width in widths[:part]) * PANEL for part in range(len(widths))]
    )
    pool = AdapterPool(
        entries=torch.randn(count * each, device=device, dtype=torch.bfloat16),
        table=((offsets + within) // UNIT).to(device, torch.int32),
        panels=torch.ones(given.adapters, dtype=torch.int32, device=device),
        most_panels=1,
    )
    of_tokens = torch.arange(tokens, device=device, dtype=torch.int32) % given.adapters
    x = torch.randn(tokens, inner, device=device, dtype=torch.bfloat16)
    out = torch.zeros(tokens, sum(widths), device=device, dtype=torch.bfloat16)
    narrow = torch.zeros(tokens, widths[0], device=device, dtype=torch.bfloat16)
    adapted = allocate_adapted(pool, tokens)
    plan_adapters(adapted, of_tokens, tuning=adapter_tuning(tokens, torch.bfloat16))

    def call(cut: AdapterTuning, layer: int) -> None:
        which = AdaptedProduct(layer=layer, first=0, inner=inner, widths=widths)
        shrink(x, adapted, which, tuning=cut, overlapped=True)
        if len(widths) == 2:
            expand_gated(narrow, out, adapted, which, activation="silu", tuning=cut, overlapped=True)
        else:
            expand(out, adapted, which, tuning=cut, overlapped=True)

    return lambda cut: [partial(call, cut, layer) for layer in range(KERNEL_LAYERS)]


if __name__ == "__main__":
    bench.main()
