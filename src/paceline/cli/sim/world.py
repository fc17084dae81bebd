"""`paceline sim --world FILE`: a world from its file, the curve of its replicas, its day, and tables of both.

Owns the file of curves, the order of things and the tables. What a world is and does is `lab.world`'s business.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from paceline.cli.flags import command_line, writable, write_json
from paceline.cli.sim.flags import SimOptions
from paceline.cli.sim.view import show_table
from paceline.costs.network import link_of
from paceline.costs.presets import device_spec, model_shape
from paceline.errors import InputError
from paceline.lab.report.table import format_number
from paceline.lab.sim import Machine
from paceline.lab.world.bottlenecks import limits
from paceline.lab.world.curve import ReplicaCurve, ReplicaMix, measure_curve, read_curve, write_curve
from paceline.lab.world.day import Day, live
from paceline.lab.world.exact import compare_with_exact
from paceline.lab.world.replica_counts import ReplicaCounts, sizes_for
from paceline.lab.world.world_file import World, read_world
from paceline.version import __version__

FORMAT = "paceline-world"
MEASURES = {
    "goodput_per_s": "goodput, requests/s",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p99_s": "TTFT p99, s",
    "most_at_once": "requests at once",
}
HOURS_SHOWN = 12


def run_world(options: SimOptions) -> None:
    target = writable("--json", options.json)
    path = Path(options.world)
    world = load_world(path)
    mix = mix_of(world)
    curves = Path(options.curves) if options.curves else path.with_suffix(".curves.json")
    curve, error = _curve(mix, curves)
    _print_error(error)
    started_s = time.process_time()
    day = live(world, curve, on_hour=lambda hour: _say(f"hour {hour} of {world.hours:g}"))
    took_s = time.process_time() - started_s
    share = day.good / day.arrived if day.arrived else 1.0
    sizes = sizes_for(world, curve, share) if world.follows_the_sun and len(world.regions) > 1 else None
    _print_day(day, path, took_s)
    _print_limits(day)
    _print_lines(day, sizes)
    if target is not None:
        write_json(target, _as_json(day, error, sizes, took_s))
        print(f"Wrote {target}")


def load_world(path: Path) -> World:
    """What the file says; every mistake names the field."""
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"--world {path} cannot be read: {problem}") from problem
    except (yaml.YAMLError, RecursionError) as problem:
        raise InputError(f"--world {path} is not YAML: {' '.join(str(problem).split())}") from problem
    try:
        return read_world(value)
    except InputError as problem:
        raise InputError(f"{path}: {problem}") from problem


def mix_of(world: World) -> ReplicaMix:
    machine = Machine.of(
        model_shape(world.model), device_spec(world.device), ranks=world.ranks, link=link_of(world.link)
    )
    mix = ReplicaMix(machine=machine, trace=world.trace, engine=world.engine, seed=world.seed)
    mix.config(mix.load(8, None), 1)  # its names and sizes are checked before anything runs
    return mix


def _curve(mix: ReplicaMix, path: Path) -> tuple[ReplicaCurve, Mapping[str, Any]]:
    """From the file, or measured now, which takes minutes, and kept there."""
    known = read_curve(path, mix)
    if known is not None and known[1]:
        return known
    writable("--curves", str(path))
    if known is None:
        curve = measure_curve(mix, _say)
        write_curve(path, mix, curve, {})
    else:
        curve = known[0]
    _say("the exact simulator with 64 replicas, a burst and a dead rack")
    error = compare_with_exact(mix, curve)
    write_curve(path, mix, curve, error)
    return curve, error


def _say(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _print_error(error: Mapping[str, Any]) -> None:
    _say("")
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for name in ("measure", "exact", "flows", "error"):
        table.add_column(name, justify="left" if name == "measure" else "right")
    for name, shown in MEASURES.items():
        exact, flows = error["exact"][name], error["flows"][name]
        table.add_row(shown, format_number(exact), format_number(flows), f"{error['error'][name]:+.1%}")
    show_table("Flows beside the exact simulator: 64 replicas, a burst, and 8 of them die", table)


def _print_day(day: Day, path: Path, took_s: float) -> None:
    world = day.world
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    columns = ["UTC", "at once"]
    for region in world.regions:
        columns += [region.name, "sent on", "rows", "TTFT p99 s"]
    for name in columns:
        table.add_column(name, justify="right")
    each = max(1, len(day.windows) // HOURS_SHOWN)
    for window in day.windows[each // 2 :: each]:
        cells = [f"{window.at_s / 3600.0 % 24.0:.1f}", f"{window.at_once:,.0f}"]
        for number in range(len(world.regions)):
            came = window.came[number] / 10.0
            sent = window.sent_on[number] / max(window.came[number], 1e-9)
            rows = window.rows[number] / max(window.alive[number], 1e-9)
            p99_s = window.ttft_p99_s[number]
            shown = "-" if math.isnan(p99_s) else f"{p99_s:.2f}"
            cells += [f"{came:,.0f}/s", f"{sent:.0%}", f"{rows:.0f}", shown]
        table.add_row(*cells)
    show_table(
        f"{path.name}: {world.num_replicas:,} replicas of {world.model} on {world.ranks} x {world.device}, "
        f"{world.hours:g} h in {took_s:.0f} s; simulated, not measured",
        table,
    )


def _print_limits(day: Day) -> None:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold")
    for name in ("what runs out first", "used at the worst", "in", "UTC"):
        table.add_column(name, justify="left" if name == "what runs out first" else "right")
    for limit in limits(day):
        table.add_row(limit.what, f"{limit.share:.0%}", limit.region, f"{limit.hour % 24.0:.1f}")
    show_table("Limits", table)


def _print_lines(day: Day, sizes: ReplicaCounts | None) -> None:
    most = max(window.at_once for window in day.windows) if day.windows else 0.0
    print(
        f"Requests: {day.arrived:,.0f} came, {day.finished:,.0f} ended, {day.left:,.0f} were under way at the end."
    )
    print(f"At once: {most:,.0f} at most. TTFT: p50 {day.ttft_p50_s:.3f} s, p99 {day.ttft_p99_s:.3f} s.")
    print(f"Within the SLO: {day.good / max(day.arrived, 1e-9):.2%} of requests.")
    print(
        f"Cost: {day.replica_hours:,.0f} replica-hours, {day.cost:,.0f} in all, "
        f"{day.cost_per_million:.3f} per million output tokens."
    )
    for each in day.recoveries:
        region = day.world.regions[each.death.region].name
        what = f"{each.death.racks} rack{'s' * (each.death.racks > 1)}" if each.death.racks else "all"
        when = "not within 600 s" if each.after_s is None else f"within {each.after_s:.0f} s"
        print(
            f"Death of {what} of {region} at {each.death.hour:g} h: {each.resumed:,.0f} requests went on "
            f"elsewhere, none was lost; TTFT p99 {each.before_p99_s:.3f} s before, "
            f"{each.worst_p99_s:.3f} s at the worst, under 1.2 times {when}."
        )
    if sizes is not None:
        print(
            f"To serve {sizes.share:.2%} in time, by what comes and without queues: {sizes.alone:,} replicas where "
            f"regions are alone, {sizes.together:,} where they follow the sun, {sizes.saved:.0%} fewer replica-hours."
        )


def _as_json(
    day: Day, error: Mapping[str, Any], sizes: ReplicaCounts | None, took_s: float
) -> dict[str, Any]:
    def plain(value: object) -> object:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {
        "format": FORMAT,
        "version": __version__,
        "command": command_line(),
        "error": dict(error),
        "cpu_s": took_s,
        "replicas": day.world.num_replicas,
        "arrived": day.arrived,
        "finished": day.finished,
        "left": day.left,
        "good_share": day.good / max(day.arrived, 1e-9),
        "ttft_p50_s": plain(day.ttft_p50_s),
        "ttft_p99_s": plain(day.ttft_p99_s),
        "most_at_once": max((window.at_once for window in day.windows), default=0.0),
        "replica_hours": day.replica_hours,
        "cost_per_million": plain(day.cost_per_million),
        "limits": [asdict(limit) for limit in limits(day)],
        "recoveries": [
            {name: plain(value) for name, value in asdict(each).items()} for each in day.recoveries
        ],
        "sizes": None if sizes is None else {**asdict(sizes), "saved": sizes.saved},
    }
