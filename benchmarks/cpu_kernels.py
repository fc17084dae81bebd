"""The native CPU kernels alone, and whole steps of the default model.

*kernels*: each kernel on one thread, in the time the thread used. Operations of a product are two for each weight and
row. *step*: decode steps of 1 to 32 rows at one context, and a prompt, on one thread and on all; the time by the clock,
and where it goes. *draw*: the draws of a step alone, on one thread, beside the sampler in numpy.

    python -m benchmarks.cpu_kernels kernels
    python -m benchmarks.cpu_kernels draw
    python -m benchmarks.cpu_kernels step [--context 140] [--threads 2] [--model FILE]
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Benchmark, Found, Given, flag, row, table
from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.models.files.fetch import resolve
from paceline.models.files.open import open_checkpoint
from paceline.models.files.stored import StoredTensor, decode_float
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.native.arena import pack
from paceline.runner.native.checks import aligned
from paceline.runner.native.code import Code, host_code
from paceline.runner.native.drawing import Drawing
from paceline.runner.native.layout import (
    BF16,
    DRAW_SCRATCH,
    F32,
    KINDS,
    Q4,
    Q8,
    SUB_BLOCK,
    SYNC_BYTES,
    panel_bytes,
)
from paceline.runner.native.model import NativeModel, build_model
from paceline.runner.native.speed import Product, call_seconds
from paceline.runner.native.step import NativeStep
from paceline.runner.native.team import Parameters
from paceline.runner.sampling.sampler import Sampler, Settled

bench = Benchmark(__doc__)
SHAPES = {"gate and up": (3072, 576), "down": (576, 1536)}  # of SmolLM2-135M
ROWS = (1, 2, 4, 8, 16, 32, 64, 108)
ADAPTER_RANKS = (4, 8, 16, 32)
ADAPTER_WIDTH = 576
ENOUGH_S = 0.2
VOCABULARY = 49152  # of SmolLM2
DRAWN: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.8, "min_p": 0.05},
)

Index = NDArray[np.int64]


def at(values: NDArray[np.generic]) -> int:
    return values.ctypes.data


def product_seconds(kernels: Code, kind: int, outputs: int, inputs: int, rows: int) -> float:
    """All panels of a matrix with `rows` rows."""
    packed = None
    if kind == F32:
        values = np.random.default_rng(0).normal(0, 0.1, (outputs, inputs)).astype(np.float32)
        raw = values.view(np.uint8).reshape(-1)
        packed = aligned(outputs // 16 * panel_bytes(kind, inputs))
        pack(
            StoredTensor(name="w", shape=values.shape, dtype="F32", raw=raw, decode=decode_float),
            kind,
            packed,
        )
    return call_seconds(Product(kernels, kind, outputs, inputs, rows, packed), ENOUGH_S)


def attention_seconds(kernels: Code, rows: int, context: int, dim: int = 64) -> float:
    rng = np.random.default_rng(0)
    blocks = -(-context // SUB_BLOCK)
    kv = rng.normal(0, 1, (blocks + 1, 2 * dim * SUB_BLOCK)).astype(np.float32)
    table_of = np.arange(1, blocks + 1)
    queries, out = (rng.normal(0, 1, (4, dim)).astype(np.float32) for _ in range(2))
    first, end = np.zeros(4, np.int64), np.full(4, context)
    step = (blocks + 1) * 64
    scores = aligned(4 * step)
    where = (
        rows,
        at(queries),
        at(first),
        at(end),
        at(table_of),
        1,
        at(kv),
        2 * dim * 64,
        dim,
        at(scores),
        step,
        at(out),
    )
    return call_seconds(lambda times: kernels.probe("attend", np.array(where), times), ENOUGH_S)


def adapter_seconds(kernels: Code, kernel: str, kind: int, rank: int, rows: int, width: int) -> float:
    """What `rows` tokens, at most four, take with A [rank, width], or with B [width, rank]."""
    rng, size = np.random.default_rng(0), 4 if kind == F32 else 2
    matrix, low = aligned(rank * width * size), aligned(rows * rank * 4)
    x = rng.normal(0, 1, (rows, width)).astype(np.float32)
    if kernel == "shrink":
        where = [kind, at(matrix), at(x), width, rank, at(low), rank * 4, rows]
    else:
        where = [kind, at(matrix), rank, at(low), rank * 4, rows, at(x), width * 4, width // 16]
    return call_seconds(lambda times: kernels.probe(kernel, np.array(where), times), ENOUGH_S)


@bench.part()
def kernels(given: Given) -> Found:
    """Products, attention and adapters on one thread."""
    loaded = host_code(print)
    found: Found = {"isa": loaded.isa.name}
    table("product", *(f"{rows} rows" for rows in ROWS))
    for name, (outputs, inputs) in SHAPES.items():
        for kind, bits in ((Q4, "4 bits"), (Q8, "8 bits"), (F32, "float32")):
            speeds = [
                2 * outputs * inputs * rows / product_seconds(loaded, kind, outputs, inputs, rows) / 1e9
                for rows in ROWS
            ]
            found[f"{name}, {bits}, GOPS"] = dict(
                zip(map(str, ROWS), np.round(speeds, 1).tolist(), strict=True)
            )
            row(f"{name}, {bits}", *(f"{speed:.0f} GOPS" for speed in speeds))
    table("attention of one kv head", "us", "GFLOP/s")
    for rows, context in ((1, 600), (3, 140), (3, 600), (3, 2000), (4, 600)):
        took = attention_seconds(loaded, rows, context)
        speed = 4 * rows * context * 64 / took / 1e9
        found[f"attention, {rows} heads, {context} tokens"] = {
            "us": round(took * 1e6, 1),
            "GFLOP_s": round(speed, 1),
        }
        row(f"{rows} heads, {context} tokens", round(took * 1e6, 1), round(speed, 1))
    table("adapter, GFLOP/s", *(f"rank {rank}" for rank in ADAPTER_RANKS))
    for kernel, kind, rows in itertools.product(("shrink", "expand"), (BF16, F32), (1, 4)):
        speeds = [
            2
            * rank
            * rows
            * ADAPTER_WIDTH
            / adapter_seconds(loaded, kernel, kind, rank, rows, ADAPTER_WIDTH)
            / 1e9
            for rank in ADAPTER_RANKS
        ]
        name = f"{kernel}, {KINDS[kind]}, {rows} tokens"
        found[name] = dict(zip(map(str, ADAPTER_RANKS), np.round(speeds, 1).tolist(), strict=True))
        row(name, *(round(speed, 1) for speed in speeds))
    return found


class Draws:
    """The draws of a step over logits that are given, and the sampler whose tokens they are."""

    def __init__(self, kernels: Code, vocab_size: int) -> None:
        self._kernels = kernels
        self._parameters = Parameters()
        self._parameters.point("sync", aligned(SYNC_BYTES))
        self._parameters.set(threads=1)
        scratch = aligned(DRAW_SCRATCH)
        self._parameters.point("scratch", scratch)
        self._arguments = np.array([self._parameters.address, at(scratch)])
        self._drawing = Drawing(self._parameters, vocab_size)
        self.sampler = Sampler(64, vocab_size, (0,))

    def settle(self, logits: NDArray[np.float32], rows: Index, positions: Index) -> Settled:
        """`logits` [rows, vocabulary], each row in whole vectors."""
        self._parameters.point("logits", logits)
        self._parameters.set(logits_step=logits.shape[1] * 4)
        self._drawing.load(self.sampler.wanted(rows, positions))
        self._kernels.probe("draw", self._arguments)
        return self._drawing.settle()


def model_logits(rng: np.random.Generator, rows: int) -> NDArray[np.float32]:
    """Logits as models have them: a few tokens matter, and thousands lie far below."""
    logits = rng.normal(0, 2.5, (rows, VOCABULARY)).astype(np.float32)
    for values in logits:
        values[rng.integers(VOCABULARY, size=20)] += rng.uniform(5, 15, 20).astype(np.float32)
    return logits


@bench.part()
def draw(given: Given) -> Found:
    """Draws of 1 to 32 rows, kernels and numpy together, beside the sampler; milliseconds of one thread."""
    draws, rng, found = Draws(host_code(print), VOCABULARY), np.random.default_rng(0), Found()
    table("rows", "what", "step ms", "sampler ms", "settled")
    for params in DRAWN:
        for count in (1, 8, 32):
            rows = np.arange(count)
            for number in range(count):
                sampling = SamplingParams(seed=number, **params)
                draws.sampler.join(number, sampling, np.zeros(1, np.int32), 1)
            taken, settled = [], 0
            for position in range(1, 13):
                logits, positions = model_logits(rng, count), np.full(count, position)
                started = time.thread_time()
                tokens = draws.settle(logits, rows, positions)
                half = time.thread_time()
                draws.sampler.sample(logits, rows, positions)
                taken.append((half - started, time.thread_time() - half))
                settled += int(tokens.is_settled.sum())
            ours, theirs = (np.median(taken, axis=0) * 1e3).round(2).tolist()
            name = ", ".join(f"{name} {value:g}" for name, value in params.items())
            share = settled / (12 * count)
            found[f"{count} rows, {name}"] = {"step_ms": ours, "sampler_ms": theirs, "settled": share}
            row(count, name, ours, theirs, f"{share:.0%}")
    return found


class Steps:
    """Steps of a model, without an engine around them."""

    def __init__(self, model: NativeModel, loaded: Code, threads: int, rows: int, length: int) -> None:
        blocks = -(-length // 16)
        config = EngineConfig(
            kv=KVConfig(num_blocks=rows * blocks + 1, block_size=16),
            scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=4096, max_model_len=length),
            depth=0,
        )
        self.step = NativeStep(model, config, loaded, threads)
        self.rows = DeviceRows(config)
        self.rows.tables[0][:rows, :blocks] = 1 + np.arange(rows * blocks).reshape(rows, blocks)
        self.tokens = np.random.default_rng(0).integers(3, model.spec.vocab_size - 1, (rows, length))

    def run(self, rows: int, start: int, count: int) -> None:
        """`count` tokens from `start` on, of each of the first `rows` rows."""
        which = np.arange(rows)
        positions = np.tile(np.arange(start, start + count), rows)
        row_of = np.repeat(which, count)
        slots = self.rows.tables[0][row_of, positions // 16] * 16 + positions % 16
        batch = FlatBatch(
            rows=which,
            start=np.full(rows, start),
            count=np.full(rows, count),
            masked=np.zeros(rows, np.bool_),
            tokens=self.tokens[:rows, start : start + count].reshape(-1),
            positions=positions,
            lengths=positions + 1,
            row_of=row_of,
            slots=(slots,),
        )
        self.step.forward(self.rows, batch, batch.last)

    def milliseconds(self, rows: int, start: int, count: int, times: int) -> float:
        taken = []
        for _ in range(times):
            started = time.perf_counter()
            self.run(rows, start, count)
            taken.append(time.perf_counter() - started)
        return round(float(np.median(taken)) * 1e3, 2)


@bench.part(
    flag("--context", 140, "tokens each row has"),
    flag("--threads", 2, "threads of the second column"),
    flag("--model", None, "file or folder; the default model"),
)
def step(given: Given) -> Found:
    """Whole steps: rows that decode together, and a prompt of 108 tokens."""
    path = resolve(given.model, None, None) if given.model else resolve(None, None, None)
    model = build_model(open_checkpoint(Path(path)), given.context + 256)
    loaded = host_code(print)
    found: Found = {"context": given.context}
    table("rows", "1 thread ms", f"{given.threads} threads ms", "tok/s")
    for threads in (1, given.threads):
        steps = Steps(model, loaded, threads, 32, given.context + 200)
        for start in range(0, given.context, 64):
            for number in range(0, 32, 8):
                steps.run(number + 8, start, min(64, given.context - start))
        for rows, times in ((1, 60), (2, 40), (4, 30), (8, 20), (16, 12), (32, 8)):
            found.setdefault(str(rows), []).append(steps.milliseconds(rows, given.context, 1, times))
        found.setdefault("prompt of 108", []).append(steps.milliseconds(1, 0, 108, 8))
        steps.step.close()
    for name, (alone, together) in ((name, value) for name, value in found.items() if name != "context"):
        row(name, alone, together, round((108 if name.startswith("prompt") else int(name)) / together * 1e3))
    return found


if __name__ == "__main__":
    bench.main()
