"""What `paceline sim` leaves behind: tables on standard output, and the files it was asked for.

Owns titles, the layout of the JSON file and the names of the pictures. Destinations are checked before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.cli.flags import command_line, writable, write_json
from paceline.cli.sim.flags import SimOptions
from paceline.cli.sim.run import Result, rate_label
from paceline.errors import InputError
from paceline.lab.report.plots import Curve, curve_point, plot_throughput_latency, plot_timeline
from paceline.lab.report.table import compact_table, comparison_table, format_number, to_json
from paceline.version import __version__

MAX_COLUMNS = 6  # more runs than these are listed one per line
FORMAT = "paceline-sim"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where results go. All of it can be written, as far as one can tell beforehand."""

    json: Path | None
    plot: Path | None
    log: Path | None

    @classmethod
    def checked(cls, options: SimOptions) -> Outputs:
        if options.plot:
            if not options.plot.lower().endswith(".png"):
                raise InputError(
                    f"--plot {options.plot}: pictures are PNG files; give a name that ends in .png"
                )
            if find_spec("matplotlib") is None:
                raise InputError("--plot needs matplotlib: pip install matplotlib")
        return cls(
            json=writable("--json", options.json),
            plot=writable("--plot", options.plot),
            log=writable("--log", options.log),
        )


def print_results(results: Sequence[Result], options: SimOptions) -> None:
    requested = [result for result in results if result.run.requested]
    several = len({result.run.rate for result in requested}) > 1
    show_table(_title(requested[0], options, several=several), _table(requested))
    for result in requested:
        spent = result.device_s
        if spent:
            parts = ", ".join(f"{name} {spent[name] / sum(spent.values()):.1%}" for name in spent)
            print(f"{result.run.label}: the device's time went to {parts}")
    if len(requested) < len(results):
        named = [
            replace(result.summary, label=rate_label(result.run.series, result.run.rate))
            for result in results
        ]
        show_table("Around that rate", compact_table(named))
    for line in [*_knee_lines(results), *_rank_lines(requested)]:
        print(line)
    if options.check:
        print(f"Every invariant held, in every step of {len(results)} run{'s' * (len(results) > 1)}.")


def write_files(results: Sequence[Result], options: SimOptions, outputs: Outputs) -> None:
    """Write what was asked for; the last line printed names it."""
    written: list[Path] = []
    if outputs.json is not None:
        _write_json(results, options, outputs.json)
        written.append(outputs.json)
    if outputs.plot is not None:
        written += _write_plots(results, outputs.plot)
    if outputs.log is not None:
        written.append(outputs.log)
    if written:
        print("Wrote " + ", ".join(str(path) for path in written))


def _table(results: Sequence[Result]) -> Table:
    summaries = [result.summary for result in results]
    return (comparison_table if len(summaries) <= MAX_COLUMNS else compact_table)(summaries)


def _title(result: Result, options: SimOptions, *, several: bool) -> str:
    run = result.run
    when = "all at once" if run.rate is None else f"at {format_number(run.rate)}/s"
    replicas = f"{options.replicas} x " if options.replicas > 1 else ""
    return (
        f"{run.workload.name}: {sum(result.summary.requests.values()):,} requests "
        f"{'at several rates' if several else when}, {run.config.machine.model.name} on "
        f"{replicas}{run.config.machine.device.name}, seed {run.config.seed}"
    )


def show_table(title: str, table: Table) -> None:
    """A title and its table on standard output."""
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width: lose nothing
        console = Console(width=max(80, len(title), Console(width=10_000).measure(table).maximum))
    console.print(Text(title, style="bold"))
    console.print(table)


def _knee_lines(results: Sequence[Result]) -> list[str]:
    lines = []
    for curve in _curves(results):
        rates = [point.rate for point in curve.points]
        if len(rates) > 1:
            knee = curve.knee
            seen = f"not between {min(rates):.4g} and {max(rates):.4g}/s" if knee is None else f"{knee:.4g}/s"
            lines.append(f"Knee of {curve.label} (the rate after which p99 TTFT doubles): {seen}")
    return lines


def _rank_lines(results: Sequence[Result]) -> list[str]:
    """What more ranks bring, beside the fewest of the same rate."""
    machine_of = {result.run.label: result.run.config.machine for result in results}
    lines = []
    for rate in dict.fromkeys(result.run.rate for result in results):
        alike = [result for result in results if result.run.rate == rate]
        least = min(alike, key=lambda result: result.run.config.machine.ranks)
        for result in alike:
            ranks, of = (machine_of[each.run.label].ranks for each in (result, least))
            rates = [each.summary.output_tokens_per_s for each in (result, least)]
            if ranks > of and rates[0] and rates[1] and result.run.mode == least.run.mode:
                lines.append(
                    f"{result.run.label}: {rates[0] / rates[1]:.2f} times the output tokens/s of tp {of}"
                )
    return lines


def _curves(results: Sequence[Result]) -> list[Curve]:
    curves = []
    for series in dict.fromkeys(result.run.series for result in results):
        points = [
            curve_point(result.run.rate, result.summary)
            for result in results
            if result.run.series == series and result.run.rate is not None
        ]
        curves.append(Curve(label=series, points=points))
    return curves


def _write_json(results: Sequence[Result], options: SimOptions, path: Path) -> None:
    value = {
        "format": FORMAT,
        "version": __version__,
        "command": command_line(),
        "seed": options.seed,
        "runs": [_run_json(result) for result in results],
        "knees": {curve.label: curve.knee for curve in _curves(results) if len(curve.points) > 1},
    }
    write_json(path, value)


def _run_json(result: Result) -> dict[str, object]:
    run = result.run
    workload = run.workload
    return {
        "label": run.label,
        "mode": run.mode,
        "rate": run.rate,
        "workload": {
            "name": workload.name,
            "num_requests": len(workload),
            "prompt_tokens": int(workload.prompt_len.sum(dtype="int64")),
            "output_tokens": int(workload.output_len.sum(dtype="int64")),
        },
        "config": run.config.described(),
        "summary": to_json(result.summary),
    }


def _write_plots(results: Sequence[Result], path: Path) -> list[Path]:
    run = results[0].run
    machine = run.config.machine
    title = f"{run.workload.name}: {machine.model.name} on {machine.device.name}"
    plot_throughput_latency(_curves(results), path, title=title)
    written = [path]
    kept = [result for result in results if result.record is not None]
    for result in kept:
        name = (
            ".timeline.png" if result is kept[0] else f".timeline.{result.run.series.replace(' ', '-')}.png"
        )
        timeline = path.with_suffix(name)
        assert result.record is not None
        plot_timeline(result.record, timeline, title=f"{title}, {result.run.series}")
        written.append(timeline)
    return written
