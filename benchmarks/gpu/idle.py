"""How long the card stands still while rows decode: 1 - (union of kernel intervals / wall time), from a profile.

Loads a shape with made-up weights, lets rows decode through `LLM.generate` and looks at consecutive steps in the
middle, gaps inside graphs included. A step is what lies between two draws. The profiler takes its share of the time:
what a step takes without it is printed beside.

    python -m benchmarks.gpu.idle [--shape qwen3-0.6b] [--rows 256] [--steps 200] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.kernels import environment
from paceline import LLM, SamplingParams
from paceline.lab.bench.shapes import SHAPES, write_shape

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
    """Seconds of a step of so many rows."""
    draw = random.Random(time.perf_counter_ns())
    vocabulary = llm.loaded.checkpoint.spec.vocab_size
    prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    torch.cuda.synchronize()
    return (time.perf_counter() - started_s) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-0.6b", choices=tuple(SHAPES))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = BEFORE + options.steps + 20
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(**write_shape(options.shape, Path(folder)))
        run(llm, options.rows, tokens)
        plain_s = run(llm, options.rows, tokens)
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            run(llm, options.rows, tokens)
    kernels = window(kernels_of(recorded), options.steps)
    wall_ns = max(kernel.end_ns for kernel in kernels) - kernels[0].start_ns
    idle = 1.0 - busy_ns(kernels) / wall_ns
    shares: Counter[str] = Counter()
    for kernel in kernels:
        shares[kernel.name] += kernel.end_ns - kernel.start_ns
    found = {
        "shape": options.shape,
        "rows": options.rows,
        "steps": options.steps,
        "idle_share": round(idle, 4),
        "ms_per_step_profiled": round(wall_ns / options.steps / 1e6, 3),
        "ms_per_step_without_profiler_prompts_included": round(plain_s * 1e3, 3),
        "kernels_per_step": round(len(kernels) / options.steps, 1),
        "shares": {name: round(taken / wall_ns, 4) for name, taken in shares.most_common(12)},
    }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found | {"environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
