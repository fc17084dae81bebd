"""Runs seeds of the simulation until one fails and says by what, as JSON lines: the other end of `runner`.

Started in a copy of the project that may be mutated, so it imports nothing of this package.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path

import paceline
from paceline.scheduler.invariants import InvariantViolation
from tests.dst.runs import run_seed


def attempt(seed: int, steps: int) -> dict[str, object]:
    """Run one seed. `invariant` is what it died by, `crash` the exception that is none of ours, or both are ""."""
    started = time.process_time()
    invariant = crash = message = ""
    try:
        run_seed(seed, steps)
    except InvariantViolation as violation:
        invariant, message = violation.name, str(violation)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        crash = type(error).__name__
        message = f"{crash}: {error} ({Path(last.filename).name}, line {last.lineno})"
    seconds = time.process_time() - started
    return {"seed": seed, "invariant": invariant, "crash": crash, "message": message, "seconds": seconds}


def main(steps: int, seeds: list[int], *, all_seeds: bool) -> None:
    here = Path.cwd() / "src"
    assert Path(paceline.__file__).is_relative_to(here), f"{paceline.__file__} is not the copy in {here}"
    for seed in seeds:
        outcome = attempt(seed, steps)
        print(json.dumps(outcome), flush=True)
        if not all_seeds and (outcome["invariant"] or outcome["crash"]):
            return


if __name__ == "__main__":
    main(int(sys.argv[2]), [int(seed) for seed in sys.argv[3:]], all_seeds=sys.argv[1] == "all")
