"""Plans as bytes (`paceline.runner.parallel.wire`): how many, and how long it takes to make and to read them.

*steady*: 1,024 rows decode, of which one in 16 gets a block; *churn*: 32 rows join with 64 tokens each, too. CPU time
of the thread, the fastest of the rounds. Then random plans that must come back equal, and damaged ones that must be
refused.

    python -m benchmarks.plan_wire [--rounds 200] [--plans 100000]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from benchmarks.harness import Benchmark, Found, Given, flag, no_garbage_collection, row, table
from paceline.core.plan import BlockAppends, StepPlan, StepWork, whole_rows
from paceline.core.sampling import SamplingParams
from paceline.runner.parallel.wire import BadPlan, decode, encode
from tests.plans import random_plan, same

bench = Benchmark(__doc__)
ROWS, BLOCK, JOINS, PROMPT, REPEAT = 1024, 16, 32, 64, 100


def steady() -> StepPlan:
    blocks = np.arange(ROWS // BLOCK, dtype=np.int32)
    return StepPlan(
        seq=1000,
        new_blocks=BlockAppends(row=blocks, group=0 * blocks, index=blocks, block=blocks),
        work=StepWork(decode_rows=ROWS, decode_context=ROWS * 500, logit_rows=ROWS),
    )


def churn() -> StepPlan:
    joins = whole_rows(
        range(JOINS), [range(PROMPT)] * JOINS, [500] * JOINS, SamplingParams(seed=1, top_p=0.9)
    )
    return steady()._replace(joins=joins)


def fastest_us(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        started_s = time.thread_time()
        for _ in range(REPEAT):
            work()
        taken.append((time.thread_time() - started_s) / REPEAT)
    return 1e6 * min(taken)


@bench.part(
    flag("--rounds", 200, "of 100 plans each"),
    flag("--plans", 100_000, "random plans that must come back equal"),
)
def plan_wire(given: Given) -> Found:
    found: Found = {}
    table("step", "bytes", "encode us", "decode us")
    for make in (steady, churn):
        plan = make()
        data = encode(plan)
        with no_garbage_collection():
            encode_us = fastest_us(lambda plan=plan: encode(plan), given.rounds)  # type: ignore[misc]
            decode_us = fastest_us(lambda data=data: decode(memoryview(data)), given.rounds)  # type: ignore[misc]
        row(make.__name__, len(data), encode_us, decode_us)
        found[make.__name__] = {"bytes": len(data), "encode_us": encode_us, "decode_us": decode_us}
    rng = random.Random(1)
    equal = refused = 0
    for _ in range(given.plans):
        plan = random_plan(rng)
        data = encode(plan)
        equal += same(decode(memoryview(data)), plan)
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            decode(memoryview(damaged))
        except BadPlan:
            refused += 1
    print(f"{equal} of {given.plans} random plans came back equal, {refused} damaged ones were refused")
    return {**found, "plans": given.plans, "equal": equal, "refused": refused}


if __name__ == "__main__":
    bench.main()
