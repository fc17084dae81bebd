"""The native CPU kernels alone, and whole steps of the default model.

*kernels*: each kernel on one thread, in the time the thread used. Operations of a product are two for each weight and
row. *step*: decode steps of 1 to 32 rows at one context, and a prompt, on one thread and on all; the time by the clock,
and where it goes. *draw*: the draws of a step alone, on one thread, beside the sampler in numpy. *kv*: tokens that the
same memory holds as float32 and as int8, and decode steps over both in turns.

    python -m benchmarks.cpu_kernels kernels
    python -m benchmarks.cpu_kernels draw
    python -m benchmarks.cpu_kernels step [--context 140] [--threads 2] [--rows 32] [--model FILE]
    python -m benchmarks.cpu_kernels kv [--context 1000] [--threads 2] [--rounds 5] [--model FILE]
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Benchmark, Found, Given, flag, in_turns, row, table
from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.core.sampling import SamplingParams
from paceline.models.files.fetch import resolve
from paceline.models.files.open import open_checkpoint
from paceline.models.files.stored import StoredTensor, decode_float
from paceline.runner.device_rows import DeviceRows, FlatBatch
from paceline.runner.native.arena import pack
from paceline.runner.native.checks import aligned
from paceline.runner.native.code import Code, host_code
from paceline.runner.native.layout import (
    BF16,
    DRAW_SCRATCH,
    F32,
    KINDS,
    Q4,
    Q8,
    Q8_FINE,
    SUB_BLOCK,
    SYNC_BYTES,
    kv_head_bytes,
    panel_bytes,
)
from paceline.runner.native.model import NativeModel, build_model
from paceline.runner.native.speed import Product, call_seconds
from paceline.runner.native.step import NativeStep
from paceline.runner.native.team import Parameters
from paceline.runner.native.token_sampling import TokenSampling
from paceline.runner.sampling.sampler import Sampler, Settled
from paceline.runner.sizing import block_bytes

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


def attention_seconds(
    kernels: Code, rows: int, context: int, dim: int = 64, *, in_bytes: bool = False
) -> float:
    rng = np.random.default_rng(0)
    blocks = -(-context // SUB_BLOCK)
    size = kv_head_bytes(dim, in_bytes=in_bytes)
    kv = rng.normal(0, 1, (blocks + 1, size // 4)).astype(np.float32)
    if in_bytes:  # scales of about one keep the scores finite
        kv[:, : dim * 8] = rng.integers(-127, 128, (blocks + 1, dim * 32), np.int8).view(np.float32)
        kv[:, dim * 8 :] = 0.01
    table_of = np.arange(1, blocks + 1)
    queries, out = (rng.normal(0, 1, (4, dim)).astype(np.float32) for _ in range(2))
    first, end = np.zeros(4, np.int64), np.full(4, context)
    step = (blocks + 1) * 64
    scores, x = aligned(4 * step), aligned(6 * dim)
    where = (
        rows,
        at(queries),
        at(first),
        at(end),
        at(table_of),
        1,
        at(kv),
        size,
        dim,
        at(scores),
        step,
        at(out),
        int(in_bytes),
        at(x),
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
        for kind, bits in (
            (Q4, "4 bits"),
            (Q8, "8 bits"),
            (Q8_FINE, "8 bits, inputs of 16"),
            (F32, "float32"),
        ):
            speeds = [
                2 * outputs * inputs * rows / product_seconds(loaded, kind, outputs, inputs, rows) / 1e9
                for rows in ROWS
            ]
            found[f"{name}, {bits}, GOPS"] = dict(
                zip(map(str, ROWS), np.round(speeds, 1).tolist(), strict=True)
            )
            row(f"{name}, {bits}", *(f"{speed:.0f} GOPS" for speed in speeds))
    table("attention of one kv head", "float32 us", "GFLOP/s", "int8 us", "GFLOP/s")
    for rows, context in ((1, 600), (3, 140), (3, 600), (3, 1000), (3, 2000), (4, 600)):
        shown: list[float] = []
        for in_bytes, suffix in ((False, ""), (True, ", int8")):
            took = attention_seconds(loaded, rows, context, in_bytes=in_bytes)
            speed = 4 * rows * context * 64 / took / 1e9
            figures = {"us": round(took * 1e6, 1), "GFLOP_s": round(speed, 1)}
            found[f"attention, {rows} heads, {context} tokens{suffix}"] = figures
            shown += figures.values()
        row(f"{rows} heads, {context} tokens", *shown)
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
        self._sampling = TokenSampling(self._parameters, vocab_size)
        self.sampler = Sampler(64, vocab_size, (0,))

    def settle(self, logits: NDArray[np.float32], rows: Index, positions: Index) -> Settled:
        """`logits` [rows, vocabulary], each row in whole vectors."""
        self._parameters.point("logits", logits)
        self._parameters.set(logits_step=logits.shape[1] * 4)
        self._sampling.load(self.sampler.wanted(rows, positions))
        self._kernels.probe("draw", self._arguments)
        return self._sampling.settle()


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

    def __init__(
        self,
        model: NativeModel,
        loaded: Code,
        threads: int,
        rows: int,
        length: int,
        kv_dtype: str = "float32",
    ) -> None:
        blocks = -(-length // 16)
        config = EngineConfig(
            kv=KVConfig(num_blocks=rows * blocks + 1, block_size=16),
            scheduler=SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=4096, max_model_len=length),
            depth=0,
        )
        self.step = NativeStep(model, config, loaded, threads, kv_dtype=kv_dtype)
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
            places=positions,
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
    flag("--rows", 32, "most rows of a step"),
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
        steps = Steps(model, loaded, threads, given.rows, given.context + 200)
        for start in range(0, given.context, 64):
            steps.run(given.rows, start, min(64, given.context - start))
        for rows, times in ((1, 60), (2, 40), (4, 30), (8, 20), (16, 12), (32, 8)):
            if rows > given.rows:
                break
            found.setdefault(str(rows), []).append(steps.milliseconds(rows, given.context, 1, times))
        found.setdefault("prompt of 108", []).append(steps.milliseconds(1, 0, 108, 8))
        steps.step.close()
    for name, (alone, together) in ((name, value) for name, value in found.items() if name != "context"):
        row(name, alone, together, round((108 if name.startswith("prompt") else int(name)) / together * 1e3))
    return found


@bench.part(
    flag("--context", 1000, "tokens each row has"),
    flag("--threads", 2),
    flag("--rounds", 5),
    flag("--model", None, "file or folder; the default model"),
)
def kv(given: Given) -> Found:
    """Keys and values as float32 and as int8."""
    path = resolve(given.model, None, None) if given.model else resolve(None, None, None)
    model = build_model(open_checkpoint(Path(path)), given.context + 64)
    floats, rounded = (block_bytes(model.spec, 16, kv_dtype=kind) for kind in ("float32", "int8"))
    found: Found = {"context": given.context, "tokens": round(floats / rounded, 3)}
    print(
        f"{floats // 16:,} bytes a token as float32, {rounded // 16:,} as int8: {floats / rounded:.2f} times"
    )
    loaded, most = host_code(print), 8
    steps = {
        kind: Steps(model, loaded, given.threads, most, given.context + 32, kind)
        for kind in ("float32", "int8")
    }
    for made in steps.values():
        for start in range(0, given.context, 128):
            made.run(most, start, min(128, given.context - start))
    table("rows that decode", "float32 ms", "int8 ms", "int8 is faster by")
    for rows in (1, 4, most):
        works = {kind: partial(made.milliseconds, rows, given.context, 1, 8) for kind, made in steps.items()}
        taken = in_turns(works, given.rounds)
        floats_ms, rounded_ms = (float(np.median(taken[kind])) for kind in steps)
        ratios = [one / other for one, other in zip(taken["float32"], taken["int8"], strict=True)]
        ratio = round(float(np.median(ratios)), 3)
        found[str(rows)] = {"float32_ms": floats_ms, "int8_ms": rounded_ms, "ratio": ratio}
        row(rows, floats_ms, rounded_ms, f"{ratio} times")
    return found


if __name__ == "__main__":
    bench.main()
