"""`paceline tune --verify`: the workload, sent to a live server, and what was seen beside what was predicted.

Owns how much is sent and the table. Sending is `bench.load`'s business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline.bench.load.bodies import COMPLETIONS
from paceline.bench.load.replayed import send_workload
from paceline.cli.bench_server import BenchServer, told_by
from paceline.cli.remote import admin_connection
from paceline.cli.sim_calibrate import comparison_table
from paceline.cli.sim_output import show_table
from paceline.cli.tune_options import TuneOptions
from paceline.cli.tune_run import MOST_DIGITS, Task, parse_bounds, serve_flags, shown_value
from paceline.errors import InputError
from paceline.report.summary import Summary, summarize
from paceline.report.table import format_number
from paceline.sim.compare import deviations
from paceline.sim.tune import Bound, Settings, Trial, Value

FEW = 100  # requests, of which one is the p99
LIMITS = {  # settings, and what a server calls them where it tells how it is steered
    "max_num_batched_tokens": "max_step_tokens",
    "max_num_prompt_tokens": "max_prompt_tokens",
    "max_num_seqs": "max_rows",
    "long_prefill_share": "prompt_share",
    "step_target_ms": "step_target_ms",
}


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
    differing = differences(trial.settings, settings_of(options.verify))
    if differing:
        print(f"The server has other settings than those found: {', '.join(differing)}.")
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
    print(conclusion(trial.settings, differing))


def settings_of(url: str) -> dict[str, Value]:
    """What a server tells of the settings searched for; nothing without an admin key, or if it is another's."""
    connection = admin_connection(url)
    dial, policy = (told_by(connection, path) for path in ("/v1/admin/dial", "/v1/admin/policy"))
    limits = (dial or {}).get("limits") or {}
    found = {name: limits.get(told) for name, told in LIMITS.items()}
    if "step_target_ms" in limits and found["step_target_ms"] is None:
        found["step_target_ms"] = 0.0  # no pace is kept
    found["scheduling_policy"] = (policy or {}).get("policy")
    return {name: value for name, value in found.items() if value is not None}


def differences(wanted: Settings, found: Mapping[str, Value]) -> list[str] | None:
    """Which settings are not those wanted; None where a server does not tell all of them."""
    if not wanted.keys() <= found.keys():
        return None
    return [
        f"--{name.replace('_', '-')} {shown_value(found[name])} instead of {shown_value(value)}"
        for name, value in _as_told(wanted).items()
        if not _is_same(found[name], value) and not _is_for_the_pace(name, found, wanted)
    ]


def _as_told(wanted: Settings) -> Settings:
    """What a server set to these tells: its largest step, whichever of the two options says so."""
    alone = wanted.get("max_num_prompt_tokens")
    if alone is None:
        return wanted
    return {**wanted, "max_num_prompt_tokens": max(float(alone), float(wanted["max_num_batched_tokens"]))}


def conclusion(settings: Settings, differing: Sequence[str] | None) -> str:
    flags = serve_flags(settings)
    if differing is None:
        return f"The server does not tell its settings (that takes an admin key); this holds if it runs with: {flags}"
    if differing:
        return f"The prediction is for other settings than the server has; start it with: {flags}"
    return f"The server runs with the settings found: {flags}"


def _is_for_the_pace(name: str, found: Mapping[str, Value], wanted: Settings) -> bool:
    """A server that keeps a pace takes fewer tokens into a step than its flag allows if more would not keep it."""
    is_less = name == "max_num_batched_tokens" and float(found[name]) < float(wanted[name])
    return is_less and float(wanted.get("step_target_ms", 0.0)) > 0.0


def _is_same(found: Value, wanted: Value) -> bool:
    if isinstance(found, str) or isinstance(wanted, str):
        return found == wanted
    return math.isclose(found, wanted, rel_tol=1e-6)


def slo_lines(bounds: Sequence[Bound], seen: Summary) -> list[str]:
    """Whether each bound was kept, and how much that is worth."""
    lines = []
    for bound in bounds:
        seen_s = bound.seen_s(seen)
        if seen_s is None:
            lines.append(f"{bound.name}: nothing was seen of it.")
        else:
            word = "kept" if seen_s <= bound.seconds else "missed"
            lines.append(f"{bound.name}: {word}, {_of_bound(seen_s, bound.seconds)} ms.")
    finished = seen.requests["finished"]
    if finished < FEW:
        lines.append(f"{finished} requests say little about a tail: raise --verify-seconds.")
    return lines


def _of_bound(seen_s: float, bound_s: float) -> str:
    """Milliseconds of a bound, with as many digits as it takes to tell more than the bound from the bound itself."""
    for digits in range(MOST_DIGITS):
        seen, bound = (f"{1e3 * value:,.{digits}f}" for value in (seen_s, bound_s))
        if seen != bound or seen_s <= bound_s:
            return f"{seen} of {bound}"
    return f"just over {bound} of {bound}"
