"""The engine on the card: how long it is idle while rows decode, what swapping, logprobs and shared beginnings cost.

*idle*: 1 - (union of kernel intervals / wall time), from a profile. Loads a shape with made-up weights, lets rows
decode through `LLM.generate` and looks at consecutive steps in the middle, gaps inside graphs included. A step is
what lies between two draws. The profiler takes its share of the time: what a step takes without it is printed too.
*swap*: how fast blocks go to the host and back, blocks of the 8B and the 0.6B shape, at places behind one another and
at scattered ones, then a decode step of 64 rows alone and beside copies that never end.
*logprobs*: decode steps of rows that ask for 20 logprobs against steps of rows that ask for none, in turns; through
the engine alone, and through `LLM.generate`, which makes objects of them.
*shared*: decode steps of branches with the beginnings they share computed once, and for each row, in turns: 64 branches
of one prompt of 8,000 tokens, 8 branches of each of 32 prompts of 2,000 tokens.
*guided*: decode steps of rows that all follow one JSON schema, against steps of free rows, and what the host
does in the time of each.
*branches*: from the fork of a running answer behind 8,000 tokens into 64 until every branch has its first token, and
milliseconds per token of a beam of 4.

    python -m benchmarks.gpu.engine idle [--shape qwen3-0.6b] [--rows 256] [--steps 200]
    python -m benchmarks.gpu.engine swap
    python -m benchmarks.gpu.engine logprobs [--shape llama-3.1-8b] [--rows 64]
    python -m benchmarks.gpu.engine shared [--shape llama-3.1-8b]
    python -m benchmarks.gpu.engine guided [--shape qwen3-0.6b] [--rows 256]
    python -m benchmarks.gpu.engine branches [--shape llama-3.1-8b]
"""

from __future__ import annotations

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Benchmark, Found, Given, flag, in_turns, no_garbage_collection, row, table
from paceline import LLM, SamplingParams
from paceline.core.plan import NO_SWAPS, Swaps
from paceline.core.structure import Structure
from paceline.lab.bench.shapes import SHAPES, write_shape, write_tokenizer
from paceline.runner.gpu import host_rows
from paceline.runner.gpu.device_queue import DeviceQueue, Mark
from paceline.runner.gpu.kv_pools import BlockParts, SwapPool
from paceline.runner.gpu.pending import GPUPending
from paceline.runner.gpu.runner import GPURunner
from paceline.text.guide.matcher import GuideBatch

bench = Benchmark(__doc__)


# -- idle ----------------------------------------------------------------------------------------------------

BEFORE = 50  # steps that are not looked at: prompts, and what the profiler does first
DRAW = "_settle_kernel"
PROMPT_TOKENS = 16


class Kernel(NamedTuple):
    start_ns: int
    end_ns: int
    name: str


def kernels_of(recorded: Any) -> list[Kernel]:
    """What ran on the device, copies too, by its beginning."""
    events = recorded.profiler.kineto_results.events()
    return sorted(
        Kernel(event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in events
        if event.device_type().name == "CUDA"
    )


def window(kernels: list[Kernel], steps: int) -> list[Kernel]:
    """The kernels of `steps` steps in the middle."""
    ends = [index for index, kernel in enumerate(kernels) if DRAW in kernel.name]
    if len(ends) < BEFORE + steps + 1:
        found = Counter(kernel.name for kernel in kernels).most_common(20)
        raise SystemExit(
            f"{len(ends)} steps end with {DRAW}, {BEFORE + steps + 1} are needed; there are {found}"
        )
    return kernels[ends[BEFORE] + 1 : ends[BEFORE + steps] + 1]


def busy_ns(kernels: list[Kernel]) -> int:
    """Length of the union of their intervals."""
    total = reached = 0
    for kernel in kernels:
        total += max(0, kernel.end_ns - max(kernel.start_ns, reached))
        reached = max(reached, kernel.end_ns)
    return total


def run(llm: LLM, rows: int, tokens: int) -> float:
    """Seconds of a step of this many rows."""
    draw = random.Random(time.perf_counter_ns())
    vocabulary = llm.loaded.checkpoint.spec.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    torch.cuda.synchronize()
    return (time.perf_counter() - started_s) / tokens


@bench.part(flag("--shape", "qwen3-0.6b", choices=tuple(SHAPES)), flag("--rows", 256), flag("--steps", 200))
def idle(given: Given) -> Found:
    """The share of time in which the card runs no kernel while rows decode."""
    tokens = BEFORE + given.steps + 20
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**write_shape(given.shape, Path(folder)))
        run(llm, given.rows, tokens)
        plain_s = run(llm, given.rows, tokens)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            run(llm, given.rows, tokens)
    kernels = window(kernels_of(recorded), given.steps)
    wall_ns = max(kernel.end_ns for kernel in kernels) - kernels[0].start_ns
    idle = 1.0 - busy_ns(kernels) / wall_ns
    shares: Counter[str] = Counter()
    for kernel in kernels:
        shares[kernel.name] += kernel.end_ns - kernel.start_ns
    return {
        "shape": given.shape,
        "rows": given.rows,
        "steps": given.steps,
        "idle_share": round(idle, 4),
        "ms_per_step_profiled": round(wall_ns / given.steps / 1e6, 3),
        "ms_per_step_without_profiler_prompts_included": round(plain_s * 1e3, 3),
        "kernels_per_step": round(len(kernels) / given.steps, 1),
        "shares": {name: round(taken / wall_ns, 4) for name, taken in shares.most_common(12)},
    }


# -- swapping ------------------------------------------------------------------------------------------------

SWAPPED = {"0.6B": (28, 8, 128), "8B": (32, 8, 128)}  # layers, kv heads, head_dim
BLOCKS = (1, 4, 16, 64, 256)
TIMES = 7
PLACES = 512


def swaps_of(blocks, places) -> Swaps:
    zeros = np.zeros(len(blocks), np.int32)
    return Swaps(
        ticket=zeros, group=zeros, block=np.array(blocks, np.int32), place=np.array(places, np.int32)
    )


def blocks_of(pool) -> BlockParts:
    """Of a pool [parts, blocks, ...]."""
    words = pool.view(torch.int64).view(len(pool), -1)
    block = words.shape[1] // pool.shape[1]
    return BlockParts(words.view(-1), [(part * words.shape[1], block) for part in range(len(pool))])


def rates(shape, count: int, *, scattered: bool) -> tuple[float, float, float]:
    """GB/s out and back, and milliseconds of host time to queue the way out."""
    layers, heads, dim = shape
    pool = torch.zeros(2 * layers, PLACES + 1, heads, 64, dim, dtype=torch.bfloat16, device="cuda")
    steps = DeviceQueue(pool.device)
    places = SwapPool([blocks_of(pool)], PLACES, steps)
    numbers = list(range(PLACES))
    if scattered:
        random.Random(1).shuffle(numbers)
    swaps = swaps_of(
        [1 + number for number in numbers[:count]],
        sorted(numbers[:count]) if not scattered else numbers[-count:],
    )
    size = count * pool[:, 0].numel() * pool.itemsize
    out, back, queued = [], [], []
    for _ in range(TIMES):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        places.swap(swaps, NO_SWAPS)
        queued.append(time.perf_counter() - started_s)
        places.completed(wait=True)
        out.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        places.swap(NO_SWAPS, swaps)
        places.completed(wait=True)
        back.append(time.perf_counter() - started_s)
    return size / min(out) / 1e9, size / min(back) / 1e9, 1e3 * statistics.median(queued)


def beside_decoding() -> dict[str, float]:
    """Milliseconds of a step that reads 16 GB and draws nothing, alone and beside copies in both directions."""
    weights = torch.zeros(8 << 30, dtype=torch.bfloat16, device="cuda")
    layers, heads, dim = SWAPPED["8B"]
    pool = torch.zeros(2 * layers, 257, heads, 64, dim, dtype=torch.bfloat16, device="cuda")
    steps = DeviceQueue(pool.device)
    places = SwapPool([blocks_of(pool)], 256, steps)
    many = swaps_of(range(1, 257), range(256))
    ring, drawn = (
        torch.empty(64, dtype=torch.int32, pin_memory=True),
        torch.zeros(64, dtype=torch.int32, device="cuda"),
    )

    def steps_ms() -> float:
        taken = []
        for _ in range(20):
            started_s = time.perf_counter()
            with steps.entered():
                weights.sum()
                ring.copy_(drawn, non_blocking=True)
            steps.mark().wait()
            taken.append(time.perf_counter() - started_s)
        return 1e3 * statistics.median(taken)

    steps_ms()
    figures = {"alone, ms": steps_ms()}
    for name, pair in (("beside swaps out", (many, NO_SWAPS)), ("beside swaps in", (NO_SWAPS, many))):
        for _ in range(8):
            places.swap(*pair)
        figures[f"{name}, ms"] = steps_ms()
        torch.cuda.synchronize()
        places.forget()
    return figures


@bench.part()
def swap(given: Given) -> Found:
    """GB/s of blocks to the host and back, and what decoding loses meanwhile."""
    found: Found = {}
    table("shape", "blocks", "places", "out GB/s", "back GB/s", "queued ms")
    for name, shape in SWAPPED.items():
        for count in BLOCKS:
            for how in ("in a row", "scattered"):
                out, back, queued = rates(shape, count, scattered=how == "scattered")
                found[f"{name}, {count} blocks {how}"] = {"out": out, "back": back, "queued_ms": queued}
                row(name, count, how, out, back, queued)
    found["a step of 16 GB"] = beside_decoding()
    return found


# -- logprobs and shared beginnings ----------------------------------------------------------------------------

SHAPE_FLAG = flag("--shape", "llama-3.1-8b", choices=tuple(SHAPES))
ROUNDS_FLAG = flag("--rounds", 5, "pairs of runs")
TOKENS_FLAG = flag("--tokens", 64, "of each row in a run")
LOGPROBS = 20
DRAWN = SamplingParams(ignore_eos=True, detokenize=False, temperature=1.0, seed=1)
LONGEST = 9216  # tokens of a row
TREES = {"64 branches of 8,000 tokens": (1, 64, 8000), "32 x 8 branches of 2,000 tokens": (32, 8, 2000)}
NOTHING_SPARES_THIS = 1 << 60


@contextmanager
def loaded(shape: str) -> Iterator[LLM]:
    with tempfile.TemporaryDirectory() as folder:
        options = {"max_model_len": LONGEST, "speculative_config": "off"}  # a step gives each row one token
        llm = LLM(**write_shape(shape, Path(folder)) | options)
        try:
            yield llm
        finally:
            llm.shutdown()


def random_prompts(llm: LLM, number: int, length: int) -> list[list[int]]:
    draw = random.Random(time.perf_counter_ns())
    vocabulary = llm.loaded.checkpoint.spec.vocab_size
    return [[draw.randrange(vocabulary) for _ in range(length)] for _ in range(number)]


def step_ms(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> float:
    """Milliseconds of a step in which all rows decode, without what makes outputs of its events."""
    engine, rows = llm.loaded.engine, len(prompts) * sampling.n
    for prompt in prompts:
        engine.add(prompt, sampling)
    ends_s = []
    with no_garbage_collection():
        while engine.has_requests or not engine.is_idle:
            events = engine.step_overlapped()
            if sum(len(batch.tokens) for batch in events.tokens) == rows:
                ends_s.append(time.perf_counter())
    assert len(ends_s) > sampling.max_tokens // 2, f"{len(ends_s)} steps had all {rows} rows"
    taken_s: list[float] = np.diff(ends_s[2:]).tolist()
    return 1e3 * statistics.median(taken_s)


def compared(works: Mapping[str, Callable[[], float]], rounds: int) -> tuple[float, float, float]:
    """Medians of two works in turns, after one run of each, and the median of the first over the second."""
    for work in works.values():
        work()
    one, two = in_turns(works, rounds).values()
    ratio = statistics.median(a / b for a, b in zip(one, two, strict=True))
    return statistics.median(one), statistics.median(two), ratio


@bench.part(SHAPE_FLAG, flag("--rows", 64), TOKENS_FLAG, ROUNDS_FLAG)
def logprobs(given: Given) -> Found:
    """Steps of rows that all ask for 20 logprobs, against steps without: the share of speed that is left."""
    drawn = replace(DRAWN, max_tokens=given.tokens)
    found: Found = {}
    table("shape", "rows", "sampling", "through", "without, ms", "with 20, ms", "share left")
    with loaded(given.shape) as llm:
        prompts = random_prompts(llm, given.rows, PROMPT_TOKENS)

        def generate_ms(sampling: SamplingParams) -> float:
            started_s = time.perf_counter()
            llm.generate(prompts, sampling, use_tqdm=False)
            return 1e3 * (time.perf_counter() - started_s) / sampling.max_tokens

        for kind, without in (("plain", drawn), ("top-p 0.9", replace(drawn, top_p=0.9))):
            asking = replace(without, logprobs=LOGPROBS)
            for through, ms in (("engine", partial(step_ms, llm, prompts)), ("generate", generate_ms)):
                works = {"without": partial(ms, without), "with": partial(ms, asking)}
                figures = compared(works, given.rounds)
                found[f"{kind}, {through}"] = figures
                row(given.shape, given.rows, kind, through, *figures)
    return found


@bench.part(SHAPE_FLAG, TOKENS_FLAG, ROUNDS_FLAG)
def shared(given: Given) -> Found:
    """Steps of branches whose beginnings are computed for each row, over steps in which they are computed once."""
    found: Found = {}
    enough = host_rows.LEAST_SPARED
    table("shape", "rows", "off, ms", "on, ms", "times as fast")
    with loaded(given.shape) as llm:
        for name, (trees, branches, length) in TREES.items():
            prompts = random_prompts(llm, trees, length)
            sampling = replace(DRAWN, max_tokens=given.tokens, n=branches)

            def timed(least: int, llm=llm, prompts=prompts, sampling=sampling) -> float:
                host_rows.LEAST_SPARED = least
                return step_ms(llm, prompts, sampling)

            works = {"off": partial(timed, NOTHING_SPARES_THIS), "on": partial(timed, enough)}
            figures = compared(works, given.rounds)
            found[name] = figures
            row(given.shape, name, *figures)
    host_rows.LEAST_SPARED = enough
    return found


# -- guides ----------------------------------------------------------------------------------------------------

WORDS: Found = {"type": "string"}
OBJECT = {"type": "object", "properties": {"name": WORDS, "notes": WORDS}, "required": ["name", "notes"]}
GUIDED = Structure.of({"json": {"type": "array", "minItems": 200, "items": OBJECT}})


class HostTimes:
    """Seconds of the host by what it does, each without what it calls of the others."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner_s = [0.0]  # of what is under way, the seconds of what it has called

    @contextmanager
    def of(self, works: Mapping[str, tuple[Any, str]]) -> Iterator[None]:
        """Inside, calls of these methods or functions are timed: by name, the owner and its attribute."""
        before = [(owner, name, getattr(owner, name)) for owner, name in works.values()]
        for label, (owner, name, call) in zip(works, before, strict=True):
            setattr(owner, name, self._timed(label, call))
        try:
            yield
        finally:
            for owner, name, call in before:
                setattr(owner, name, call)

    def _timed(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self._inner_s.append(0.0)
            started_s = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                taken_s = time.perf_counter() - started_s
                self.seconds[label] = self.seconds.get(label, 0.0) + taken_s - self._inner_s.pop()
                self._inner_s[-1] += taken_s

        return timed


@bench.part(
    flag("--shape", "qwen3-0.6b", choices=tuple(SHAPES)), flag("--rows", 256), TOKENS_FLAG, ROUNDS_FLAG
)
def guided(given: Given) -> Found:
    """Steps of rows under a schema against steps of free rows, and the host's part of each, in milliseconds."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder:
        options = {**write_shape(given.shape, Path(folder)), "skip_tokenizer_init": False}
        write_tokenizer(given.shape, Path(folder))
        llm = LLM(**options | {"speculative_config": "off"})
    engine = llm.loaded.engine
    prompts = random_prompts(llm, given.rows, PROMPT_TOKENS)
    free = replace(DRAWN, max_tokens=given.tokens)
    works = {"free": free, "guided": replace(free, structured_outputs=GUIDED, ignore_eos=False)}
    parts = {
        "waits for the device": (Mark, "wait"),
        "reads results": (GPUPending, "wait"),
        "updates": (engine.scheduler, "update"),
        "moves guides on": (engine.guides, "advance"),
        "plans": (engine.scheduler, "schedule"),
        "makes masks": (GuideBatch, "fill_masks"),
        "launches draws": (GPUPending, "supply"),
        "launches steps": (GPURunner, "submit"),
        "finds guides of rows": (engine.guides, "of_rows"),
        "all else": (engine, "step_overlapped"),
    }
    for sampling in works.values():  # compiles the schema, several times
        step_ms(llm, prompts, sampling)
    table("shape", "rows", "kind", "step, ms", *parts)
    for kind, sampling in works.items():
        steps_ms = [step_ms(llm, prompts, sampling) for _ in range(given.rounds)]
        times, before = HostTimes(), engine.num_submitted
        with times.of(parts):
            for _ in range(given.rounds):
                step_ms(llm, prompts, sampling)
        number = engine.num_submitted - before
        host_ms = {label: 1e3 * times.seconds.get(label, 0.0) / number for label in parts}
        found[kind] = {"step_ms": statistics.median(steps_ms), "host_ms": host_ms}
        row(given.shape, given.rows, kind, found[kind]["step_ms"], *host_ms.values())
    llm.shutdown()
    return found


# -- branches --------------------------------------------------------------------------------------------------

FORKS, PARENT_TOKENS, BEAM = 64, 8000, 4


@bench.part(SHAPE_FLAG, TOKENS_FLAG, ROUNDS_FLAG)
def branches(given: Given) -> Found:
    """How soon forks of a long answer speak, and what a beam takes per token."""
    table("shape", "what", "median, ms", "slowest, ms")
    found: Found = {}
    with loaded(given.shape) as llm, no_garbage_collection():
        works = {
            f"{FORKS} forks": partial(forks_ms, llm, given.tokens),
            f"beam of {BEAM}": partial(beam_ms, llm),
        }
        for name, work in works.items():
            work()
            taken = [work() for _ in range(given.rounds)]
            found[name] = (statistics.median(taken), max(taken))
            row(given.shape, name, *found[name])
    return found


def forks_ms(llm: LLM, tokens: int) -> float:
    """From the fork of a running answer until every branch has a token."""
    engine = llm.loaded.engine
    (prompt,) = random_prompts(llm, 1, PARENT_TOKENS)
    (parent,) = engine.add(prompt, replace(DRAWN, max_tokens=tokens))
    while not any(len(batch.tokens) for batch in engine.step_overlapped().tokens):
        pass
    started_s, waiting = time.perf_counter(), set(engine.fork(parent, FORKS))
    while waiting:
        for batch in engine.step_overlapped().tokens:
            waiting.difference_update(batch.requests.tolist())
    taken_s = time.perf_counter() - started_s
    while engine.has_requests or not engine.is_idle:
        engine.step_overlapped()
    return 1e3 * taken_s


def beam_ms(llm: LLM) -> float:
    """Per token of an answer."""
    (prompt,) = random_prompts(llm, 1, PROMPT_TOKENS)
    started_s = time.perf_counter()
    llm.search("beam", prompt, SamplingParams(max_tokens=64, ignore_eos=True), width=BEAM)
    return 1e3 * (time.perf_counter() - started_s) / 64


if __name__ == "__main__":
    bench.main()
