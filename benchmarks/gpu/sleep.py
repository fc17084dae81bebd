"""A model alone on a card, with made-up weights, that sleeps and wakes: how long both take, to the first token of a
request too, and how much memory the driver has meanwhile.

Graphs know addresses: where memory comes back to another place they are captured again, which `moved` shows.

    python -m benchmarks.gpu.sleep [--shape llama-3.1-8b] [--quantization auto] [--rounds 3]
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.models import greedy, prompt, step
from benchmarks.harness import Benchmark, Found, Given, flag, row, spread, table
from paceline.core.standing import DEVICE_LOST, WEIGHTS_DROPPED, WEIGHTS_KEPT
from paceline.factory import LoadedModel, load_model
from paceline.lab.bench.shapes import write_shape
from paceline.llm.arguments import split_arguments

bench = Benchmark(__doc__)
GIB = 1 << 30


def nap(loaded: LoadedModel, level: int, *, moved: bool) -> tuple[float, float, float, float]:
    """Seconds to sleep, GiB that were free then and not before, seconds to be awake and to the first token."""
    engine, sleeper = loaded.engine, loaded.sleeper
    assert sleeper is not None
    before, _ = torch.cuda.mem_get_info()
    began_s = time.perf_counter()
    engine.sleep(levels_lost=DEVICE_LOST)
    sleeper.let_go(level)
    slept_s = time.perf_counter() - began_s
    freed = torch.cuda.mem_get_info()[0] - before
    others = [torch.empty(8 << 20, dtype=torch.uint8, device="cuda") for _ in range(64)] if moved else []
    began_s = time.perf_counter()
    engine.wake(sleeper.open())
    woke_s = time.perf_counter() - began_s
    engine.add(prompt(random.Random(2), 16, loaded.checkpoint.spec.vocab_size), greedy(1))
    while not step(engine).tokens:
        pass
    first_s = time.perf_counter() - began_s
    engine.drain()
    del others
    torch.cuda.empty_cache()
    return slept_s, freed / GIB, woke_s, first_s


@bench.part(
    flag("--shape", "llama-3.1-8b", "of the model"),
    flag("--quantization", "auto", "of its weights"),
    flag("--rounds", 3, "of each kind"),
)
def sleep(given: Given) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        options = write_shape(given.shape, Path(folder)) | {"quantization": given.quantization}
        model, rest = split_arguments(None, options)
        began_s = time.perf_counter()
        loaded = load_model(model, rest)
        table("what", "found")
        row("loading", f"{time.perf_counter() - began_s:.1f} s")
        found: Found = {}
        for name, level, moved in (
            ("level 1", WEIGHTS_KEPT, False),
            ("level 1, moved", WEIGHTS_KEPT, True),
            ("level 2", WEIGHTS_DROPPED, False),
        ):
            rounds = [nap(loaded, level, moved=moved) for _ in range(given.rounds)]
            slept, freed, woke, first = zip(*rounds, strict=True)
            row(f"{name}: sleep, first and least", f"{slept[0]:.2f} s, {min(slept):.3f} s")
            row(f"{name}: free for others", f"{min(freed):.1f} GiB")
            row(f"{name}: wake, to the first token", f"{min(woke):.3f} s, {min(first):.3f} s")
            found[name] = {"sleep_s": slept, "freed_gib": freed, "wake_s": spread(list(woke), 4)}
            found[name]["first_token_s"] = spread(list(first), 4)
        return found


if __name__ == "__main__":
    bench.main()
