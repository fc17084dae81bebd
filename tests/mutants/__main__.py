"""Command line of the mutants; see the package's docstring."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tests.mutants.runner import Mutant, Verdict, check_unmutated, judge_all, load, mutated_copy, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="mutants of the engine")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; all when none is named")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--survey", metavar="FIRST:END", help="run every seed of a range and show what kills")
    arguments = parser.parse_args()
    table = load()
    unknown = [name for name in arguments.names if name not in table]
    if unknown:
        parser.error(f"no mutant is called {', '.join(unknown)}")
    chosen = [table[name] for name in arguments.names] or list(table.values())
    if arguments.survey:
        first, end = (int(part) for part in arguments.survey.split(":"))
        for mutant in chosen:
            survey(mutant, range(first, end))
        return 0
    return judged(chosen, arguments.jobs)


def judged(mutants: list[Mutant], jobs: int) -> int:
    """Run the mutants, then the same seeds unmutated; 1 when anything is not as it should be."""
    started = time.perf_counter()
    problems = 0
    seeds: set[int] = set()
    for verdict in judge_all(mutants, jobs):
        show(verdict)
        problems += bool(verdict.problem)
        seeds.update(outcome.seed for outcome in verdict.outcomes if outcome.seed >= 0)
    for outcome in check_unmutated(sorted(seeds), mutants[0].steps):
        problems += 1
        print(f"the unmutated copy fails at seed {outcome.seed}: {outcome.message}")
    seconds = time.perf_counter() - started
    print(f"{len(mutants)} mutants, {len(seeds)} seeds, {problems} problems, {seconds:.0f} s")
    return 1 if problems else 0


def show(verdict: Verdict) -> None:
    killer = verdict.killer
    if verdict.problem or killer is None:
        print(f"{verdict.mutant.name:<32} PROBLEM: {verdict.problem}")
        return
    seconds = sum(outcome.seconds for outcome in verdict.outcomes)
    place = f"{killer.invariant:<5} seed {killer.seed:<4} {seconds:5.2f} s"
    print(f"{verdict.mutant.name:<32} {place}  {verdict.mutant.breaks}", flush=True)


def survey(mutant: Mutant, seeds: range) -> None:
    """What every seed does to a mutant, and which kill it fastest as they should."""
    with mutated_copy(mutant.patch) as copy:
        outcomes = run_seeds(Path(copy), mutant.steps, seeds, all_seeds=True)
    counts = Counter(outcome.invariant or outcome.crash or "survived" for outcome in outcomes)
    good = sorted((o.seconds, o.seed) for o in outcomes if o.invariant in mutant.invariants)
    fastest = ", ".join(f"{seed} ({seconds:.2f} s)" for seconds, seed in good[:5])
    wanted = " or ".join(mutant.invariants)
    print(
        f"{mutant.name:<32} wanted {wanted}; {dict(counts)}; fastest seeds: {fastest or 'none'}", flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
