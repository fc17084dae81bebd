"""`paceline tune --verify`: the workload, sent to a live server, and what was seen beside what was predicted.

Owns how much is sent and the table. Sending is `bench.load`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.bench.load.bodies import COMPLETIONS
from paceline.bench.load.replayed import send_workload
from paceline.cli.bench_server import BenchServer
from paceline.cli.sim_calibrate import comparison_table
from paceline.cli.sim_output import show_table
from paceline.cli.tune_options import TuneOptions
from paceline.cli.tune_run import Task, parse_bounds, serve_flags
from paceline.errors import InputError
from paceline.report.summary import Summary, summarize
from paceline.report.table import format_number
from paceline.sim.compare import deviations
from paceline.sim.tune import Bound, Trial

FEW = 100  # requests, of which one is the p99


def verify(options: TuneOptions, trial: Trial, task: Task) -> None:
    """Send as many requests as fit into the time, and simulate the same ones."""
    server = BenchServer(options.verify, None, COMPLETIONS)  # says at once where nobody answers
    workload = task.at(trial.rate)
    count = int((workload.arrival_s <= options.verify_seconds).sum())
    workload = workload.head(max(2, count))
    longest = int((workload.prompt_len + workload.output_len).max())
    if server.max_model_len is not None and longest > server.max_model_len:
        raise InputError(
            f"the workload has a request of {longest:,} tokens and the server takes {server.max_model_len:,}: "
            "start it with a longer --max-model-len, or take another workload"
        )
    print(
        f"Sending {len(workload)} requests to {options.verify} over {workload.duration_s:.0f} s ...",
        flush=True,
    )
    seen = summarize(
        send_workload(
            server.target,
            server.model,
            workload,
            seed=options.seed,
            label="seen",
            keys={"": server.key},
        )
    )
    failed = sum(seen.requests.values()) - seen.requests["finished"]
    predicted = task.simulated(trial.settings, workload)
    table = comparison_table(deviations(seen, predicted), simulated="predicted")
    show_table(f"{options.verify} at {format_number(trial.rate)} requests/s", table)
    if failed:
        print(f"{failed} requests were not answered and do not count.")
    for line in slo_lines(parse_bounds(options.slo), seen):
        print(line)
    print(f"This holds if the server runs with: {serve_flags(trial.settings)}")


def slo_lines(bounds: Sequence[Bound], seen: Summary) -> list[str]:
    """Whether each bound was kept, and how much that is worth."""
    lines = []
    for bound in bounds:
        seen_s = bound.seen_s(seen)
        if seen_s is None:
            lines.append(f"{bound.name}: nothing was seen of it.")
        else:
            word = "kept" if seen_s <= bound.seconds else "missed"
            lines.append(f"{bound.name}: {word}, {1e3 * seen_s:,.0f} of {1e3 * bound.seconds:,.0f} ms.")
    finished = seen.requests["finished"]
    if finished < FEW:
        lines.append(f"{finished} requests say little about a tail: raise --verify-seconds.")
    return lines
