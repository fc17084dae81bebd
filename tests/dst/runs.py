"""Whole runs of one seed."""

from __future__ import annotations

import gc
import time
import traceback
from collections import Counter

from tests.dst.world import World


def run_seed(seed: int, steps: int) -> Counter[str]:
    """Run one seed."""
    gc.disable()  # a world is small and short: collecting once at its end is cheaper
    gc.freeze()  # and then only what is the world's
    try:
        return World(seed).run(steps)
    finally:
        gc.enable()
        gc.collect()
        gc.unfreeze()


def attempt(job: tuple[int, int]) -> tuple[int, Counter[str], str]:
    """Run one seed; the last entry is "" or what went wrong. Here, because workers cannot import a `__main__`."""
    seed, steps = job
    started = time.process_time()
    try:
        counts = run_seed(seed, steps)
    except BaseException:
        return seed, Counter(), traceback.format_exc()
    counts["microseconds of CPU time"] = int((time.process_time() - started) * 1e6)
    return seed, counts, ""
