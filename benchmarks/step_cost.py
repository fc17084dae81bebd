"""Host time of a step with prefixes kept in host memory and on a disk, against a step without, in turns.

1,024 rows on a device that costs nothing, whose KV cache is full of cached prefixes: what a step takes is evicted, or
moves to the host, and from there to the disk. *steady*: all rows decode. *churn*: 32 requests join and 32 leave in each
step. *room*: all rows decode, and the KV cache has room, so that nothing is evicted. A link of 50 GB/s, a disk that
writes 1.5 GB/s, blocks of 2 MiB and 31 ms between steps: an 8B model on an H200, which sets what budgets allow; without
limits with --no-budgets. CPU time of the thread, medians over turns of 16 steps.

    python -m benchmarks.step_cost [--rounds 24] [--only steady,churn,room] [--no-budgets]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from benchmarks.engine_cost import BLOCK, CHURN, PROMPT, ROWS, Load
from benchmarks.harness import Benchmark, Found, Given, flag, in_turns, no_garbage_collection, row, table
from paceline.config.engine import KVConfig, PreemptionCosts
from paceline.core.clock import ManualClock

bench = Benchmark(__doc__)
TURN, LONGEST = 16, 4096
STEP_S = 0.031
COSTS = PreemptionCosts(token_s=2.4e-5, block_s=4.2e-5, disk_block_s=7e-4, disk_write_s=1.4e-3)
NO_BUDGETS = PreemptionCosts(token_s=1e-4, block_s=1e-6, disk_block_s=1e-6, disk_write_s=1e-6)
KINDS: dict[str, Found] = {
    "without": {},
    "host": {"num_host_blocks": 8192, "cache_on_host": True},
    "host and disk": {"num_host_blocks": 8192, "cache_on_host": True, "num_disk_blocks": 65_536},
}


def step(load: Load) -> None:
    load.clock.advance(STEP_S)
    load.engine.step()


def turns_of(load: Load, churn: int) -> Any:
    """One turn: microseconds of CPU time a step."""

    def turn() -> float:
        taken_s = 0.0
        for _ in range(TURN):
            load.add(churn)  # making prompt keys is work outside the step, and is not timed
            started_s = time.thread_time()
            step(load)
            taken_s += time.thread_time() - started_s
        return 1e6 * taken_s / TURN

    return turn


def all_decode(load: Load) -> None:
    """Step until no request waits or has tokens of its prompt left."""
    state = load.engine.scheduler.state
    while len(state.queue) or state.prefilling:
        step(load)


def prepared(name: str, *, churn: int, full: bool, steps: int, budgets: bool = True) -> Load:
    """An engine whose rows all decode."""
    held = ROWS * ((PROMPT + BLOCK + steps) // BLOCK + 2)
    kv = KVConfig(
        block_size=BLOCK, num_blocks=held + (4096 if full else 65_536), eviction="lru", **KINDS[name]
    )
    load = Load(
        ROWS,
        longest=LONGEST,
        max_tokens=LONGEST - 2 * PROMPT,
        budget=ROWS + 64 * PROMPT,
        kv=kv,
        costs=COSTS if budgets else NO_BUDGETS,
        clock=ManualClock(),
        depth=0,
        check_every=0,
    )
    all_decode(load)
    if full:  # requests come and go until the cache is full
        load.runner.leaving = CHURN
        pool = load.engine.scheduler.state.kv.groups[0].pool
        while not pool.num_evicted:
            load.add(CHURN)
            step(load)
        load.runner.leaving = 0
        all_decode(load)
    load.runner.leaving = churn
    return load


@bench.part(
    flag("--rounds", 24, "turns of each kind"),
    flag("--only", "steady,churn,room"),
    flag("--no-budgets", False, "all that is evicted moves"),
)
def step_cost(given: Given) -> Found:
    """Steps with levels over steps without."""
    found: Found = {}
    table("rows", "levels", "us", "of it without")
    for what in given.only.split(","):
        churn, full = CHURN if what == "churn" else 0, what != "room"
        steps = 2 * TURN * (given.rounds + 1)
        sizes = {"churn": churn, "full": full, "steps": steps, "budgets": not given.no_budgets}
        loads = {name: prepared(name, **sizes) for name in KINDS}
        works = {name: turns_of(load, churn) for name, load in loads.items()}
        with no_garbage_collection():
            in_turns(works, 2)
            taken = in_turns(works, given.rounds)
        for name, each in taken.items():
            ratio = statistics.median(np.array(each) / np.array(taken["without"]))
            found[f"{what}, {name}"] = {"us": statistics.median(each), "ratio": ratio}
            row(f"{ROWS}, {what}", name, statistics.median(each), ratio)
    return found


if __name__ == "__main__":
    bench.main()
