"""`paceline tune --devices N`: into how many ranks and replicas devices are best divided, for an SLO.

A replica is simulated alone, with its share of requests: a router that does not spread them evenly makes all of this
worse, and one that finds prefixes better. Owns which splits are tried and the table. Searches no settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from paceline.cli.flags import writable, write_json
from paceline.cli.sim.view import show_table
from paceline.cli.terminal import status_line
from paceline.cli.tune.flags import TuneOptions
from paceline.cli.tune.run import (
    Deadline,
    first_rate,
    parse_bounds,
    share_of_slo,
    start_settings,
    task_of,
)
from paceline.costs.network import link_of, possible_ranks
from paceline.costs.presets import device_spec, model_shape
from paceline.errors import InputError
from paceline.lab.report.summary import Summary
from paceline.lab.report.table import format_number
from paceline.lab.sim import Machine
from paceline.lab.sim.tune import Bound, Settings, Trial, TuneSearch

FORMAT = "paceline-tune-split"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSplit:
    """Replicas of so many ranks each, and what one of them does; no trial: it keeps the SLO at no rate."""

    machine: Machine
    replicas: int
    trial: Trial | None
    was_cut: bool  # there was no time for a higher rate

    @property
    def rate(self) -> float:
        return self.trial.rate * self.replicas if self.trial is not None and self.trial.holds else 0.0


def run_split(options: TuneOptions) -> None:
    bounds = parse_bounds(options.slo)
    target = writable("--json", options.json)
    if options.cost_model:
        raise InputError(
            "--cost-model was fitted to one device: --devices takes --model, --device and --link"
        )
    if options.verify:
        raise InputError("--verify asks one server; leave out --devices")
    machines, too_small = machines_for(options)
    started_s = time.monotonic()
    splits: list[DeviceSplit] = []
    with status_line("searching") as show:
        for machine in machines:
            show(f"{len(splits)} of {len(machines)} splits, now {machine.ranks} ranks")
            splits.append(_best(machine, options, bounds, options.seconds / len(machines)))
    splits.sort(key=lambda split: (-split.rate, split.machine.ranks))
    _print(splits, too_small, bounds, options, time.monotonic() - started_s)
    if target is not None:
        _write_json(target, splits, options)


def machines_for(options: TuneOptions) -> tuple[list[Machine], list[int]]:
    """One for every number of ranks that divides the devices and the model, and the numbers into which it does not
    fit."""
    model, device, link = model_shape(options.model), device_spec(options.device), link_of(options.link)
    found, too_small, problem = [], [], None
    for ranks in possible_ranks(model):
        if options.devices % ranks:
            continue
        machine = Machine.of(model, device, ranks=ranks, link=link)
        try:
            machine.num_blocks(machine.block_size)
        except InputError as error:
            problem = error
            too_small.append(ranks)
        else:
            found.append(machine)
    if not found and problem is not None:
        raise problem
    return found, too_small


def _best(machine: Machine, options: TuneOptions, bounds: Sequence[Bound], seconds: float) -> DeviceSplit:
    """At the highest rate that one replica keeps the SLO, or at its part of a given one."""
    deadline = Deadline(seconds)
    replicas = options.devices // machine.ranks
    task = task_of(options, bounds, machine)

    def simulated(settings: Settings, rate: float) -> Summary:
        return task.simulate(settings, rate, deadline.check)

    search = TuneSearch(
        simulated, bounds, (), max_trials=options.max_trials, is_over=lambda: deadline.has_passed
    )
    start = start_settings(machine)
    if options.rate is None:
        trial = search.highest_rate(start, first_rate(task))
    else:
        trial = search.most_room(start, options.rate / replicas)
    return DeviceSplit(machine=machine, replicas=replicas, trial=trial, was_cut=search.was_cut)


def _print(
    splits: Sequence[DeviceSplit],
    too_small: Sequence[int],
    bounds: Sequence[Bound],
    options: TuneOptions,
    took_s: float,
) -> None:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for name in (
        "ranks",
        "replicas",
        "requests/s",
        *(f"{bound.name.replace('_', ' ')} ms" for bound in bounds),
    ):
        table.add_column(name, justify="right")
    for name in ("tok/s", "SLO"):
        table.add_column(name, justify="right")
    for split in splits:
        table.add_row(*_cells(split, bounds))
    show_table(
        f"{options.trace}: {options.devices} x {options.device}, {options.model} over {options.link}; "
        f"{took_s:.0f} s",
        table,
    )
    for split in splits:
        if split.was_cut:
            print(f"{split.machine.ranks} ranks: cut short, it may keep a higher rate; give more --seconds.")
    for ranks in too_small:
        print(f"The model does not fit on {ranks} of these devices.")
    best = splits[0]
    if not best.rate:
        print(f"No split was found to keep {options.slo}.")
    else:
        name = f"{best.machine.ranks} rank{'s' * (best.machine.ranks > 1)}"
        print(f"Best: {best.replicas} replica{'s' * (best.replicas > 1)} of {name}.")


def _cells(split: DeviceSplit, bounds: Sequence[Bound]) -> list[str]:
    trial = split.trial
    start = [str(split.machine.ranks), str(split.replicas)]
    if trial is None:
        return [*start, *("" for _ in range(len(bounds) + 2)), "no time" if split.was_cut else "not kept"]
    seen = [bound.seen_s(trial.summary) for bound in bounds]
    return [
        *start,
        format_number(trial.rate * split.replicas),
        *(format_number(None if value is None else 1e3 * value) for value in seen),
        format_number(split.replicas * (trial.summary.output_tokens_per_s or 0.0)),
        share_of_slo(trial),
    ]


def _write_json(path: Path, splits: Sequence[DeviceSplit], options: TuneOptions) -> None:
    value = {
        "format": FORMAT,
        "slo": options.slo,
        "seed": options.seed,
        "splits": [
            {"ranks": split.machine.ranks, "replicas": split.replicas, "rate": split.rate} for split in splits
        ],
    }
    write_json(path, value)
    print(f"Wrote {path}")
