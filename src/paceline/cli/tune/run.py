"""The work behind `paceline tune`: bounds and knobs from options, the search, the table and the flags.

Owns which values each knob is tried with. How a setting is simulated is `lab.sim`'s business.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from paceline.cli.bench.serve import BenchServer, server_values
from paceline.cli.flags import writable, write_json
from paceline.cli.remote import admin_connection
from paceline.cli.sim.calibrate import comparison_table
from paceline.cli.sim.run import machine_of
from paceline.cli.sim.view import show_table
from paceline.cli.terminal import status_line
from paceline.cli.tune.flags import DEFAULT_REQUESTS, TuneOptions
from paceline.config.engine import SchedulerConfig
from paceline.errors import InputError
from paceline.lab.bench.load.figures import send_workload
from paceline.lab.bench.load.prompt_source import COMPLETIONS
from paceline.lab.report.summary import Slo, Summary, summarize
from paceline.lab.report.table import format_number, to_json
from paceline.lab.sim import Machine, SimConfig, engine_config, host_costs, simulate
from paceline.lab.sim.recorded import deviations
from paceline.lab.sim.tune import Bound, Knob, Settings, TimeIsUp, Trial, TuneSearch, Value
from paceline.lab.workload import Workload, load_workload
from paceline.lab.workload.generators import GENERATORS
from paceline.scheduler.policy import POLICY_CLASSES

FORMAT = "paceline-tune"
MEASURES, PERCENTILES = ("ttft", "itl", "e2e"), ("p50", "p90", "p99")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|)")
PACE_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)  # of the bound between tokens
LEAST_RATE, FEW_REQUESTS = 1e-3, 10  # so seldom that no request waits for another
AT_ONCE = 4.0
SEARCH_SHARE = 0.85  # of --seconds
MOST_DIGITS = 4  # of a share of the SLO, behind the point
TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192)
# Those whose order needs nothing that requests state.
POLICIES = tuple(name for name, kind in POLICY_CLASSES.items() if not kind.needs)


class Setting(NamedTuple):
    """An option that is searched."""

    heading: str  # short: the flags stand below the table
    values: tuple[Value, ...]  # it is tried with
    limit: str = ""  # what a server calls it where it tells how it is steered


SETTINGS = {
    "max_num_batched_tokens": Setting("tokens", TOKENS, "max_step_tokens"),
    "max_num_prompt_tokens": Setting("tokens, no decode", (0, *TOKENS), "max_prompt_tokens"),
    "max_num_seqs": Setting("rows", (4, 8, 16, 32, 64, 128, 256, 512), "max_rows"),
    "long_prefill_share": Setting("prompt share", (0.1, 0.25, 0.5, 0.75, 1.0), "prompt_share"),
    "step_target_ms": Setting("step ms", (0.0, 10.0, 20.0, 50.0, 100.0), "step_target_ms"),
    "scheduling_policy": Setting("policy", POLICIES),
}


def _do_nothing() -> None:
    return None


class Deadline:
    """The time that a search has: most of it to search, the rest to compare the best at one rate."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds
        self._until_s = self._end_s - (1.0 - SEARCH_SHARE) * seconds

    @property
    def has_passed(self) -> bool:
        return time.monotonic() > self._until_s

    def check(self) -> None:
        if self.has_passed:
            raise TimeIsUp

    def begin_comparison(self) -> None:
        self._until_s = self._end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is simulated: a workload at any rate, on a machine."""

    machine: Machine
    workload: Workload  # at one request per second
    seed: int
    slo: Slo

    def at(self, rate: float) -> Workload:
        return replace(self.workload, arrival_s=self.workload.arrival_s / rate)

    def simulate(self, settings: Settings, rate: float, on_step: Callable[[], None] = _do_nothing) -> Summary:
        """`on_step` is called now and then and may raise to end the simulation."""
        return self.simulated(settings, self.at(rate), on_step)

    def simulated(
        self, settings: Settings, workload: Workload, on_step: Callable[[], None] = _do_nothing
    ) -> Summary:
        config = SimConfig(
            machine=self.machine,
            engine=engine_config(self.machine, workload, settings),
            seed=self.seed,
            **host_costs(self.machine.cost),
        )
        record = simulate(config, workload, on_progress=lambda done, total, now_s: on_step())
        return summarize(record, slo=self.slo)


def run_tune(options: TuneOptions) -> None:
    bounds = parse_bounds(options.slo)
    target = writable("--json", options.json)
    task = task_of(options, bounds, machine_of(options.model, options.device, options.cost_model))
    started_s = time.monotonic()
    deadline = Deadline(options.seconds)
    is_interrupted = False
    with status_line("searching") as show:

        def simulated(settings: Settings, rate: float) -> Summary:
            show(f"{len(search.trials)} simulations, now at {format_number(rate)} requests/s")
            return task.simulate(settings, rate, deadline.check)

        start = start_settings(task.machine)
        search = TuneSearch(
            simulated,
            bounds,
            knobs_for(bounds, start),
            max_trials=options.max_trials,
            is_over=lambda: deadline.has_passed,
        )
        try:
            best = _found(search, start, task, options)
            deadline.begin_comparison()
            shown = search.best_of(options.top, best.rate)
        except KeyboardInterrupt:  # what was found in minutes is not lost
            shown = search.best_so_far(options.top, options.rate)
            search.was_cut = is_interrupted = True
    if shown:
        _print(shown, search, bounds, task, options, time.monotonic() - started_s)
        if target is not None:
            _write_json(target, shown, search, options)
    if is_interrupted:
        print(_interrupted(shown, search), file=sys.stderr)
        raise KeyboardInterrupt
    if options.verify:
        verify(options, shown[0], task)


def _found(search: TuneSearch, start: Settings, task: Task, options: TuneOptions) -> Trial:
    if options.rate is None:
        best = search.highest_rate(start, first_rate(task))
    else:
        best = search.most_room(start, options.rate)
    if best is None and search.was_cut:
        raise InputError(
            f"no setting was found to keep {options.slo} in {options.seconds:g} s and {len(search.trials)} "
            "simulations: give more --seconds, or fewer --num-requests"
        )
    if best is None:
        raise InputError(
            f"no setting keeps {options.slo} at any rate, in {len(search.trials)} simulations: loosen the SLO, "
            "take shorter requests, or give --rate to see what comes closest"
        )
    return best


def _interrupted(shown: Sequence[Trial], search: TuneSearch) -> str:
    if shown:
        return "Cut short: this is the best of what was tried so far, and a whole search may find better."
    return f"Cut short after {len(search.trials)} simulations, before anything kept the SLO."


def parse_bounds(text: str) -> tuple[Bound, ...]:
    """`ttft_p99=1s,itl_p99=50ms` as values. A number alone is seconds; a measure alone is its p99."""
    bounds: dict[str, Bound] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        measure, _, percentile = name.strip().partition("_")
        found = _TIME.fullmatch(value.strip())
        bound = None
        if measure in MEASURES and (percentile or "p99") in PERCENTILES and found is not None:
            seconds = float(found[1]) * (1e-3 if found[2] == "ms" else 1.0)
            bound = Bound(measure=measure, percentile=percentile or "p99", seconds=seconds)
        if bound is None or bound.seconds <= 0.0 or bound.name in bounds:
            raise InputError(
                f"--slo '{part}' is not understood; give each bound once, as in --slo "
                "ttft_p99=1s,itl_p99=50ms,e2e_p50=20s"
            )
        bounds[bound.name] = bound
    if not bounds:
        raise InputError("say what to keep: --slo ttft_p99=1s,itl_p99=50ms")
    return tuple(bounds.values())


def knobs_for(bounds: Sequence[Bound], start: Settings) -> tuple[Knob, ...]:
    """What is turned, and how far, of what there is at the start. Paces are tried around what must lie between two
    tokens."""
    between_ms = min((1e3 * bound.seconds for bound in bounds if bound.measure == "itl"), default=None)
    values = {name: setting.values for name, setting in SETTINGS.items() if name in start}
    if between_ms is not None and "step_target_ms" in values:
        values["step_target_ms"] = tuple(round(between_ms * share, 3) for share in PACE_SHARES)
    return tuple(Knob(name=name, values=tried) for name, tried in values.items())


def serve_flags(settings: Settings) -> str:
    """As they stand behind `paceline serve`."""
    return " ".join(f"--{name.replace('_', '-')} {shown_value(value)}" for name, value in settings.items())


def task_of(options: TuneOptions, bounds: Sequence[Bound], machine: Machine) -> Task:
    has_times = options.arrivals == "recorded" and ":" not in options.trace
    workload = load_workload(
        options.trace,
        num_requests=_num_requests(options),
        seed=options.seed,
        rate=None if has_times else 1.0,  # scaled afterwards
        arrivals=options.arrivals,
    )
    if options.num_requests is None:
        workload = workload.head(DEFAULT_REQUESTS)
    if not 0.0 < workload.rate < math.inf:
        raise InputError(
            f"{workload.name}: its requests all arrive at once, so that there is no rate; give --arrivals poisson"
        )
    first_s = workload.arrival_s[0]
    workload = replace(workload, arrival_s=(workload.arrival_s - first_s) * workload.rate)
    slo = Slo(**{f"{bound.measure}_s": bound.seconds for bound in bounds})
    return Task(machine=machine, workload=workload, seed=options.seed, slo=slo)


def _num_requests(options: TuneOptions) -> int | None:
    if options.num_requests is None and (options.trace in GENERATORS or ":" in options.trace):
        return DEFAULT_REQUESTS
    return options.num_requests


def start_settings(machine: Machine) -> dict[str, Value]:
    """What an engine has without any of these options. Larger steps while no row decodes are for CPUs alone."""
    declared = SchedulerConfig()
    recorded: dict[str, int] = getattr(machine.cost, "engine", {})
    found: dict[str, Value] = {name: recorded.get(name, getattr(declared, name)) for name in SETTINGS}
    found["step_target_ms"] = 0.0
    if not found["max_num_prompt_tokens"]:
        del found["max_num_prompt_tokens"]
    return found


def first_rate(task: Task) -> float:
    """A rate to begin with: the requests that small hardware runs at once, by the time one takes alone."""
    few = replace(task, workload=task.workload.head(FEW_REQUESTS))
    alone = few.simulate(start_settings(task.machine), LEAST_RATE)
    mean_s = alone.e2e_s.mean
    return AT_ONCE / mean_s if mean_s else 1.0


def _print(
    shown: Sequence[Trial],
    search: TuneSearch,
    bounds: Sequence[Bound],
    task: Task,
    options: TuneOptions,
    took_s: float,
) -> None:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for name in shown[0].settings:
        table.add_column(SETTINGS[name].heading, justify="right")
    for bound in bounds:
        table.add_column(f"{bound.name.replace('_', ' ')} ms", justify="right")
    for name in ("goodput/s", "tok/s", "SLO"):
        table.add_column(name, justify="right")
    for trial in shown:
        table.add_row(*_cells(trial, bounds))
    best = shown[0]
    where = "" if options.rate is None else ", which was given"
    show_table(
        f"{task.workload.name}: settings at {format_number(best.rate)} requests/s{where}; "
        f"{len(search.trials)} simulations in {took_s:.0f} s{', cut short' if search.was_cut else ''}",
        table,
    )
    if not best.holds:
        print(
            f"None keeps {options.slo} at this rate; the first comes closest ({share_of_slo(best)} of its bounds)."
        )
    print(f"paceline serve {serve_flags(best.settings)}")


def _cells(trial: Trial, bounds: Sequence[Bound]) -> list[str]:
    seen = [bound.seen_s(trial.summary) for bound in bounds]
    return [
        *(shown_value(value) for value in trial.settings.values()),
        *(format_number(None if value is None else 1e3 * value) for value in seen),
        format_number(trial.summary.goodput_per_s or 0.0),
        format_number(trial.summary.output_tokens_per_s or 0.0),
        share_of_slo(trial),
    ]


def share_of_slo(trial: Trial) -> str:
    """How much of its tightest bound a setting uses, with as many digits as it takes to see which side it is on."""
    if trial.pressure == math.inf:
        return "not served"
    for digits in range(MOST_DIGITS):
        text = f"{100 * trial.pressure:.{digits}f}"
        if trial.pressure == 1.0 or float(text) != 100.0:
            return f"{text} %"
    return "100 %" if trial.holds else "just over 100 %"


def shown_value(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _write_json(path: Path, shown: Sequence[Trial], search: TuneSearch, options: TuneOptions) -> None:
    def plain(trial: Trial) -> dict[str, Any]:
        pressure = trial.pressure if math.isfinite(trial.pressure) else None
        return {"settings": dict(trial.settings), "rate": trial.rate, "pressure": pressure}

    value = {
        "format": FORMAT,
        "slo": options.slo,
        "seed": options.seed,
        "flags": serve_flags(shown[0].settings),
        "cut_short": search.was_cut,
        "best": [{**plain(trial), "summary": to_json(trial.summary)} for trial in shown],
        "trials": [plain(trial) for trial in search.trials],
    }
    write_json(path, value)
    print(f"Wrote {path}")


# `paceline tune --verify`: the workload, sent to a live server, and what was seen beside what was predicted.
#
# Owns how much is sent and the table. Sending is `lab.bench.load`'s business.


FEW = 100  # requests, of which one is the p99


def verify(options: TuneOptions, trial: Trial, task: Task) -> None:
    """Send as many requests as fit into the time, and simulate the same ones."""
    server = BenchServer(options.verify, None, COMPLETIONS)  # fails at once where no server answers
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
            server.target, server.model, workload, seed=options.seed, label="seen", keys={"": server.key}
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
    dial, policy = (server_values(connection, path) for path in ("/v1/admin/dial", "/v1/admin/policy"))
    limits = (dial or {}).get("limits") or {}
    found = {name: limits.get(setting.limit) for name, setting in SETTINGS.items()}
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
        for name, value in _as_reported(wanted).items()
        if not _is_same(found[name], value) and not _is_for_the_pace(name, found, wanted)
    ]


def _as_reported(wanted: Settings) -> Settings:
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
