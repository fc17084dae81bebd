"""`paceline sim --calibrate` and `--compare`: a cost model from recorded runs, and the simulator beside a real one.

Owns the order of things, the file's name and the tables. The fit is `costs`' business, repeating a run `lab.sim`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from paceline.cli.flags import split_list, writable, write_json
from paceline.cli.sim.flags import SimOptions
from paceline.cli.sim.run import machine_of
from paceline.cli.sim.view import show_table
from paceline.config.engine import EngineConfig, KVConfig, SchedulerConfig
from paceline.config.options import flag_of, options_of
from paceline.costs.fit import FittedCost
from paceline.errors import InputError
from paceline.lab.report.table import ABSENT, format_number
from paceline.lab.sim import SimConfig, engine_config, host_costs
from paceline.lab.sim.cost_files import Calibration, KindError, calibrate, is_run_log, step_errors
from paceline.lab.sim.recorded import (
    Deviation,
    compare,
    read_client_run,
    read_recorded,
    sim_config,
)

ENDINGS = (".gz", ".jsonl", ".log", ".json")
FORMAT = "paceline-compare"


def run_calibration(options: SimOptions, engine: Mapping[str, Any]) -> None:
    """Fit, compare, or both: then what was fitted to some logs is tried on another."""
    if options.save_costs and not options.calibrate:
        raise InputError("--save-costs says where --calibrate writes: give --calibrate LOG too")
    if options.calibrate and options.cost_model:
        raise InputError("--calibrate makes a cost model and --cost-model takes one: give one of them")
    if not options.calibrate and not options.cost_model:
        raise InputError(
            "--compare needs to know how long steps take: give --cost-model FILE, or --calibrate LOG to make one"
        )
    report = writable("--json", options.json)
    machine = machine_of(options.model, options.device, options.cost_model)
    if options.calibrate:
        machine = replace(machine, cost=_calibrate(options, machine.kv_bytes_per_token))
    if not options.compare:
        return
    if is_run_log(Path(options.compare)):
        recorded = read_recorded(options.compare, own_policy=_own_policy(engine))
        config = sim_config(recorded, machine, host_step_s=options.host_step_s, seed=options.seed)
        comparison = compare(recorded.record, recorded.workload, config)
        _print_comparison(comparison, len(recorded.workload), recorded.num_left_out, options.compare)
        _print_steps(step_errors(machine.cost, options.compare, machine.kv_bytes_per_token))
    else:
        seen = read_client_run(options.compare)
        config = SimConfig(
            machine=machine,
            engine=engine_config(machine, seen.workload, engine),
            seed=options.seed,
            **host_costs(machine.cost, options.host_step_s),
        )
        comparison = compare(seen.record, seen.workload, config)
        _print_comparison(comparison, len(seen.workload), seen.num_left_out, options.compare)
    if report is not None:
        _write_json(report, comparison, options)


def costs_path(options: SimOptions) -> Path:
    """Where a fitted model goes: as asked, or a file of the logs' names in this folder."""
    if options.save_costs:
        return Path(options.save_costs)
    return Path(f"{'+'.join(_bare_name(log) for log in _logs(options))}.costs.json")


def _logs(options: SimOptions) -> list[str]:
    return split_list(options.calibrate, "--calibrate")


def _bare_name(log: str) -> str:
    name = Path(log).name
    for ending in ENDINGS:
        name = name.removesuffix(ending)
    return name


def _calibrate(options: SimOptions, kv_bytes_per_token: int) -> FittedCost:
    path = writable("--save-costs", str(costs_path(options)))
    assert path is not None
    calibration = calibrate(_logs(options), kv_bytes_per_token)
    calibration.cost.save(path)
    _print_calibration(calibration, ", ".join(_logs(options)))
    print(f"Wrote {path}: paceline sim --cost-model {path}")
    return calibration.cost


def _own_policy(engine: Mapping[str, Any]) -> str:
    """The user's own policy that the run had, if any. Everything else about the engine is as it was recorded."""
    named = str(engine.get("scheduling_policy", ""))
    flags = {
        spec.name: flag_of(spec)
        for config in (SchedulerConfig, KVConfig, EngineConfig)
        for spec in options_of(config)
        if spec.name in engine
    }
    if ":" in named:
        del flags["scheduling_policy"]
    if flags:
        raise InputError(
            f"--compare repeats a run with the options it had: leave out {', '.join(flags.values())}"
        )
    return named


def _print_calibration(calibration: Calibration, logs: str) -> None:
    table = _table("steps", "number", "mean ms", "error", "error p90", "bias")
    for kind in calibration.kinds:
        table.add_row(
            kind.kind,
            f"{kind.num_steps:,}",
            format_number(1e3 * kind.mean_s),
            percent(kind.mape),
            percent(kind.p90),
            signed_percent(kind.bias),
        )
    cost = calibration.cost
    show_table(f"Cost model fitted to {logs}", table)
    host_s = cost.host.step_s
    between = "not known" if host_s is None else f"{format_number(1e3 * host_s)} ms"
    print(
        f"Error of steps that were held out: {percent(cost.error.mape)}. Between two steps: {between}. "
        f"Until the engine knows of a request: {format_number(1e3 * cost.host.request_s)} ms."
    )


def _print_comparison(
    comparison: Sequence[Deviation], num_requests: int, num_left_out: int, name: str
) -> None:
    table = comparison_table(comparison)
    show_table(f"{name}: {num_requests:,} requests, as they were and as simulated", table)
    if num_left_out:
        print(f"Left out: {num_left_out:,} requests that got no token.")
    missed = [each.name for each in comparison if each.holds is False]
    print(
        "Every measure is as close as asked."
        if not missed
        else f"Not as close as asked: {', '.join(missed)}."
    )


def _print_steps(kinds: Sequence[KindError]) -> None:
    """Where an error may come from: a model that is wrong about steps, or a machine that was slower or faster then."""
    parts = [f"{kind.kind} {signed_percent(kind.bias)}" for kind in kinds]
    print(f"The model on the steps of this run, sum of predicted against sum of timed: {', '.join(parts)}.")


def comparison_table(found: Sequence[Deviation], *, simulated: str = "simulated") -> Table:
    table = _table("measure", "seen", simulated, "error", "asked")
    for each in found:
        cells = format_number(each.seen), format_number(each.simulated)
        error = ABSENT if each.error is None else signed_percent(each.error)
        style = "bold red" if each.holds is False else ""
        asked = f"within {100 * each.bound:.0f} %"
        table.add_row(f"{each.name} ({each.unit})", *cells, Text(error, style=style), asked)
    return table


def _write_json(path: Path, comparison: Sequence[Deviation], options: SimOptions) -> None:
    value = {
        "format": FORMAT,
        "log": options.compare,
        "cost_model": options.cost_model or options.calibrate,
        "seed": options.seed,
        "measures": [{**asdict(each), "error": each.error} for each in comparison],
    }
    write_json(path, value)
    print(f"Wrote {path}")


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def signed_percent(value: float) -> str:
    """+3.1 %: how much more, or less, than what it is compared with."""
    return f"{100 * value:+.1f} %"


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
