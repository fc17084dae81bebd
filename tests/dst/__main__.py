"""Command line of the deterministic simulation; see the package's docstring."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter

from tests.dst.runs import attempt

# Of the steps, those that have to have 8 or more rows. Worlds with pictures, contexts, slabs and trees have few: each
# kind of world that came has taken one or two percent.
LEAST_WIDE = 0.12
REQUIRED = (
    "preempt",
    "swap",
    "evict",
    "copy-on-write",
    "fork",
    "prune",
    "abort in flight",
    "resume",
    "late finish",
    "place taken",
    "draft taken",
    "draft rejected",
    "structure complete",
    "fork at an earlier token",
    "extend",
    "hold",
    "store",
    "fetch",
    "load: sooner than computing",
    "failed copy",
    "adapter evicted",
    "slab lost",
    "slab lost by force",
    "wake",
    "vector",
    "vector after a preemption",
    "items encoded",
    "picture found encoded",
)
RARE = {"vector after a preemption": 2}  # wanted less often than the others, by this factor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dst", description="deterministic simulation")
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument("--seeds", default="0:64", help="range of seeds, FIRST:END")
    parser.add_argument("--steps", type=int, default=700, help="steps with traffic per seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--min-steps", type=int, default=0, help="continue with further seeds until this number of steps"
    )
    parser.add_argument("--require", type=int, default=0, help="least count of every required event")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        _, counts, error = attempt((arguments.seed, arguments.steps))
        print(error or dict(counts))
        return 1 if error else 0
    return campaign(arguments)


def campaign(arguments: argparse.Namespace) -> int:
    first, end = (int(part) for part in arguments.seeds.split(":"))
    total: Counter[str] = Counter()
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        while True:
            jobs = [(seed, arguments.steps) for seed in range(first, end)]
            for seed, counts, error in pool.imap_unordered(attempt, jobs):
                if error:
                    print(error)
                    print(f"seed {seed} failed; replay it with")
                    print(f"    python -m tests.dst --seed {seed} --steps {arguments.steps}")
                    return 1
                total += counts
                total["seeds"] += 1
            if total["steps"] >= arguments.min_steps:
                break
            first, end = end, end + (end - first)
    seconds = time.perf_counter() - started
    return report(total, seconds, arguments)


def report(total: Counter[str], seconds: float, arguments: argparse.Namespace) -> int:
    """The coverage table; 1 when something was seen too seldom."""
    for name in sorted(total):
        print(f"{name:>28} {total[name]:>10,}")
    by_cpu = total["steps"] / max(1e-6 * total["microseconds of CPU time"], 1e-6)
    by_clock = total["steps"] / seconds / arguments.jobs
    wide = total["steps with 8 or more rows"] / max(1, total["steps"])
    print(
        f"{by_cpu:,.0f} checked steps per second of CPU time, {by_clock:,.0f} per second and job by the clock"
    )
    print(f"{wide:.0%} of the steps have 8 or more rows")
    missing = [name for name in REQUIRED if total[name] * RARE.get(name, 1) < arguments.require]
    if arguments.require and wide < LEAST_WIDE:
        missing.append("steps with 8 or more rows")
    if missing:
        print(f"too seldom (at least {arguments.require:,} wanted): {', '.join(missing)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
