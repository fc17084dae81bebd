"""The long soak: python -m tests.soak --minutes 60 [--seed N] [--json FILE]. Ends with 1 when something is wrong."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.soak.judge import Evidence, Limits, growth_mib, judge, slope_mib_per_min
from tests.soak.run import Figures, percentiles, run_soak

LONG = Limits(growth_mib=48.0, slope_mib_per_min=0.5)


def report(evidence: Evidence, figures: Figures, failures: list[str]) -> dict[str, Any]:
    """The figures of a run, for people and machines."""
    clients = evidence.clients
    return {
        "minutes": round(figures.seconds / 60, 2),
        "seed": figures.seed,
        "requests": figures.requests,
        "answered": dict(sorted(clients.answered.items())),
        "refused": clients.refused,
        "left": clients.left + clients.perhaps_unseen,
        "aborted_generations": evidence.ended["abort"],
        "slow_requests_cut": clients.dripped,
        "stalled_readers_cut": evidence.stalled,
        "preemptions": evidence.preemptions,
        "moved": dict(evidence.moved),
        "disk_bytes": evidence.disk_bytes,
        "generation_tokens": figures.generation_tokens,
        "memory": {
            name: {
                "last_mib": round(series[-1][1] / 1024, 1),
                "growth_mib": round(growth_mib(series), 2),
                "slope_mib_per_min": round(slope_mib_per_min(series), 3),
            }
            for name, series in evidence.memory.items()
        },
        "files_threads_tasks": {
            "before": [evidence.tasks_before, *((s.files, s.threads) for s in evidence.before.values())],
            "after": [evidence.tasks_after, *((s.files, s.threads) for s in evidence.after.values())],
        },
        "held": {
            name: {
                "objects": evidence.held_after[name].objects - held.objects,
                "malloc_kib": evidence.held_after[name].malloc_kib - held.malloc_kib,
            }
            for name, held in evidence.held_before.items()
        },
        "health_live_ms": percentiles(figures.live_ms),
        "health_ready_ms": percentiles(figures.ready_ms),
        "event_loop_lag_ms": percentiles(figures.loop_lag_ms),
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--json", type=Path, help="also write the report into this file")
    arguments = parser.parse_args()
    print(f"soak of {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    evidence, figures = run_soak(arguments.minutes, arguments.seed)
    found = report(evidence, figures, judge(evidence, LONG))
    found |= {"commit": _commit(), "machine": f"{platform.machine()}, {platform.platform()}"}
    text = json.dumps(found, indent=1)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
    print(text)
    return 1 if found["failures"] else 0


def _commit() -> str:
    done = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
