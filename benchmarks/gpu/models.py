"""Two models on one card: steps in turns, as the conductor of a server gives them, against one after the other.

Both have the same shape with made-up weights and the same rows; what is compared is the time until all of them have
their tokens. *turns* is what alternating costs: caches that the other model has used, and a queue that is never two
steps deep for one of them. The parts of the device's time are those the conductor charged; the last steps, when one
model has ended, are left out.

    python -m benchmarks.gpu.models [--shape qwen3-0.6b] [--rows 64] [--tokens 256] [--rounds 5] [--kv-gib 8]
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from benchmarks.harness import (
    Benchmark,
    Found,
    Given,
    flag,
    in_turns,
    no_garbage_collection,
    row,
    spread,
    table,
)
from paceline import LLM, SamplingParams
from paceline.config.models import ModelShare
from paceline.engine.conductor import Conductor, Seat
from paceline.engine.engine import Engine
from paceline.lab.bench.shapes import SHAPES, write_shape

bench = Benchmark(__doc__)
PROMPT_TOKENS = 16


def fill(llm: LLM, rows: int, tokens: int, seed: int) -> Engine:
    """Requests that decode together."""
    draw, engine = random.Random(seed), llm.loaded.engine
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    vocabulary = llm.loaded.checkpoint.spec.vocab_size
    for _ in range(rows):
        engine.add([draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)], sampling)
    return engine


def step(engine: Engine) -> None:
    if engine.depth:
        engine.step_overlapped()
    else:
        engine.step()


def one_after_the_other(llms: list[LLM], rows: int, tokens: int) -> float:
    engines = [fill(llm, rows, tokens, place) for place, llm in enumerate(llms)]
    started_s = time.perf_counter()
    for engine in engines:
        while engine.has_requests:
            step(engine)
        engine.drain()
    return time.perf_counter() - started_s


def taken_in_turns(llms: list[LLM], rows: int, tokens: int) -> tuple[float, float]:
    """Seconds, and the first model's part of the device's time while both had work."""
    engines = [fill(llm, rows, tokens, place) for place, llm in enumerate(llms)]
    conductor = Conductor([Seat(config=ModelShare(name=str(place))) for place in range(len(llms))])
    started_s, part = time.perf_counter(), 0.0
    while True:
        ready = [engine.has_requests for engine in engines]
        chosen = conductor.next(ready)
        if chosen is None:
            break
        began_s = time.perf_counter()
        step(engines[chosen])
        conductor.charge(chosen, time.perf_counter() - began_s)
        if all(ready):
            part = conductor.seats[0].device_s / sum(seat.device_s for seat in conductor.seats)
    for engine in engines:
        engine.drain()
    return time.perf_counter() - started_s, part


@bench.part(
    flag("--shape", "qwen3-0.6b", choices=tuple(SHAPES)),
    flag("--rows", 64, "of each model"),
    flag("--tokens", 256, "of each row"),
    flag("--rounds", 5, "of each way, in turns"),
    flag("--kv-gib", 8.0, "KV cache of each model"),
)
def turns(given: Given) -> Found:
    parts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        options = write_shape(given.shape, Path(folder)) | {
            "kv_cache_memory_bytes": int(given.kv_gib * 2**30),
            "max_num_seqs": given.rows,
            "max_model_len": 1024,
        }
        llms = [LLM(**options) for _ in range(2)]

        def alternating() -> float:
            seconds, part = taken_in_turns(llms, given.rows, given.tokens)
            parts.append(part)
            return seconds

        one_after_the_other(llms, given.rows, 8)  # warm
        with no_garbage_collection():
            works = {
                "after": lambda: one_after_the_other(llms, given.rows, given.tokens),
                "turns": alternating,
            }
            found = in_turns(works, given.rounds)
    ratio = min(found["after"]) / min(found["turns"])
    table("what", "found")
    row("one after the other", f"{min(found['after']):.3f} s")
    row("in turns", f"{min(found['turns']):.3f} s, {ratio:.3f} of the speed")
    row("part of the first", f"{parts[-1]:.3f}")
    after, alternated = (spread(found[name], 4) for name in ("after", "turns"))
    return {"after_s": after, "turns_s": alternated, "ratio": round(ratio, 4), "parts": parts}


if __name__ == "__main__":
    bench.main()
